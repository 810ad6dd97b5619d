"""What a run checks before it starts, and which embedded model it uses."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from tests.support.ranks import local_cluster
from tests.support.runs import configured, save_steps
from trainer.config import Config, DataConfig, TinyConfig
from trainer.errors import UserError
from trainer.jobs import _cached_model, _check_inputs, _open, prepare_model
from trainer.process.signals import Stopped
from trainer.run.stopping import StopRequest
from trainer.seeding import derive_seed


def on_files(tmp_path) -> Config:
    """A config whose training file has a column with chats."""
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"chat": chat}) + "\n")
    cfg = Config()
    cfg.data.train_files = cfg.data.val_files = [str(tmp_path / "train.jsonl")]
    return cfg


def test_reward_data_and_model_are_refused_in_one_message(tmp_path):
    cfg = on_files(tmp_path)
    cfg.reward.name, cfg.model.path = "no_such:function", str(tmp_path)
    with pytest.raises(UserError) as refused:
        _check_inputs(cfg)
    headline, reward, data, model = str(refused.value).split("\n  ")
    assert headline == "the run cannot start:"
    assert reward.startswith("reward.name=no_such:function: cannot be imported")
    assert data.startswith("data.prompt_key=prompt: ")
    assert data.endswith("if chat holds whole chats, set data.messages_key=chat")
    assert model.startswith(f"model.path={tmp_path}: ")


@pytest.mark.parametrize("supervised", [False, True])
def test_inputs_are_refused_together_with_changed_keys(tmp_path, supervised):
    save_steps(configured(tmp_path), 1, supervised=supervised)
    (tmp_path / "bad.jsonl").write_text("{\n[]\n")
    cfg = configured(tmp_path, {"reward.name": "no_such:function"}, resume_mode="latest", seed=5)
    cfg.data.train_files, cfg.trainer.val_interval = [str(tmp_path / "bad.jsonl")], -1
    with pytest.raises(UserError) as refused:
        _open(cfg, supervised)
    headline, *sentences = str(refused.value).split("\n  ")
    assert headline == "the checkpoint cannot be used with this config:"
    assert any(sentence.startswith("trainer.seed=5: ") for sentence in sentences)
    reward = [] if supervised else ["reward.name=no_such:function: cannot"]
    for sentence, start in zip(
        sentences[-2 - len(reward) :], [*reward, "data.train_files: ", "data.prompt_key=prompt: "], strict=True
    ):
        assert sentence.startswith(start)


def test_what_is_held_out_of_files_makes_no_other_embedded_model(tmp_path):
    cfg = on_files(tmp_path)
    others = [dataclasses.replace(cfg.data, **change) for change in ({"val_size": 5}, {"val_files": []})]
    assert {_cached_model(dataclasses.replace(cfg, data=data)) for data in others} == {_cached_model(cfg)}
    other = dataclasses.replace(cfg.data, train_size=5)
    assert _cached_model(dataclasses.replace(cfg, data=other)) != _cached_model(cfg)


def test_without_start_accuracy_the_embedded_model_has_the_name_that_earlier_versions_gave_it(tmp_path):
    cfg = on_files(tmp_path)
    usual, cfg.model.tiny.start_accuracy = _cached_model(cfg), None
    tiny = dataclasses.asdict(cfg.model.tiny)
    del tiny["start_accuracy"]
    data = dataclasses.asdict(cfg.data) | {"val_files": [], "val_size": -1}
    recipe = json.dumps({"tiny": tiny, "sft": dataclasses.asdict(cfg.sft), "data": data}, sort_keys=True)
    assert _cached_model(cfg) == os.path.join(cfg.model.cache_dir, f"tiny-{derive_seed(recipe):016x}") != usual


class StopAfter(StopRequest):
    """Asks to stop after so many steps of this process."""

    def __init__(self, steps: int):
        super().__init__(None)
        self._left = steps

    def consider_deadline(self, seconds_needed: float) -> None:
        self._left -= 1
        if self._left == 0:
            self.ask("the test")


def test_the_warm_start_ends_when_the_model_is_good_enough_also_after_a_stop(tmp_path, caplog):
    """After the same step, with the same weights; what ends it is said."""
    caplog.set_level("INFO", "trainer.jobs")

    def prepared(cache: str, accuracy: float | None, steps: int, *stops: int) -> bytes:
        cfg = configured(tmp_path / "run", num_workers=1)
        cfg.model.cache_dir, cfg.sft.steps, cfg.sft.batch_size = str(tmp_path / cache), steps, 2
        cfg.model.tiny = TinyConfig(hidden_size=64, intermediate_size=128, start_accuracy=accuracy)
        cfg.data = DataConfig(synthetic="arithmetic", synthetic_args={"max_value": 4}, train_size=12, val_size=1)
        for stop in stops:
            with local_cluster(1, cfg, "cpu") as cluster, pytest.raises(Stopped):
                prepare_model(cfg, cluster, StopAfter(stop))
        with local_cluster(1, cfg, "cpu") as cluster:
            path = prepare_model(cfg, cluster, StopRequest(None))
        return (Path(path) / "model.safetensors").read_bytes()

    whole = prepared("whole", 0.5, 400)
    step, share = re.findall(r"warm start: after (\d+) steps the model answers ([\d.]+)% of", caplog.text)[-1]
    assert int(step) < 400 and int(step) % 5 == 0 and float(share) >= 50
    assert prepared("stopped", 0.5, 400, 7) == whole
    assert prepared("alone", None, int(step)) == whole, "the checks change nothing"
    assert "at most 400 supervised steps" in caplog.text
