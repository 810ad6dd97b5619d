"""The files of a model's directory are copied as they are; only what a run has changed differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from tests.support.tables import table
from trainer.errors import UserError
from trainer.models.export import changed_json, model_assets, with_dtype
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer

SIZE = TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
OWN = {
    "generation_config.json": '{"do_sample": false, "temperature": 0.6,   "own": 1}',
    "preprocessor_config.json": "{}",
    "chat_template.jinja": DATED,
    "modeling_own.py": "from .parts.inner import x",
    "parts/inner.py": "x = 1",
}


@pytest.fixture
def model(tmp_path) -> Path:
    """A directory with files that transformers would not write again as they are."""
    path = tmp_path / "model"
    build_tiny(SIZE, str(path))
    for name, text in OWN.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    change(path / "config.json", auto_map={"AutoConfig": "modeling_own.C"}, own_field={"b": [1], "a": None})
    return path


def change(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def write(files: dict[str, bytes], directory: Path) -> Path:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def test_all_files_but_weights_are_copied_byte_by_byte(model):
    for name in ("adapter_config.json", "config.json.bak", "notes.txt"):
        (model / name).write_text("{}")
    files = model_assets(str(model), load_tokenizer(str(model)))
    assert set(files) == {*OWN, "config.json", "tokenizer.json", "tokenizer_config.json"}
    for name, data in files.items():
        assert data == (model / name).read_bytes(), name


def test_a_generation_config_that_cannot_be_written_again_is_copied(model):
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        GenerationConfig.from_pretrained(model).save_pretrained(model)
    assert b"0.6" in model_assets(str(model), load_tokenizer(str(model)))["generation_config.json"]


def test_python_files_that_no_config_names_are_not_copied(model):
    change(model / "config.json", auto_map=None)
    (model / "config.json").write_text((model / "config.json").read_text().replace('"auto_map": null, ', ""))
    assert not [name for name in model_assets(str(model), None) if name.endswith(".py")]


def test_a_template_with_a_date_asks_for_the_day_of_its_reader(model, tmp_path):
    tokenizer = load_tokenizer(str(model))
    chat = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "26 Jul 2024x", "a run has the same prompts tomorrow"
    files = model_assets(str(model), tokenizer)
    assert files["chat_template.jinja"].decode() == DATED


@pytest.mark.parametrize("has_kwargs", [True, False])
def test_the_template_of_the_run_is_in_its_exports_without_a_fixed_date(model, tmp_path, has_kwargs):
    own = tmp_path / "own.jinja"
    own.write_text("own {{ name }}" + DATED)
    change(model / "tokenizer_config.json", chat_template="old")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/rag.jinja").write_text("rag")
    tokenizer = load_tokenizer(str(model), str(own), chat_template_kwargs={"name": "n"} if has_kwargs else None)
    exported = write(model_assets(str(model), tokenizer), tmp_path / "out")
    template = AutoTokenizer.from_pretrained(exported).chat_template
    assert template == ('{%- set name = "n" %}' if has_kwargs else "") + own.read_text()
    assert "old" not in (exported / "tokenizer_config.json").read_text()


def test_variables_stand_in_every_template_of_several(model, tmp_path):
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tool_use.jinja").write_text("tools")
    plain = model_assets(str(model), load_tokenizer(str(model)))
    assert plain["additional_chat_templates/tool_use.jinja"] == b"tools"
    tokenizer = load_tokenizer(str(model), chat_template_kwargs={"x": 1})
    exported = write(model_assets(str(model), tokenizer), tmp_path / "out")
    set_x = "{%- set x = 1 %}"
    assert AutoTokenizer.from_pretrained(exported).chat_template == {
        "default": set_x + DATED,
        "tool_use": set_x + "tools",
    }


def test_a_pad_token_that_the_run_has_chosen_is_exported(model, tmp_path):
    change(model / "tokenizer_config.json", pad_token=None)
    tokenizer = load_tokenizer(str(model))
    exported = AutoTokenizer.from_pretrained(write(model_assets(str(model), tokenizer), tmp_path / "out"))
    assert exported.pad_token == tokenizer.eos_token and exported.get_vocab() == tokenizer.get_vocab()


def test_fields_of_the_config_that_differ_are_written_and_no_others(model):
    before = json.loads((model / "config.json").read_text())
    files = model_assets(str(model), None, {"tie_word_embeddings": False})
    assert json.loads(files["config.json"]) == {**before, "tie_word_embeddings": False}
    assert changed_json(b'{"a":   1}', {"a": 1}) == b'{"a":   1}'


@table(
    "config, expected",
    [
        ({}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"torch_dtype": "float32", "dtype": "float16"}, {"torch_dtype": "bfloat16", "dtype": "bfloat16"}),
    ],
)
def test_a_config_says_which_dtype_its_weights_have(config, expected):
    assert json.loads(with_dtype(json.dumps(config).encode(), "bfloat16")) == expected


def test_a_file_that_cannot_be_read_is_refused_by_name(model):
    with pytest.raises(UserError, match="a JSON file there cannot be read"):
        (model / "config.json").write_text("{")
        model_assets(str(model), None, {"a": 1})
