"""Prompts that are decoded when they are drawn: the same as those in memory, and refused once their rows change."""

from __future__ import annotations

import copy
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from trainer.config import Config
from trainer.config.data import SourceConfig
from trainer.data import prompt_files
from trainer.data.ledger import Ledger
from trainer.data.row_files import json_lines
from trainer.errors import UserError
from trainer.sources.routes import prompt_ledger, read_prompts

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
ODD = [
    {"prompt": "é", "answer": "1"},
    {"prompt": CHAT, "answer": 2, "more": None},
    {"prompt": "x" * 70_000, "answer": "a text with more characters than the limit"},
    {"prompt": "x" * 90, "answer": "a prompt with more tokens"},
    {"answer": 3.5, "prompt": [{"role": "user", "content": "c"}]},
    {"prompt": "t", "answer": "", "tools": [{"type": "function", "function": {"name": "f"}}], "n": {"b": [1], "a": 2}},
]


@pytest.fixture(autouse=True)
def _every_file_is_large(monkeypatch):
    monkeypatch.setattr(prompt_files, "_LARGE", 0)
    monkeypatch.setattr(prompt_files, "_SETTLED_S", -60.0)


@pytest.fixture
def tokenizer(tokenizer):
    """One that a test may change."""
    return copy.deepcopy(tokenizer)


@pytest.fixture
def cfg(tmp_path) -> Config:
    """Of two files with rows of all kinds, and blank lines."""
    cfg = Config()
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text("\n".join(map(json.dumps, ODD)) + "\n \n")
    files[1].write_text("\n" + "\n".join(json.dumps({"prompt": f"{i}?", "answer": str(i)}) for i in range(600)))
    cfg.data.synthetic, cfg.data.train_files = None, list(map(str, files))
    cfg.trainer.run_dir, cfg.rollout.max_prompt_tokens = str(tmp_path / "run"), 80
    return cfg


