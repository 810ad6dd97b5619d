"""Which built-in model a run uses, and how it is made."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.config import config_of, set_value
from tests.support.runs import configured, on_files
from trainer.config import Config, DataConfig, EnvironmentConfig, RewardConfig, TinyConfig
from trainer.config.data import SourceConfig, ValSetConfig
from trainer.config.fields import walk_keys
from trainer.jobs import run_task
from trainer.process.signals import Stopped
from trainer.tasks import warm_start
from trainer.tasks.warm_start import _config, _directory, build, made_model
from trainer.trainer import Trainer


def test_what_is_held_out_of_files_makes_no_other_built_in_model(tmp_path):
    cfg = on_files(tmp_path)
    others = [dataclasses.replace(cfg.data, **change) for change in ({"val_size": 5}, {"val_files": []})]
    assert {_directory(dataclasses.replace(cfg, data=data)) for data in others} == {_directory(cfg)}
    other = dataclasses.replace(cfg.data, train_size=5)
    assert _directory(dataclasses.replace(cfg, data=other)) != _directory(cfg)


def test_the_rows_of_a_mix_make_the_built_in_model_and_what_answers_them_does_not():
    def name_of(**source: Any) -> str:
        cfg = Config(data=DataConfig(mix={"sums": SourceConfig(synthetic="arithmetic", **source)}))
        return _directory(cfg)

    assert name_of(size=5) != name_of(size=6)
    others = {"environment": EnvironmentConfig(name="a:B"), "reward": RewardConfig(name="a:b")}
    assert name_of(size=5) == name_of(size=5, **others)


def test_validation_has_no_part_in_the_built_in_model():
    data = DataConfig(synthetic="arithmetic", train_size=5, val_size=5)
    sets = {"words": ValSetConfig(synthetic="reverse_text", size=3)}
    others = [dataclasses.replace(data, val_sets=sets), dataclasses.replace(data, val_size=6)]
    assert {_directory(Config(data=other)) for other in others} == {_directory(Config(data=data))}


@pytest.mark.parametrize(
    ("key", "variable", "directory"),
    [("/keyed", "/named", "/keyed"), ("~/keyed", "/named", "/home/me/keyed"), (None, "/named", "/named")]
    + [(None, "", "/home/me/.cache/trainer")],
)
def test_where_the_built_in_model_is_kept_also_by_a_config_of_plain_defaults(monkeypatch, key, variable, directory):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("TRAINER_CACHE", variable)
    cfg = Config()
    assert cfg.model.cache_dir is None
    cfg.model.cache_dir = key
    assert str(Path(_directory(cfg)).parent) == directory


@pytest.mark.parametrize("key", ["sft.new", "data.new"])
def test_a_new_key_with_its_default_leaves_the_name_of_the_model_as_it_is(tmp_path, monkeypatch, key):
    """And another value of it makes another model."""
    cfg = on_files(tmp_path)
    before = _directory(cfg)
    walk = warm_start.walk_keys
    for value, same in ((1, True), (2, False)):
        given = (key, value, None)
        monkeypatch.setattr(
            warm_start, "walk_keys", lambda one, given=given: [*walk(one), given if one is cfg else (key, 1, None)]
        )
        assert (_directory(cfg) == before) == same


def test_the_name_is_made_of_keys_that_there_are():
    keys = {key for key, *_ in walk_keys(Config())}
    assert {*warm_start._NAMED, *warm_start._WITHOUT_EFFECT} <= keys


@pytest.mark.parametrize("key, value", [("sft.optimizer.lr", 0.5), ("sft.steps", 7), ("data.system_prompt", "x")])
def test_what_makes_the_model_is_in_its_name(tmp_path, key, value):
    cfg, other = on_files(tmp_path), on_files(tmp_path)
    set_value(other, key, value)
    assert _directory(other) != _directory(cfg)


def test_services_get_nothing_of_a_warm_start():
    config = _config(config_of(["logger.services=[tensorboard]", "logger.prometheus=9000"]))
    assert (config.logger.services, config.logger.prometheus, config.logger.plot) == ([], None, False)


def test_the_warm_start_ends_when_the_model_is_good_enough_also_after_a_kill(tmp_path, caplog, monkeypatch):
    """After the same step, with the same weights; what ends it is said. A second job finds the model."""
    name = "trainer.tasks.warm_start"
    caplog.set_level("INFO", name)

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == name]

    def made(cache: str, accuracy: float | None, steps: int, stopped_after: int = 0) -> bytes:
        cfg = configured(tmp_path / "run", num_workers=1, ray_address="this_process", device="cpu")
        cfg.model.cache_dir, cfg.sft.steps, cfg.sft.batch_size = str(tmp_path / cache), steps, 2
        cfg.model.tiny = TinyConfig(hidden_size=64, start_accuracy=accuracy)
        cfg.data = DataConfig(synthetic="arithmetic", synthetic_args={"max_value": 4}, train_size=12, val_size=1)
        if stopped_after:
            with monkeypatch.context() as patch:
                save = Trainer.save_if_due

                def stop(trainer: Trainer, metrics: dict[str, float]) -> None:
                    if trainer.state.step == stopped_after:
                        trainer.stop.ask("the test")
                    save(trainer, metrics)

                patch.setattr(Trainer, "save_if_due", stop)
                with pytest.raises(Stopped):
                    run_task(build(cfg), "cpu")
            assert made_model(cfg) is None
        run_task(build(cfg), "cpu")
        path = made_model(cfg)
        assert path is not None
        before = len(said())
        run_task(build(cfg), "cpu")  # another job has made it
        assert made_model(cfg) == path and not any(
            "step" in one.replace("supervised steps", "") for one in said()[before:]
        )
        return (Path(path) / "model.safetensors").read_bytes()

    whole = made("whole", 0.5, 400)
    step, share = re.findall(r"after (\d+) steps the model answers ([\d.]+)% of", caplog.text)[-1]
    assert int(step) < 400 and int(step) % 5 == 0 and float(share) >= 50
    assert made("stopped", 0.5, 400, stopped_after=7) == whole
    assert made("alone", None, int(step)) == whole, "the checks change nothing"
    assert "at most 400 supervised steps" in caplog.text
