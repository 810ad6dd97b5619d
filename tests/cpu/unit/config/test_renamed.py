"""Old names of keys, values and metrics are refused with their successors, and read under them."""

import copy
import dataclasses
import re

import pytest

from trainer.config import Config, compose, with_new_metrics, with_new_names, with_new_words
from trainer.config.fields import walk_keys, walk_sections
from trainer.config.renamed import CONVERTERS, KEYS, LACKING, METRICS, VALUES, successor_of
from trainer.errors import UserError
from trainer.metrics.names import METRICS as DOCUMENTED

NAMES = {name for walk in (walk_keys, walk_sections) for name, *_ in walk(Config())}


def test_successors_are_names_of_today_and_old_names_are_not():
    assert {*KEYS.values(), *VALUES, *CONVERTERS, *LACKING} <= NAMES
    assert not KEYS.keys() & NAMES
    assert set(METRICS.values()) <= set(DOCUMENTED) and not set(METRICS) & set(DOCUMENTED)


@pytest.mark.parametrize("plus", ["", "+", "++"])
@pytest.mark.parametrize("old, new", KEYS.items())
def test_an_old_key_in_a_command_is_refused_with_its_successor(old, new, plus):
    with pytest.raises(UserError, match=rf"^{re.escape(old)}: this key is now {re.escape(new)}; write "):
        compose([f"{plus}{old}=1"])


