"""What a record stands for: the settings, the history of the weights, and the weights that the run began with."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys

import numpy as np
import pytest

from tests.support.config import set_value
from tests.support.toy import toy_config, toy_run
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.components import Restore, fingerprint_weights
from trainer.config import Config
from trainer.config.fields import resume_rules
from trainer.episodes import Episode, Sample
from trainer.journal.history import (
    Identity,
    after,
    digest,
    first_history,
    history_at,
    identity,
)
from trainer.run.resume import deciding_settings

EPISODE = Episode("0:1:0", "0:1", [Sample(np.arange(3), np.ones(3, np.float32), np.zeros(3, np.float32), (1, 1))], 0.5)


def settings(key: str, value: object) -> Identity:
    cfg = Config()
    set_value(cfg, key, value)
    return identity(*deciding_settings(cfg), "weights")


@pytest.mark.parametrize(
    ("key", "value", "rollouts", "updates"),
    [
        ("logger.samples", 9, False, False),
        ("trainer.num_workers", 2, False, False),
        ("rollout.num_engines", 2, False, False),
        ("trainer.ckpt_interval", 7, False, False),
        ("rollout.val_n", 7, False, False),
        ("trainer.policy.optimizer.lr", 0.5, False, True),
        ("algorithm.clip_low", 0.11, False, True),
        ("rollout.temperature", 0.5, True, True),
        ("reward.name", "gsm8k", True, True),
        ("environment.name", "a:B", True, True),
        ("trainer.seed", 7, True, True),
    ],
)
def test_the_resume_rule_of_a_key_says_what_it_decides(key, value, rollouts, updates):
    before, now = identity(*deciding_settings(Config()), "weights"), settings(key, value)
    assert (before.rollouts != now.rollouts, before.updates != now.updates) == (rollouts, updates)


@pytest.mark.parametrize(
    ("key", "value", "rollouts"),
    [
        ("reward.name", ["gsm8k", "edited_code:reward"], True),
        ("environment.name", "edited_code.world:World", True),
        ("environment.kwargs", {"judges": [{"name": "edited_code:judge"}]}, True),
        ("algorithm.policy_loss", "edited_code:loss", False),
    ],
)
def test_the_files_of_functions_by_import_path_decide(tmp_path, monkeypatch, key, value, rollouts):
    package = tmp_path / "edited_code"
    package.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "edited_code", raising=False)
    file = package / ("world.py" if "world" in str(value) else "__init__.py")
    found = []
    for code in ("def loss(): 1", "def loss(): 1", "def loss(): 2"):
        (package / "__init__.py").touch()
        file.write_text(code)
        importlib.invalidate_caches()
        found.append(settings(key, value))
    assert found[0] == found[1] and found[1].updates != found[2].updates
    assert (found[1].rollouts != found[2].rollouts) == rollouts


def test_a_longer_run_decays_another_way():
    cfg = Config()
    cfg.trainer.policy.optimizer.scheduler = "cosine"
    before = identity(*deciding_settings(cfg), "")
    cfg.trainer.total_steps += 1
    now = identity(*deciding_settings(cfg), "")
    assert before.rollouts == now.rollouts and before.updates != now.updates


def test_the_content_of_a_chat_template_decides(tmp_path):
    template = tmp_path / "template.jinja"
    identities = []
    for content in ("one", "other", "one"):
        template.write_text(content)
        identities.append(settings("model.chat_template", str(template)))
    assert identities[0] == identities[2] and identities[0].by_key == identities[1].by_key
    assert identities[0].rollouts != identities[1].rollouts and identities[0].updates != identities[1].updates


def test_the_files_beside_the_weights_decide_and_the_weights_that_checkpoints_hold_do_not(tmp_path):
    """The key of a record has no tokens if an environment makes the prompts."""
    cfg, folder = Config(), tmp_path / "model"
    cfg.model.path = str(folder)
    (folder / "additional_chat_templates").mkdir(parents=True)

    def found() -> Identity:
        return identity(*deciding_settings(cfg), fingerprint_weights(cfg, str(folder), begins=False))

    for name in ("chat_template.jinja", "additional_chat_templates/tools.jinja", "tokenizer_config.json"):
        (folder / name).write_text("one")
        first = found()
        (folder / name).write_text("other")
        assert found().rollouts != first.rollouts and found().by_key == first.by_key
    last = found()
    (folder / "model.safetensors").write_bytes(b"weights")
    assert found() == last
    folder = folder.rename(tmp_path / "moved")
    cfg.model.path = str(folder)
    assert found() == last


def test_no_path_decides_and_every_other_deciding_key_does():
    rollouts, updates = deciding_settings(Config())
    decides = {key for key, rule in resume_rules(Config()).items() if not rule.is_free}
    assert decides - {*rollouts, *updates} <= {"model.path", "trainer.critic.path", *_unused(decides)}
    assert "model.path" not in rollouts


def _unused(keys: set[str]) -> set[str]:
    return {key for key in keys if key.startswith(("sft.", "dpo.", "rm."))}


@pytest.mark.parametrize(
    "change",
    [
        {"reward": 0.25},
        {"reward": None},
        {"baseline": 0.0},
        {"uid": "0:1:1"},
        {"samples": []},
        {"samples": [dataclasses.replace(EPISODE.samples[0], mask=np.zeros(3, np.float32))]},
        {"samples": [dataclasses.replace(EPISODE.samples[0], logprobs=None)]},
    ],
)
def test_other_episodes_make_another_history(change):
    one, other = Identity("r", "u"), dataclasses.replace(EPISODE, **change)
    assert after("h", [EPISODE], one) == after("h", [EPISODE], one) != after("h", [other], one)
    assert after("h", [EPISODE], one) != after("g", [EPISODE], one) != after("h", [EPISODE], Identity("r", "v"))


def test_the_history_of_a_run_is_in_its_checkpoints_and_is_the_same_after_a_kill(tmp_path, tmp_path_factory):
    model = tmp_path_factory.mktemp("start")
    toy_run(toy_config(tmp_path / "whole"), model)
    toy_run(toy_config(tmp_path / "killed"), model, stop_after=2)
    toy_run(toy_config(tmp_path / "killed"), model)
    whole, killed = (manifests.read(str(tmp_path / name / "checkpoints/global_step_5")) for name in ("whole", "killed"))
    middle = manifests.read(str(tmp_path / "whole/checkpoints/global_step_2"))
    assert history_at(whole, Restore()) == history_at(killed, Restore()) != history_at(middle, Restore())
    forks = [history_at(whole, Restore(frozenset(kinds), True)) for kinds in (["weights"], ["weights", "data"])]
    assert len({*forks, history_at(whole, Restore()), history_at(killed, Restore(frozenset(["weights"]), True))}) == 4


def test_a_run_begins_with_the_history_of_its_weights(tmp_path):
    cfg = Config()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = first_history(cfg, str(tmp_path))
    assert first == first_history(cfg, str(tmp_path)) != digest("start", "")
    (tmp_path / "model.safetensors").write_bytes(b"weighty")
    assert first_history(cfg, str(tmp_path)) != first


def test_large_models_stand_for_their_sizes_and_times(tmp_path):
    cfg, path = Config(), tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(2 << 30)  # it takes no room
    os.utime(path, ns=(1, 1))
    first = fingerprint_weights(cfg, str(tmp_path), begins=True)
    assert first == fingerprint_weights(cfg, str(tmp_path), begins=True)
    os.utime(path, ns=(2, 2))
    assert fingerprint_weights(cfg, str(tmp_path), begins=True) != first
    assert fingerprint_weights(cfg, str(tmp_path), begins=False) == "", "a checkpoint holds all that is trained"
