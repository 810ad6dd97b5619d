"""Every function under every preset has the values that its documentation names, unless the user writes others."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf

from tests.support.config import config_of, refusal_of
from trainer.algorithms import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES, resolve
from trainer.config import (
    ESTIMATOR,
    LOSS,
    AlgorithmConfig,
    Config,
    aggregation_of,
    chosen_options,
    conf_dir,
    register,
    to_config,
)
from trainer.config.algorithm import OPTION_KEYS
from trainer.errors import UserError
from trainer.objectives.check import check_functions, user_options

PRESETS = sorted(path.stem for path in Path(conf_dir(), "algorithm").glob("*.yaml"))
REGISTRIES = {ESTIMATOR: ADVANTAGES, LOSS: POLICY_LOSSES}
CHOICES = {ESTIMATOR: [*ADVANTAGES, "own_functions:advantage"], LOSS: [*POLICY_LOSSES, "own_functions:loss"]}
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "grpo": {"clip": {"aggregation": "seq_mean_token_mean"}},
    "dapo": {"clip": {"clip_high": 0.28}},
    "dr_grpo": {"grpo": {"normalize_std": False}, "clip": {"aggregation": "seq_mean_token_sum_norm"}},
    "ppo": {"gae": {"normalize_std": True, "lam": 0.95}},
    "remax": {"remax": {"normalize_std": True}},
    "rloo": {"clip": {"aggregation": "seq_mean_token_sum"}},
}
"""The options that a preset sets, for the function that each is meant for."""

OWN_FUNCTIONS = """
from trainer.algorithms import ADVANTAGES, POLICY_LOSSES

def advantage(rewards, mask, group_ids, *, {estimator}, {loss}):
    return ADVANTAGES["rloo"](rewards, mask, group_ids)

def loss(logprobs, old_logprobs, advantages, mask, *, totals, {estimator}, {loss}):
    return POLICY_LOSSES["clip"](logprobs, old_logprobs, advantages, mask)

def bare_loss(logprobs, old_logprobs, advantages, mask, *, aggregation, totals):
    return POLICY_LOSSES["clip"](logprobs, old_logprobs, advantages, mask, aggregation=aggregation)
