"""Directories of models, as the user names them."""

from __future__ import annotations

import pytest

from trainer.errors import UserError
from trainer.models.files import resolve_model_path


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
