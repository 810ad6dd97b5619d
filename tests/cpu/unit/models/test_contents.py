"""What a model directory gives to a run besides weights, and in what two of them differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from trainer.models.files import differences, read_contents
from trainer.models.tiny import TinyShape, build_tiny

CONFIG = {
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "type": "default"},
    "eos_token_id": [2, 3],
    "transformers_version": "5.19.0",
    "nan": float("nan"),
    "text_config": {"_name_or_path": "/tmp/a", "hidden_size": 8},
}


def write(directory: Path, name: str, content: Any) -> None:
    (directory / name).parent.mkdir(exist_ok=True, parents=True)
    (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))


def changes(directory: Path, name: str, content: Any, with_code: bool = False) -> list[str]:
    """Return in what the directory differs after `content` was written to the file `name`; None: it was removed."""
    before = json.loads(json.dumps(read_contents(str(directory), with_code)))
    if content is None:
        (directory / name).unlink()
    else:
        write(directory, name, content)
    now = read_contents(str(directory), with_code)
    return [text for file in sorted({*before, *now}) if (text := differences(file, before.get(file), now.get(file)))]


@pytest.fixture
def model(tmp_path) -> Path:
    write(tmp_path, "config.json", CONFIG)
    write(tmp_path, "generation_config.json", {"eos_token_id": 2})
    write(tmp_path, "preprocessor_config.json", {"size": 224})
    write(tmp_path, "chat_template.jinja", "{{ messages }}")
    write(tmp_path, "additional_chat_templates/tools.jinja", "{{ tools }}")
    write(tmp_path, "tokenizer.json", {"model": {"vocab": {f"token {i}": i for i in range(9000)}}, "added_tokens": []})
    write(tmp_path, "tokenizer_config.json", {"chat_template": "x" * 500, "model_max_length": 8})
    write(tmp_path, "vocab.txt", "a\nb\n")
    write(tmp_path, "code/modeling.py", "a = 1\n")
    return tmp_path


CHANGES = [
    ("config.json", CONFIG | {"rms_norm_eps": 1e-05}, "has other values of rms_norm_eps"),
    ("config.json", CONFIG | {"rope_parameters": {"rope_theta": 5e5}}, "has other values of rope_parameters"),
    ("config.json", CONFIG | {"bos\x1b[2J": 1}, "has other values of bos?[2J"),
    ("config.json", "[1]", "has another content"),
    ("config.json", "not JSON", "has another content"),
    ("generation_config.json", {}, "has other values of eos_token_id"),
    ("generation_config.json", None, "is missing"),
    ("chat_template.jinja", "{{ other }}", "has another content"),
    ("additional_chat_templates/tools.jinja", "", "has another content"),
    ("tokenizer.json", {"model": {"vocab": {}}, "added_tokens": []}, "has other values of model"),
    ("vocab.txt", "b\na\n", "has another content"),
    ("merges.txt", "a b\n", "is new"),
    ("code/modeling.py", "a = 2\n", "has another content"),
    ("config.json", {f"a{i}": i for i in range(3)}, "has other values of a0, a1, a2, eos_token_id and 4 more"),
]


@pytest.mark.parametrize("name, content, sentence", CHANGES)
def test_a_change_is_named(model, name, content, sentence):
    assert changes(model, name, content, with_code=name.endswith(".py")) == [f"{name} {sentence}"]


@pytest.mark.parametrize(
    "name, content",
    [
        ("config.json", json.dumps({key: CONFIG[key] for key in reversed(CONFIG)}, indent=8)),
        ("config.json", CONFIG | {"transformers_version": "6.0", "_name_or_path": "/elsewhere"}),
        ("config.json", CONFIG | {"text_config": {"_name_or_path": "/tmp/b", "hidden_size": 8}}),
        ("README.md", "read me"),
        (".git/HEAD", "ref"),
        ("model.safetensors.index.json", {"weight_map": {}}),
        ("eval_results.json", {"accuracy": 1}),
        ("code/modeling.py", "a = 2\n"),  # nothing executes it
        ("tokenizer_config.json~", "{}"),
        ("chat_template.jinja.orig", "{{ other }}"),
    ],
)
def test_a_change_that_acts_on_nothing_is_none(model, name, content):
    assert changes(model, name, content) == []


def test_a_tokenizer_that_transformers_has_saved_again_is_the_same(tmp_path):
    """So is a config in which an older version has called the dtype `torch_dtype`."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    build_tiny(TinyShape(), first)
    AutoTokenizer.from_pretrained(first).save_pretrained(second)
    given = {name: read_contents(path, False) for name, path in (("first", first), ("second", second))}
    tokenizer = [{k: v for k, v in one.items() if "config" not in k or "tokenizer" in k} for one in given.values()]
    assert tokenizer[0] == tokenizer[1] and "tokenizer_config.json" in tokenizer[0]
    write(tmp_path, "new/config.json", {"dtype": "bfloat16", "text_config": {"dtype": "float32"}})
    write(tmp_path, "old/config.json", {"torch_dtype": "bfloat16", "text_config": {"torch_dtype": "float32"}})
    assert read_contents(str(tmp_path / "new"), False) == read_contents(str(tmp_path / "old"), False)
