"""Tokenizers of model directories, and the tokens that end a completion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trainer.errors import UserError
from trainer.models.tokenizer import load_tokenizer, stop_token_ids


def test_tokenizers_that_cannot_serve_are_refused(tmp_path, model):
    with pytest.raises(UserError, match="model.path=.*missing: no such directory; name a directory"):
        load_tokenizer(str(tmp_path / "missing"))
    weights_only = tmp_path / "weights"
    weights_only.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(f"{model}/{name}", weights_only)
    template = tmp_path / "t.jinja"
    template.write_text("x")
    for chat_template in (None, str(template)):
        with pytest.raises(UserError, match="model.path=.*weights: .* no tokenizer"):
            load_tokenizer(str(weights_only), chat_template)
    no_template = tmp_path / "no_template"
    shutil.copytree(model, no_template)
    (no_template / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no_template: .*no chat template; name a Jinja file in model.chat_template"):
        load_tokenizer(str(no_template))
    assert load_tokenizer(str(no_template), str(template)).chat_template == "x"
    with pytest.raises(UserError, match="model.chat_template=.*none.jinja: cannot be read"):
        load_tokenizer(model, str(tmp_path / "none.jinja"))


def test_end_and_pad_tokens(tmp_path, model):
    changed = tmp_path / "changed"
    shutil.copytree(model, changed)
    config = json.loads((changed / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (changed / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(changed))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    del config["eos_token"]
    (changed / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no end-of-sequence token"):
        load_tokenizer(str(changed))


def test_every_end_token_of_the_model_stops_a_completion(tmp_path, model):
    tokenizer = load_tokenizer(model)
    eos = tokenizer.eos_token_id
    assert stop_token_ids(model, tokenizer) == (eos,)
    changed = tmp_path / "changed"
    shutil.copytree(model, changed)
    for named, expected in ([7, eos], (eos, 7)), (9, (eos, 9)), (None, (eos,)):
        (changed / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert stop_token_ids(str(changed), tokenizer) == expected


def with_config(model: str, folder: Path, **changes) -> str:
    """A copy of the model with other fields of its `config.json`, without a generation config."""
    shutil.copytree(model, folder)
    (folder / "generation_config.json").unlink()
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(folder)


def test_end_tokens_of_the_model_config_stop_a_completion(tmp_path, model):
    tokenizer = load_tokenizer(model)
    eos = tokenizer.eos_token_id
    for number, (changes, expected) in enumerate(
        [
            ({"eos_token_id": [5, eos]}, (eos, 5)),
            ({"eos_token_id": -1}, (eos,)),
            ({"text_config": {"eos_token_id": 6}}, (eos, 6)),
        ]
    ):
        assert stop_token_ids(with_config(model, tmp_path / str(number), **changes), tokenizer) == expected


REPLY = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}END{% endif %}{% endfor %}"
CALLS = REPLY.replace(
    "END", "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}<done>{% endfor %}<eoc>"
)


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (REPLY.replace("END", "<turn>\n"), ["<turn>"]),
        (REPLY.replace("END", "\n<turn>\n{% if loop.last %}<|end|>{% endif %}"), ["<turn>"]),  # Phi-3
        (REPLY.replace("END", "{% if loop.last %}<return>{% else %}<turn>{% endif %}"), ["<return>"]),  # gpt-oss
        (REPLY.replace("END", " text<turn>"), []),
        (REPLY.replace("END", ""), []),
        (CALLS, ["<eoc>"]),
        ("{{ messages[0].content }}", []),
        ("{{ raise_exception('no') }}", []),
    ],
)  # fmt: skip
def test_what_the_template_writes_at_the_end_of_a_reply_stops_a_completion(tmp_path, model, template, ends):
    file = tmp_path / "t.jinja"
    file.write_text(template)
    tokenizer = load_tokenizer(model, str(file))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>", "<return>", "<eoc>", "<done>"]})
    expected = (tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, ends))
    assert stop_token_ids(model, tokenizer) == expected


def with_templates(model: str, folder: Path, **templates: str) -> str:
    """A copy of the model with named templates."""
    shutil.copytree(model, folder)
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = templates
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_of_several_templates_one_is_chosen_as_transformers_chooses(tmp_path, model):
    """Each gets the variables, and a fixed day."""
    several = with_templates(
        model, tmp_path / "m", default="{{ x }} plain", tool_use="{{ strftime_now('%Y') }}{{ x }} tools", rag="r"
    )
    tokenizer = load_tokenizer(several, chat_template_kwargs={"x": "1"})
    chat, tools = [{"role": "user", "content": "hi"}], [{"type": "function", "function": {"name": "f"}}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "1 plain"
    assert tokenizer.apply_chat_template(chat, tools=tools, tokenize=False) == "20241 tools"
    assert load_tokenizer(several, "rag").apply_chat_template(chat, tools=tools, tokenize=False) == "r"
    with pytest.raises(UserError, match="model.chat_template=other: cannot be read"):
        load_tokenizer(several, "other")


def test_several_templates_without_a_default_are_refused(tmp_path, model):
    several = with_templates(model, tmp_path / "m", tool_use="x", rag="r")
    with pytest.raises(UserError, match="has the chat templates rag, tool_use, and none with the name default; choose"):
        load_tokenizer(several)
    assert load_tokenizer(several, "rag").chat_template == "r"


def test_variables_of_the_chat_template_are_set_and_saved(tmp_path, model):
    """As Qwen3's template has it: without thinking, the reply begins after an empty block of thoughts."""
    template = tmp_path / "t.jinja"
    template.write_text(
        "{%- if enable_thinking is defined and enable_thinking is false %}\n{{- '<think></think>' }}\n{%- endif %}"
        "{{ mood }}{{ messages[0].content }}"
    )
    chat = [{"role": "user", "content": "hi"}]
    plain = load_tokenizer(model, str(template))
    assert plain.apply_chat_template(chat, tokenize=False) == "hi"
    variables = {"enable_thinking": False, "mood": 'so "so" ', "other": None}
    tokenizer = load_tokenizer(model, str(template), chat_template_kwargs=variables)
    assert tokenizer.apply_chat_template(chat, tokenize=False) == '<think></think>so "so" hi'
    saved = tmp_path / "saved"
    shutil.copytree(model, saved)
    tokenizer.save_pretrained(saved)
    assert load_tokenizer(str(saved)).apply_chat_template(chat, tokenize=False) == '<think></think>so "so" hi'


def test_a_template_that_asks_for_the_date_always_gets_the_same(tmp_path, model):
    """As those of Llama 3.2 and gpt-oss. A run that is resumed on another day has the same prompts."""
    template = tmp_path / "t.jinja"
    template.write_text(
        "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
        '{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}{%- endif %}'
        'Today: {{ date_string }}, {{ strftime_now("%Y-%m-%d") }} {{ messages[0].content }}'
    )
    chat = [{"role": "user", "content": "hi"}]
    tokenizer = load_tokenizer(model, str(template))
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "Today: 26 Jul 2024, 2024-07-26 hi"
    template.write_text(tokenizer.chat_template)
    assert load_tokenizer(model, str(template)).chat_template == tokenizer.chat_template
    own = load_tokenizer(model, str(template), chat_template_kwargs={"date_string": "1 May 2026"})
    assert own.apply_chat_template(chat, tokenize=False) == "Today: 1 May 2026, 2024-07-26 hi"
