"""A run finds at its next start: the last step, its metrics, and its initial model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.jobs import comparable, metrics
from tests.support.toy import toy_config, toy_run, toy_trainer, uninterrupted_run
from trainer.config import Config
from trainer.errors import UserError
from trainer.models.tiny import TinyShape, build_tiny
from trainer.process.signals import Stopped
from trainer.run.directory import RunDirectory
from trainer.run.state import StopRequest


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("toy") / "model"


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A run that nothing disturbs: its metrics and its last number."""
    return uninterrupted_run(tmp_path_factory.mktemp("whole"), model)


def test_the_last_step_is_saved_whatever_the_interval(tmp_path, model, whole):
    """Also by a run that is extended, one that continues from a stop, and a fork."""

    def saved(root: Path) -> list[str]:
        return sorted(path.name for path in (root / "checkpoints").glob("global_step_*"))

    schedule = {"ckpt_interval": -1}
    cfg, stop = toy_config(tmp_path, total_steps=3, **schedule), StopRequest(None)
    with RunDirectory(cfg).open() as directory:
        stop.ask("SIGTERM")
        with pytest.raises(Stopped):
            toy_trainer(cfg, directory, model, stop).run()
    assert saved(tmp_path) == ["global_step_1"]
    toy_run(cfg, model)
    assert saved(tmp_path) == ["global_step_1", "global_step_3"]
    trainer = toy_run(toy_config(tmp_path, **schedule), model)
    assert saved(tmp_path) == ["global_step_1", "global_step_3", "global_step_5"]
    assert (comparable(metrics(tmp_path)), trainer.learner.ranks.number) == whole

    parent = str(tmp_path / "checkpoints/global_step_3")
    fork = toy_config(tmp_path / "fork", resume_mode="from_path", resume_path=parent, **schedule)
    toy_run(fork, model)
    assert saved(tmp_path / "fork") == ["global_step_5"]


def test_a_run_does_not_continue_with_another_config_or_tokenizer(tmp_path, model):
    build_tiny(TinyShape.of(Config().model.tiny), str(tmp_path / "model"))
    cfg = toy_config(tmp_path / "run", total_steps=2)
    cfg.model.path = str(tmp_path / "model")
    toy_run(cfg, tmp_path / "model")
    cfg.trainer.total_steps = 4
    for name, key, value in (("config.json", "rms_norm_eps", 0.5), ("tokenizer_config.json", "eos_token", "!")):
        file = tmp_path / "model" / name
        before = file.read_text()
        file.write_text(json.dumps(json.loads(before) | {key: value}))
        with pytest.raises(
            UserError, match=rf"its files are not .*{name} has other values of {key}.; restore them, fork"
        ):
            toy_run(cfg, tmp_path / "model")
        assert not (tmp_path / "run/checkpoints/global_step_3").exists()
        file.write_text(before)
    assert toy_run(cfg, tmp_path / "model").state.step == 4