def test_an_old_key_in_a_config_file_is_refused_with_its_successor(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("trainer:\n  total_steps: 3\n  replicas: 2\nenvironment: {options: {tries: 2}}\n")
    with pytest.raises(UserError) as refusal:
        compose(config_file=str(file))
    assert f"{file}:3: trainer.replicas: this key is now trainer.dp_replicate" in str(refusal.value)
    assert f"{file}:4: environment.options: this key is now environment.kwargs" in str(refusal.value)


def test_keys_below_a_renamed_section_and_references_name_their_successors():
    with pytest.raises(UserError, match=r"now environment.kwargs.tries; write \+environment.kwargs.tries=VALUE$"):
        compose(["+environment.options.tries=2"])
    assert successor_of("environment.options.tries") == "environment.kwargs.tries"
    assert successor_of("environment.optionsx") is None
    with pytest.raises(UserError, match=r"trainer.seed: \$\{trainer.replicas\} is now \$\{trainer.dp_replicate\}$"):
        compose(["trainer.seed=${trainer.replicas}"])


def test_old_functions_of_config_files_are_refused_with_their_successors():
    with pytest.raises(UserError, match=r"clip_high: the function when is now if_eq; write \$\{if_eq:…\}$"):
        compose(["algorithm.clip_high=${when:algorithm.policy_loss,clip,0.28}"])


@pytest.mark.parametrize("old, new", [("trainer", "recompute"), ("sampler", "rollout")])
def test_old_values_are_refused_with_their_successors(old, new):
    key = "algorithm.old_logprobs"
    with pytest.raises(UserError, match=f"^{key}={old}: this value is now {new}; write {key}={new}$"):
        compose([f"{key}={old}"])
    assert with_new_names({"algorithm": {"old_logprobs": old}}) == {"algorithm": {"old_logprobs": new}}


def test_old_metrics_in_the_config_are_refused_with_their_successors():
    with pytest.raises(UserError, match="best_metric=rollout/pearson: this value is now rollout/logprob_corr"):
        compose(["trainer.best_metric=rollout/pearson"])
    with pytest.raises(UserError, match="divergence_limits=.*: rollout/pearson is now rollout/logprob_corr"):
        compose(["+trainer.divergence_limits={rollout/pearson:1}"])


def test_a_saved_config_is_read_under_the_names_of_today():
    saved = {
        "trainer": {"colocate": False, "seed": 3, "diverged_above": {"rollout/pearson": 1.0}, "best_metric": "x"},
        "rollout": {"share_gpus": True},
        "data": {"colocate": 1, "generator": None},
        "environment": {"options": {"tries": 2, "generator": 3}},
    }
    before = copy.deepcopy(saved)
    assert with_new_names(saved) == {
        "trainer": {
            "colocate_roles": False,
            "seed": 3,
            "divergence_limits": {"rollout/logprob_corr": 1.0},
            "best_metric": "x",
        },
        "rollout": {"colocate": True},
        "data": {"colocate": 1, "synthetic": None},
        "environment": {"kwargs": {"tries": 2, "generator": 3}},
    }
    assert saved == before
    now = dataclasses.asdict(Config())
    assert with_new_names(now) == now
    dotted = {
        "reward": {"name": "my.rewards.score"},
        "algorithm": {"policy_loss": "clip"},
        "data": {"curriculum": None},
    }
    assert with_new_names(dotted) == dotted | {"reward": {"name": "my.rewards:score"}}


def test_a_key_may_move_between_sections_of_any_depth(monkeypatch):
    keys = {"a.deep.old": "b.deeper.still.new", "b.whole": "c", "missing.key": "d.key"}
    monkeypatch.setattr("trainer.config.renamed.KEYS", keys)
    monkeypatch.setattr("trainer.config.renamed.VALUES", {"b.deeper.still.new": {"x": "y"}})
    saved = {"a": {"deep": {"old": "x", "other": 1}}, "b": {"whole": {"k": 2}}, "missing": 3}
    before = copy.deepcopy(saved)
    assert with_new_names(saved) == {
        "a": {"deep": {"other": 1}},
        "b": {"deeper": {"still": {"new": "y"}}},
        "c": {"k": 2},
        "missing": 3,
    }
    assert saved == before


@pytest.mark.parametrize("earlier, now", [("true", "full"), ("false", "none"), ("selective", "selective")])
def test_true_and_false_still_choose_activation_checkpointing(earlier, now):
    cfg = compose([f"trainer.policy.fsdp.activation_checkpointing={earlier}"])
    assert cfg.trainer.policy.fsdp.activation_checkpointing == now
    value = {"true": True, "false": False}.get(earlier, earlier)
    saved = {"trainer": {"policy": {"fsdp": {"activation_checkpointing": value}}, "critic": {}}}
    before = copy.deepcopy(saved)
    assert with_new_names(saved)["trainer"]["policy"] == {"fsdp": {"activation_checkpointing": now}}
    assert saved == before


def test_recorded_commands_are_repeated_under_the_names_of_today():
    words = ["python", "-m", "trainer.main", "trainer.replicas=2", "+environment.options.tries=2", "data=arithmetic",
             "algorithm.old_logprobs=sampler", "++rollout.share_gpus=true", "~data.generator"]  # fmt: skip
    assert with_new_words(words) == [
        "python",
        "-m",
        "trainer.main",
        "trainer.dp_replicate=2",
        "+environment.kwargs.tries=2",
        "data=arithmetic",
        "algorithm.old_logprobs=rollout",
        "++rollout.colocate=true",
        "~data.generator",
    ]


def test_lines_of_metrics_are_read_under_the_names_of_today():
    line = {"step": 1, "rollout/pearson": 0.5, "perf/tokens_shared": None, "reward/mean": 1.0}
    assert with_new_metrics(line) == {
        "step": 1,
        "rollout/logprob_corr": 0.5,
        "perf/prefix_reuse_frac": None,
        "reward/mean": 1.0,
    }


def test_a_key_that_an_earlier_version_lacked_has_the_value_of_what_that_version_did():
    assert with_new_names({"model": {"path": "m"}}) == {"model": {"path": "m", "tool_format": "hermes"}}
    assert with_new_names({"model": {"tool_format": "auto"}}) == {"model": {"tool_format": "auto"}}
    assert with_new_names({"trainer": {"seed": 1}}) == {"trainer": {"seed": 1}}
