"""What a run checks before it starts."""

from __future__ import annotations

import pytest

from tests.support.runs import configured, on_files, save_steps
from trainer.errors import UserError
from trainer.jobs import run_task
from trainer.tasks import build_task


def test_reward_data_and_model_are_refused_in_one_message(tmp_path):
    cfg = on_files(tmp_path)
    cfg.reward.name, cfg.model.path = "no_such:function", str(tmp_path)
    with pytest.raises(UserError) as refused:
        build_task(cfg).check_inputs(asks_servers=True)
    headline, reward, data, model = str(refused.value).split("\n  ")
    assert headline == "the run cannot start:"
    assert reward.startswith("reward.name=no_such:function: cannot be imported")
    assert data.startswith("data.prompt_key=prompt: ")
    assert data.endswith("if chat contains complete chats, set data.messages_key=chat")
    assert model.startswith(f"model.path={tmp_path}: ")


def test_an_environment_without_a_method_is_refused_before_the_start(tmp_path, monkeypatch):
    (tmp_path / "half_world.py").write_text(
        "class World:\n    def start(self, row, seed): ...\n    step = close = start\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = configured(tmp_path, {"environment.name": "half_world:World"})
    with pytest.raises(UserError, match="environment.name=half_world:World: the class has no method `reset`; an env"):
        build_task(cfg).check_inputs(asks_servers=True)


def test_exports_among_the_checkpoints_of_another_run_are_refused_before_the_start(tmp_path):
    save_steps(configured(tmp_path / "other"), 1)
    cfg = configured(tmp_path / "run", export_path=str(tmp_path / "other/checkpoints"), hf_save_interval=1)
    with pytest.raises(UserError, match="trainer.export_path=.*/other/checkpoints: holds checkpoints"):
        run_task(build_task(cfg), "cpu")
