"""Directories of models, as the user names them."""

from __future__ import annotations

import json

import pytest

from trainer.config import ModelConfig, TinyConfig
from trainer.errors import UserError
from trainer.models.files import load_config, resolve_model_path
from trainer.models.tiny import build_tiny


def test_a_directory_around_a_model_is_refused_with_the_directory_of_the_model(tmp_path):
    model = tmp_path / "exports/global_step_6/policy"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    assert resolve_model_path(str(model)) == str(model)
    for wrong in (model.parent, model.parent.parent):
        with pytest.raises(UserError, match=f"^model.path={wrong}: .* no Hugging Face model; {model} has one$"):
            resolve_model_path(str(wrong))


def test_a_checkpoint_is_refused_with_the_command_that_exports_it(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=f"trainer checkpoint export {tmp_path} DIRECTORY"):
        resolve_model_path(str(tmp_path))


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("head_dim", 0, "head_dim of its config.json must be at least 1, and is 0"),
        ("num_attention_heads", 0, "num_attention_heads of its config.json must be at least 1, and is 0"),
        ("num_key_value_heads", -1, "num_key_value_heads of its config.json must be at least 1, and is -1"),
        (
            "num_attention_heads",
            "x",
            r"its config.json cannot be used \(Validation error for field 'num_attention_heads': TypeError: "
            r"Field 'num_attention_heads' expected int, got str \(value: 'x'\)\)",
        ),
    ],
)
def test_a_wrong_field_of_a_config_json_is_named(tmp_path, field, value, problem):
    build_tiny(TinyConfig(), str(tmp_path))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(UserError, match=rf"^model.path={tmp_path}: {problem}$"):
        load_config(ModelConfig(), str(tmp_path))
