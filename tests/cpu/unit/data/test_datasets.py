"""Examples from files, and prompts through chat templates."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from trainer.config import DataConfig, SFTConfig
from trainer.data.datasets import check_files, load_prompts, load_rows, read_examples
from trainer.data.examples import load_train
from trainer.errors import UserError
from trainer.models.tokenizer import load_tokenizer

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def files(*names: str, **options) -> DataConfig:
    return DataConfig(train_files=list(names), **options)


def test_jsonl_rows_in_order(tmp_path):
    first = jsonl(tmp_path / "a.jsonl", {"prompt": "é", "answer": "1"}, {"prompt": CHAT, "answer": 2, "more": None})
    second = tmp_path / "b.jsonl"
    second.write_text('\n{"prompt": "c", "answer": 3.5}\n\n')
    assert read_examples(files(first, str(second)), "train") == [
        {"prompt": "é", "answer": "1", "row": {"prompt": "é", "answer": "1"}},
        {"prompt": CHAT, "answer": "2", "row": {"prompt": CHAT, "answer": 2, "more": None}},
        {"prompt": "c", "answer": "3.5", "row": {"prompt": "c", "answer": 3.5}},
    ]


def test_rows_for_an_environment_may_have_any_columns(tmp_path):
    data = files(jsonl(tmp_path / "a.jsonl", {"below": 4}, {"x": [1]}, {"prompt": "c", "answer": "d"}), train_size=2)
    check_files(data, validation=False, as_rows=True)
    assert [(prompt.index, prompt.row) for prompt in load_rows(data, "train").prompts] == [
        (0, {"below": 4}),
        (1, {"x": [1]}),
    ]
    with pytest.raises(UserError, match="prompt"):
        check_files(data, validation=False)
    with pytest.raises(UserError, match="a.jsonl:1 must be an object"):
        load_rows(files(jsonl(tmp_path / "a.jsonl", [1])), "train")
    generated = load_rows(DataConfig(synthetic="reverse_text", train_size=3), "train").prompts
    assert all(prompt.row["answer"] == prompt.row["prompt"][::-1] for prompt in generated)


def test_parquet_rows_are_those_of_jsonl(tmp_path):
    rows = [{"question": "a", "final": "1"}, {"question": "b", "final": "2"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a[1].parquet")
    keys = {"prompt_key": "question", "answer_key": "final"}
    assert read_examples(files(str(tmp_path / "a[1].parquet"), **keys), "train") == read_examples(
        files(jsonl(tmp_path / "a.jsonl", *rows), **keys), "train"
    )


@pytest.mark.parametrize("kind", [pyarrow.ipc.new_file, pyarrow.ipc.new_stream])
def test_arrow_rows_are_those_of_jsonl(tmp_path, kind):
    """As Feather and this project write them, and as the library `datasets` does."""
    rows = [{"prompt": f"é{i}", "answer": str(i)} for i in range(150)]
    table = pyarrow.Table.from_pylist(rows)
    with kind(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    expected = read_examples(files(jsonl(tmp_path / "a.jsonl", *rows)), "train")
    assert read_examples(files(str(tmp_path / "a.arrow")), "train") == expected
    data = (tmp_path / "a.arrow").read_bytes()
    for content in (b"", data[:20], data[: len(data) // 2]):
        (tmp_path / "b.arrow").write_bytes(content)
        with pytest.raises(UserError, match="data.train_files=.*b.arrow: is (not an Arrow file|empty)"):
            read_examples(files(str(tmp_path / "b.arrow")), "train")


def test_parquet_chats(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": CHAT, "answer": 4}]), str(tmp_path / "a.parquet"))
    assert read_examples(files(str(tmp_path / "a.parquet")), "train") == [
        {"prompt": CHAT, "answer": "4", "row": {"prompt": CHAT, "answer": 4}}
    ]


def test_size_cuts_and_stops_reading(tmp_path):
    rows = [{"prompt": str(i), "answer": ""} for i in range(5)]
    first = jsonl(tmp_path / "a.jsonl", *rows)
    with open(first, "a") as file:
        file.write("not JSON\n")
    assert len(read_examples(files(first, train_size=5), "train")) == 5
    assert len(read_examples(files(first, train_size=2), "train")) == 2
    val = DataConfig(train_files=["unread"], val_files=[first], train_size=1, val_size=3)
    assert len(read_examples(val, "val")) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "data.train_files={file}: is empty"),
        (b"\n \n", "data.train_files={file}: is empty"),
        (b'{"prompt": "a", "answer": "b"}\n\n{"prompt": ', "data.train_files: {file}:3 is not JSON .*"),
        (b'{"prompt": "a",\n', "data.train_files: {file}:1 is not JSON .Expecting .* at column 16."),
        (b'{"prompt": "\xff", "answer": "b"}', "data.train_files: {file}:1 is not JSON .*"),
        (b'{"prompt": "\\ud800", "answer": "b"}', "{file}:1: contains half of a surrogate pair.*"),
        (b'{"prompt": [{"role": "\\ud800", "content": "a"}], "answer": "b"}', "{file}:1: contains half of a .*"),
        (b"[1, 2]", "data.prompt_key=prompt: {file}:1 must be an object with prompt and answer"),
        (b'{"question": "a", "answer": "b"}', "data.prompt_key=prompt: {file}:1 has no such key; it has question, .*"),
        (b'{"prompt": "a", "text": "b"}', "data.answer_key=answer: {file}:1 has no such key; it has prompt, text"),
        (b'{"prompt": 3, "answer": "b"}', "data.prompt_key=prompt: {file}:1 must have a string, or .* chat messages.*"),
        (b'{"prompt": [], "answer": "b"}', "data.prompt_key=prompt: {file}:1 must have a string.*"),
        (b'{"prompt": ["a"], "answer": "b"}', "data.prompt_key=prompt: {file}:1 must have a string.*"),
        (b'{"prompt": [{"role": "user"}], "answer": "b"}', "data.prompt_key=prompt: {file}:1 must have a string.*"),
        (b'{"prompt": [{"role": "user", "content": 1}], "answer": "b"}', "data.prompt_key=prompt: {file}:1 must.*"),
        (b'{"prompt": "a", "answer": null}', "data.answer_key=answer: {file}:1 must have a string or .*, not NoneType"),
        (b'{"prompt": "a", "answer": ["b"]}', "data.answer_key=answer: {file}:1 must have a string or .*, not list"),
    ],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path, content, message):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_examples(files(str(file)), "train")
    assert_matches(message.format(file=file), error)


def test_the_rest_of_a_large_file_is_checked_when_it_is_read(tmp_path):
    rows = [{"prompt": "a", "answer": "b"}] * 1000 + [{"prompt": "a", "answer": None}] * 2
    file = jsonl(tmp_path / "large.jsonl", *rows)
    check_files(files(file), validation=False)
    with pytest.raises(UserError, match="large.*:1001 must have a string or "):
        read_examples(files(file), "train")


def assert_matches(pattern: str, error) -> None:
    text = str(error.value)
    assert re.fullmatch(pattern.replace("[", r"\["), text), text
    assert "\n" not in text


@pytest.mark.parametrize("name", ["pipe.jsonl", "zero.jsonl", "zero.parquet", "folder.jsonl"])
def test_data_that_is_no_file_is_refused_before_it_is_read(tmp_path, name):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    for zero in ("zero.jsonl", "zero.parquet"):
        (tmp_path / zero).symlink_to("/dev/zero")
    with pytest.raises(UserError, match=rf"^data.train_files=.*{name}: is no regular file.*; .*write it"):
        check_files(DataConfig(train_files=[str(tmp_path / name)], val_files=[]), validation=False)


def test_bad_names_are_refused():
    for name, message in [
        (
            "missing.jsonl",
            f"data.train_files=missing.jsonl: no such file in {os.getcwd()}; correct the path, or set hf://.*",
        ),
        ("/missing.jsonl", "data.train_files=/missing.jsonl: no such file; correct the path, or set hf://.*"),
        ("missing.csv", "data.train_files=missing.csv: must end in .jsonl, .parquet or .arrow, or be hf://.*"),
        ("openai/gsm8k", "data.train_files=openai/gsm8k: must end in .* or be hf://.*"),
        ("hf://a/b?name=c", "data.train_files=hf://a/b.name=c: takes config, split and revision, not name"),
        ("hf://a/b?revision=main", "data.train_files=hf://a/b.revision=main: revision must be a commit, of 40 hex.*"),
        ("hf://", "data.train_files=hf://: cannot be loaded from the Hub .*"),
    ]:
        with pytest.raises(UserError) as error:
            read_examples(files(name), "train")
        assert_matches(message, error)


def test_no_file_is_refused():
    with pytest.raises(UserError, match="data.val_files: names no file"):
        read_examples(DataConfig(), "val")


def test_bad_parquet_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("PAR1 not really PAR1")
    with pytest.raises(UserError, match="data.train_files=.*a.parquet: is not a Parquet file"):
        read_examples(files(str(tmp_path / "a.parquet")), "train")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [], "answer": []}), str(tmp_path / "b.parquet"))
    with pytest.raises(UserError, match="data.train_files=.*b.parquet: is empty"):
        read_examples(files(str(tmp_path / "b.parquet")), "train")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"]}), str(tmp_path / "c.parquet"))
    with pytest.raises(UserError, match="data.answer_key=answer: .*c.parquet, row 1 has no such key; it has prompt"):
        read_examples(files(str(tmp_path / "c.parquet")), "train")


def test_prompts_go_through_the_chat_template(tmp_path, tokenizer):
    data = files(jsonl(tmp_path / "a.jsonl", {"prompt": "hé", "answer": "x"}, {"prompt": CHAT, "answer": "y"}))
    first, second = load_prompts(data, "train", tokenizer, 100).prompts
    assert tokenizer.decode(first.token_ids) == "<|user|>hé<|assistant|>"
    assert (first.index, first.text, first.answer) == (0, "hé", "x")
    assert tokenizer.decode(second.token_ids) == "<|system|>Be brief.<|user|>2+2?<|assistant|>"
    assert (second.index, second.text, second.answer) == (1, "2+2?", "y")
    data.system_prompt = "Think."
    assert tokenizer.decode(load_prompts(data, "train", tokenizer, 100).prompts[0].token_ids) == (
        "<|system|>Think.<|user|>hé<|assistant|>"
    )


def test_over_long_prompts_are_dropped_and_counted(tmp_path, tokenizer):
    lengths = [3, 9, 10, 11, 5]
    data = files(jsonl(tmp_path / "a.jsonl", *({"prompt": "x" * n, "answer": ""} for n in lengths)))
    found = load_prompts(data, "train", tokenizer, 12)  # two are the template's
    assert [len(p.text) for p in found.prompts] == [3, 9, 10, 5]
    assert [p.index for p in found.prompts] == [0, 1, 2, 4]
    assert found.dropped == 1 and load_prompts(data, "train", tokenizer, 13).dropped_line(13) == ""
    line = "1 prompt is longer than rollout.max_prompt_tokens=12, of 5, and left out; the first is row 4"
    assert found.dropped_line(12) == line
    assert load_prompts(data, "train", tokenizer, 10).dropped_line(10).startswith("3 prompts are longer than ")
    assert load_prompts(data, "train", tokenizer, 10).dropped_line(10).endswith("; the first is row 2")
    with pytest.raises(UserError, match="rollout.max_prompt_tokens=4: all 5 train prompts are longer; .* has 5 tokens"):
        load_prompts(data, "train", tokenizer, 4)
    with pytest.raises(UserError, match="sft.max_length=5: all 5 training prompts fill it"):
        load_train(data, SFTConfig(max_length=5), tokenizer, [tokenizer.eos_token_id])


def test_a_template_that_refuses_a_chat_is_named(tmp_path, model):
    template = tmp_path / "strict.jinja"
    template.write_text("{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system!') }}{% endif %}hi a")
    strict = load_tokenizer(model, str(template))
    data = files(jsonl(tmp_path / "a.jsonl", {"prompt": "a", "answer": "b"}))
    assert strict.decode(load_prompts(data, "train", strict, 9).prompts[0].token_ids) == "hi a"
    data.system_prompt = "Think."
    with pytest.raises(UserError, match="model.chat_template: .* system, user .No system!"):
        load_prompts(data, "train", strict, 9)


def test_calls_and_tools_of_a_prompt_are_written_by_the_template(tmp_path, model):
    """A `content` that is null beside calls is an empty text, and other fields that are null are none."""
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{{ tools | tojson }}{{ mood }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% if 'tool_calls' in m %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = load_tokenizer(model, str(template))
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
    chat = [
        {"role": "user", "content": "a", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    row = {"prompt": chat, "answer": "b", "tools": '[{"name": "f"}]', "chat_template_kwargs": {"mood": "!"}}
    found = load_prompts(files(jsonl(tmp_path / "a.jsonl", row)), "train", tokenizer, 999).prompts[0]
    expected = '[{"name": "f"}]!<|user|>a<|assistant|>{"x": null}<|tool|>1<|assistant|>'
    assert tokenizer.decode(found.token_ids) == expected
    for changed, problem in (
        ({"tools": ["hammer"]}, "a.jsonl:1: the column tools must have a list of tools as JSON schemas"),
        ({"chat_template_kwargs": "x"}, "a.jsonl:1: the column chat_template_kwargs must have an object"),
        ({"prompt": [{"role": "user", "content": None}]}, "data.prompt_key=prompt: .*a.jsonl:1 must have a string"),
    ):
        with pytest.raises(UserError, match=problem):
            load_prompts(files(jsonl(tmp_path / "a.jsonl", row | changed)), "train", tokenizer, 999)


def test_prompts_that_a_template_loses_are_refused_or_named(tmp_path, model, caplog):
    template = tmp_path / "t.jinja"
    rows = [{"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": word}], "answer": "x"}
            for word in ("first", "second")]  # fmt: skip
    data = files(jsonl(tmp_path / "a.jsonl", *rows))

    def load(text: str) -> list[str]:
        template.write_text(text)
        tokenizer = load_tokenizer(model, str(template))
        return [tokenizer.decode(one.token_ids) for one in load_prompts(data, "train", tokenizer, 99).prompts]

    with pytest.raises(UserError, match="model.chat_template: .*writes nothing of what the user says in .*a.jsonl:1"):
        load("Hello{% if add_generation_prompt %}<|assistant|>{% endif %}")
    with pytest.raises(UserError, match="model.chat_template: .* writes no generation prompt, and '<.ass"):
        load("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}")
    ignores = "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    assert load(ignores) == ["<|user|>first<|assistant|>", "<|user|>second<|assistant|>"]
    [line] = caplog.messages
    assert "does not see all of 2 of 2 prompts: a message of the role system is left out; the first is" in line
    assert line.endswith("a.jsonl:1")
    data.system_prompt = "Think."
    with pytest.raises(UserError, match="data.system_prompt: the chat template in use .* does not write it"):
        load(ignores)


def test_a_prompt_without_a_token_is_refused_by_its_line(tmp_path, model):
    template = tmp_path / "bare.jinja"
    template.write_text("{{ messages[-1]['content'].strip() }}")
    bare = load_tokenizer(model, str(template))
    first = jsonl(tmp_path / "a.jsonl", {"prompt": "a", "answer": "b"})
    second = tmp_path / "b.jsonl"
    second.write_text('{"prompt": "c", "answer": "d"}\n\n{"prompt": " ", "answer": "f"}\n')
    with pytest.raises(UserError) as refused:
        load_prompts(files(first, str(second)), "train", bare, 9)
    assert str(refused.value) == (
        f"data.prompt_key=prompt: {second}:3 has a prompt of which the chat template writes no token"
    )
    assert len(load_prompts(files(first, str(second), train_size=2), "train", bare, 9).prompts) == 2


@pytest.mark.parametrize(
    "row, key",
    [
        ({"prompt": "", "answer": "b"}, "prompt_key=prompt"),
        ({"prompt": [{"role": "user", "content": ""}], "answer": "b"}, "prompt_key=prompt"),
        ({"chat": [{"role": "user", "content": ""}, {"role": "assistant", "content": "b"}]}, "messages_key=chat"),
    ],
)
def test_a_prompt_without_a_text_is_refused_unless_there_is_a_system_prompt(tmp_path, model, row, key):
    path, tokenizer = jsonl(tmp_path / "a.jsonl", row), load_tokenizer(model)
    columns = {"messages_key": "chat"} if "chat" in row else {}
    with pytest.raises(UserError, match=rf"^data.{key}: \S+a.jsonl:1 has an empty prompt$"):
        load_prompts(files(path, **columns), "train", tokenizer, 99)
    assert load_prompts(files(path, system_prompt="Write a poem.", **columns), "train", tokenizer, 99).prompts
    assert read_examples(files(path, **columns), "train"), "an example to train on may have no prompt"


def test_files_are_checked_before_anything_starts(tmp_path):
    file = tmp_path / "few.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n' * 3 + "{\n")
    data = DataConfig(train_files=[str(file)], val_files=[str(tmp_path / "none.jsonl")], val_size=4)
    with pytest.raises(UserError, match="data.train_files: .*few.jsonl:4 is not JSON"):
        check_files(data)
    data.train_size = 3  # the rest is not read
    with pytest.raises(UserError, match="data.val_files=.*none.jsonl: no such file"):
        check_files(data)
    check_files(data, validation=False)
    data.prompt_key = "question"
    with pytest.raises(UserError, match="data.prompt_key=question: .*few.jsonl:1 has no such key"):
        check_files(data, validation=False)
    check_files(data, examples=False, validation=False)