def both(cfg, tokenizer, monkeypatch):
    """Return the prompts that are decoded when they are drawn, and those in memory."""
    drawn = read_prompts(cfg, "train", tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(prompt_files, "_LARGE", 1 << 40)
        return drawn, read_prompts(cfg, "train", tokenizer)


def fingerprint(cfg, prompts):
    return prompt_ledger(cfg, prompts).state_dict()


@pytest.mark.parametrize("case", ["all", "first", "system", "rows"])
def test_prompts_digests_and_counts_are_those_in_memory(case, cfg, tokenizer, monkeypatch):
    if case == "first":
        cfg.data.train_size = 5
    elif case == "system":
        cfg.data.system_prompt = "Think."
    elif case == "rows":
        cfg.environment.name = "anything"
    for _ in range(2):  # the second time with the index of the first one
        drawn, held = both(cfg, tokenizer, monkeypatch)
        assert isinstance(drawn.prompts, prompt_files.FilePrompts) and isinstance(held.prompts, list)
        assert list(drawn.prompts) == held.prompts and drawn.prompts[1:3] == held.prompts[1:3]
        assert drawn.prompts[-1] == held.prompts[-1]
        assert (drawn.dropped, drawn.first_dropped) == (held.dropped, held.first_dropped)
        assert drawn.dropped == (0 if case == "rows" else 2)
        assert fingerprint(cfg, drawn.prompts) == fingerprint(cfg, held.prompts)


def test_sources_of_a_mix_are_drawn_from_their_files(cfg, tokenizer, monkeypatch):
    a, b = cfg.data.train_files
    cfg.data.train_files = []
    cfg.data.mix = {"one": SourceConfig(files=[a]), "two": SourceConfig(files=[b])}
    drawn, held = both(cfg, tokenizer, monkeypatch)
    assert list(drawn.prompts) == list(held.prompts) and drawn.prompts[5].source == "mix.two"
    assert fingerprint(cfg, drawn.prompts) == fingerprint(cfg, held.prompts)


def test_rows_are_read_again_only_if_something_has_changed(cfg, tokenizer, monkeypatch):
    read = []
    monkeypatch.setattr(prompt_files, "json_lines", lambda *args: read.append(args) or json_lines(*args))
    index = Path(cfg.trainer.run_dir, prompt_files.FOLDER, "data.train_files")

    def reads() -> bool:
        read.clear()
        read_prompts(cfg, "train", tokenizer)
        return bool(read)

    assert reads() and not reads()
    content = index.read_bytes()
    middle = len(content) // 2
    for damaged in (content[:-1], content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :], b""):
        index.write_bytes(damaged)
        assert reads() and not reads()
        assert index.read_bytes() == content
    cfg.rollout.max_prompt_tokens = 79
    assert reads() and not reads()
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}{% endfor %}<|assistant|>"
    assert reads() and not reads()
    file = Path(cfg.data.train_files[1])
    before = file.stat()
    text = file.read_text()
    file.write_text(text.replace('"7?"', '"8?"', 1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert reads(), "of the same size and time"
    monkeypatch.setattr(prompt_files, "_SETTLED_S", 60.0)
    file.write_text(text)
    assert reads() and reads(), "a file that has just been written may change again"


def test_what_the_policy_does_not_see_is_named_at_each_start(cfg, tokenizer, caplog):
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}<|assistant|>"
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            read_prompts(cfg, "train", tokenizer)
        assert "does not see all of 1 of 605 prompts: a message of the role system is left out" in caplog.text


def test_a_bad_row_is_named_before_anything_starts(cfg, tokenizer):
    second = cfg.data.train_files[1]
    for bad, sentence in (
        (b'{"prompt": "a"}', "data.answer_key=answer: .*b.jsonl:602 has no such key"),
        (b"{", "data.train_files: .*b.jsonl:602 is not JSON"),
        (b'{"prompt": "", "answer": "a"}', "data.prompt_key=prompt: .*b.jsonl:602 has an empty prompt"),
        (b'{"prompt": "\\ud800", "answer": "a"}', "b.jsonl:602: contains half of a surrogate pair"),
    ):
        content = Path(second).read_bytes()
        Path(second).write_bytes(content + b"\n" + bad)
        with pytest.raises(UserError, match=sentence):
            read_prompts(cfg, "train", tokenizer)
        Path(second).write_bytes(content)
    Path(second).write_text("\n\n")
    with pytest.raises(UserError, match="data.train_files=.*b.jsonl: is empty"):
        read_prompts(cfg, "train", tokenizer)
    cfg.rollout.max_prompt_tokens = 1
    cfg.data.train_files = cfg.data.train_files[:1]
    with pytest.raises(UserError, match="rollout.max_prompt_tokens=1: all 6 train prompts are longer"):
        read_prompts(cfg, "train", tokenizer)


def test_a_row_that_changes_while_the_run_reads_it_is_refused(cfg, tokenizer):
    file = Path(cfg.data.train_files[1])
    prompts = read_prompts(cfg, "train", tokenizer).prompts
    before = list(prompts)
    replaced = file.with_suffix(".new")
    replaced.write_text("{}")
    os.replace(replaced, file)
    assert list(prompts) == before, "a file that is replaced stays open"
    file = Path(cfg.data.train_files[0])
    with file.open("r+") as opened:
        opened.seek(file.read_text().index("2+2"))
        opened.write("3")
    assert prompts[0] == before[0]
    with pytest.raises(UserError, match=r"data.train_files: .*a.jsonl:2 has changed since the run read it; restore"):
        prompts[1]


def test_an_order_of_many_rows_is_that_of_the_list():
    ledger = Ledger(range(1000), 3, "prompts", lambda: "x")
    drawn = ledger.peek(1500)
    assert all(type(index.index) is int for index in drawn)
    assert sorted(index.index for index in drawn[:1000]) == list(range(1000))
    assert isinstance(ledger._order(0), np.ndarray)