"""


@pytest.fixture(autouse=True)
def own_functions(tmp_path, monkeypatch) -> None:
    """Functions of the user's, with an option of the name of each that presets set, and defaults that nothing else
    has."""
    options = {ESTIMATOR: ("normalize_std", "gamma", "lam"), LOSS: OPTION_KEYS[LOSS]}
    parameters = {
        key: ", ".join(
            f"{name}={'seq_mean_token_sum' if name == 'aggregation' else 0.125 * i!r}"
            for i, name in enumerate(names, start=1)
        )
        for key, names in options.items()
    }
    text = OWN_FUNCTIONS.format(estimator=parameters[ESTIMATOR], loss=parameters[LOSS])
    (tmp_path / "own_functions.py").write_text(text.replace("=seq_mean_token_sum", "='seq_mean_token_sum'"))
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_functions", None)


@functools.cache
def composed(*overrides: str) -> DictConfig:
    """The config before it is resolved, so that one composition serves many choices."""
    register()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=conf_dir()):
        return hydra.compose("config", overrides=list(overrides))


def changed(config: DictConfig, **values: Any) -> Config:
    """The config with other values of `algorithm`, as the command line would set them."""
    config = copy.deepcopy(config)
    for name, value in values.items():
        OmegaConf.update(config, f"algorithm.{name}", value)
    return to_config(config)


def options_reaching(function: Any, algorithm: AlgorithmConfig, key: str) -> dict[str, Any]:
    """The options with which the function is called: what the config gives, and its own defaults for the rest."""
    own = {name: inspect.signature(function).parameters[name].default for name in user_options(function)}
    given = chosen_options(function, algorithm, key)
    return own | given | ({"aggregation": aggregation_of(function, algorithm)} if key == LOSS else {})


@pytest.mark.parametrize("preset", PRESETS)
def test_every_function_has_its_documented_options_under_every_preset(preset):
    config = copy.deepcopy(composed(f"algorithm={preset}"))
    if preset != "opd":  # it needs a teacher
        check_functions(to_config(config))
    for key, value in (("teacher.path", "t"), ("opd_kl_coef", 1.0)):
        OmegaConf.update(config, f"algorithm.{key}", value)
    for i in range(max(map(len, CHOICES.values()))):
        chosen = {key: names[i % len(names)] for key, names in CHOICES.items()}
        for key, name in chosen.items():
            OmegaConf.update(config, f"algorithm.{key}", name)
        cfg = to_config(config)
        check_functions(cfg)
        for key, name in chosen.items():
            function = resolve(REGISTRIES[key], name, f"algorithm.{key}")
            own = {option: inspect.signature(function).parameters[option].default for option in user_options(function)}
            expected = own | RECIPES.get(preset, {}).get(name, {})
            assert options_reaching(function, cfg.algorithm, key) == expected, (preset, chosen)
    for key in RECIPES.get(preset, {}):
        of_preset = to_config(composed(f"algorithm={preset}")).algorithm
        assert key in {getattr(of_preset, key) for key in REGISTRIES}, "a recipe that never holds"


@pytest.mark.parametrize("preset", PRESETS)
def test_kl_aggregation_and_correction_can_be_chosen_under_every_preset(preset):
    config = composed(f"algorithm={preset}")
    in_reward = to_config(config).algorithm.kl_in == "reward"
    for i, kind in enumerate(KL_ESTIMATORS):
        if in_reward and kind.endswith("+"):
            with pytest.raises(UserError, match="choose k1, k2, k3 or abs"):
                changed(config, kl_estimator=kind)
        chosen = {
            "kl_estimator": kind,
            "kl_in": "loss",
            "aggregation": list(AGGREGATIONS)[i % len(AGGREGATIONS)],
            "rollout_correction": list(CORRECTIONS)[i % len(CORRECTIONS)],
        }
        algorithm = changed(config, **chosen).algorithm
        assert {name: getattr(algorithm, name) for name in chosen} == chosen
    assert changed(config, kl_in="loss").algorithm.kl_estimator == "k3", "k1 has no gradient in a loss"


def test_the_preset_grpo_is_that_of_its_paper():
    algorithm = config_of([]).algorithm
    of_loss = options_reaching(POLICY_LOSSES["clip"], algorithm, LOSS)
    assert (of_loss["clip_low"], of_loss["clip_high"], of_loss["aggregation"]) == (0.2, 0.2, "seq_mean_token_mean")
    assert (algorithm.kl_in, algorithm.kl_estimator) == ("loss", "k3")
    assert options_reaching(ADVANTAGES["grpo"], algorithm, ESTIMATOR)["normalize_std"] is True


def test_what_the_user_writes_counts_for_any_function():
    gspo = config_of(["algorithm.policy_loss=gspo", "algorithm.clip_high=0.5", "algorithm.aggregation=token_mean"])
    assert (gspo.algorithm.clip_high, gspo.algorithm.aggregation) == (0.5, "token_mean")
    own = config_of(["algorithm=dapo", "algorithm.policy_loss=own_functions:loss", "algorithm.clip_high=0.5"]).algorithm
    loss = resolve(POLICY_LOSSES, own.policy_loss, "algorithm.policy_loss")
    assert options_reaching(loss, own, LOSS)["clip_high"] == 0.5
    dapo = config_of(["algorithm=dapo", "algorithm.clip_high=null"]).algorithm
    assert options_reaching(POLICY_LOSSES["clip"], dapo, LOSS)["clip_high"] == 0.2, "null: the function's default"


def test_a_file_of_the_user_counts_too(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nalgorithm: {policy_loss: gspo, clip_high: 0.5}\n"
    (tmp_path / "experiment/mine.yaml").write_text(text)
    algorithm = config_of([f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"]).algorithm
    assert (algorithm.clip_low, algorithm.clip_high) == (None, 0.5)


def test_a_loss_without_a_default_of_its_own_gets_token_mean():
    config = config_of(["algorithm.policy_loss=own_functions:bare_loss"])
    check_functions(config)
    loss = resolve(POLICY_LOSSES, config.algorithm.policy_loss, "algorithm.policy_loss")
    assert aggregation_of(loss, config.algorithm) == "token_mean"


def test_another_estimator_than_ppo_s_needs_no_critic():
    config = config_of(["algorithm=ppo", "algorithm.advantage_estimator=grpo"])
    assert [role.name for role in config.roles] == ["policy", "reference"] and config.algorithm.kl_in == "loss"
    check_functions(config)


def test_a_condition_on_a_key_that_does_not_exist_is_refused():
    override = "algorithm.clip_high='${if_eq:algorithm.loss,clip,0.28}'"
    assert "algorithm.loss has no value" in refusal_of([override])
