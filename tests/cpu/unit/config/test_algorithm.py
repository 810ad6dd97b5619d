"""Keys of `algorithm.*`: contradictions, what is read, and the options of the chosen functions."""

from __future__ import annotations

import pytest

from tests.cpu.unit.config.contradictions import (  # noqa: F401
    test_contradictions_are_refused_in_one_sentence,
    test_what_is_at_a_bound_is_accepted,
)
from trainer.config import ESTIMATOR, LOSS, AlgorithmConfig, Config, compose, named_options
from trainer.config.algorithm import (
    aggregation_of,
    check_group_size,
    chosen_options,
    correction_of,
    option_names,
    own_defaults,
)
from trainer.errors import UserError

CONTRADICTIONS = [
    (["algorithm=ppo", "algorithm.kl_estimator=k3+"], r"algorithm.kl_estimator=k3\+.*straight-through"),
    (["algorithm=cispo", "algorithm.kl_controller=adaptive"], "algorithm.kl_controller=adaptive.*kl_coef"),
    (
        ["algorithm.kl_controller=adaptive", "algorithm.kl_horizon=500"],
        "algorithm.kl_horizon=500.0: must be at least the 512 completions of one step",
    ),
    (["algorithm=remax", "rollout.n=1", "algorithm.dynamic_sampling=true"], "rollout.n=1.*dynamic_sampling"),
    (["algorithm=dapo", "rollout.temperature=0"], "rollout.temperature=0.0: .*dynamic_sampling"),
    (["algorithm.overlong_buffer=17"], "algorithm.overlong_buffer=17: exceeds rollout.max_response_tokens=16"),
    (
        ["algorithm.advantage_estimator=grpo_passk", "algorithm.pass_k=9"],
        "algorithm.pass_k=9: exceeds rollout.n=8",
    ),
    (
        ["algorithm.advantage_estimator=grpo_passk", "algorithm.overlong_buffer=2"],
        "algorithm.advantage_estimator=grpo_passk: .*a penalty taken off",
    ),
    (
        ["algorithm.advantage_estimator=grpo_passk", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1"],
        "algorithm.advantage_estimator=grpo_passk: .*a penalty taken off",
    ),
    (
        ["algorithm.rollout_correction=mis", "algorithm.rollout_correction_low=3"],
        "rollout_correction_low=3.0: exceeds algorithm.rollout_correction_high=2.0",
    ),
    (
        ["algorithm.rollout_correction=tis", "algorithm.old_logprobs=rollout"],
        "algorithm.rollout_correction=tis: corrects the engine's log-probs",
    ),
    (["algorithm=gspo", "algorithm.ref_sync_interval=5"], "algorithm.ref_sync_interval=5: there is no reference"),
    (
        ["algorithm.ref_sync_interval=5", "trainer.colocate_roles=false"],
        "algorithm.ref_sync_interval=5: .*trainer.colocate_roles=true",
    ),
]
AT_THE_BOUND = [
    ["algorithm.advantage_estimator=grpo_passk", "algorithm.pass_k=8", "algorithm.kl_in=loss"],
    ["algorithm.advantage_estimator=grpo_passk", "algorithm.kl_in=reward", "algorithm.kl_coef=0"],
    ["algorithm.rollout_correction=mis", "algorithm.rollout_correction_low=2"],
    ["algorithm.rollout_correction=tis", "algorithm.rollout_correction_low=3"],
    ["algorithm.overlong_buffer=16"],
    ["algorithm.kl_controller=adaptive", "algorithm.kl_horizon=512"],
    ["algorithm.dynamic_sampling=true", "rollout.n=2"],
]


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        ([], None),
        (["rollout.ahead=1"], "tis"),
        (["rollout.in_flight_updates=true"], "tis"),
        (["rollout.ahead=1", "algorithm.old_logprobs=rollout"], None),
        (["rollout.ahead=1", "algorithm.rollout_correction=off"], None),
        (["rollout.ahead=1", "algorithm.rollout_correction=null"], None),
        (["rollout.ahead=1", "algorithm.rollout_correction=mis"], "mis"),
        (["algorithm.rollout_correction=tis"], "tis"),
    ],
    ids=str,
)
def test_rollouts_of_older_weights_are_corrected_unless_that_is_off(overrides, kind):
    assert correction_of(compose(overrides)) == kind


def test_a_correction_can_be_off_in_a_file(tmp_path):
    """YAML reads off as false."""
    path = tmp_path / "mine.yaml"
    path.write_text("algorithm:\n  rollout_correction: off\nrollout:\n  ahead: 1\n")
    config = compose(config_file=str(path))
    assert config.algorithm.rollout_correction == "off" and correction_of(config) is None


def test_named_options_are_those_that_are_set():
    algorithm = AlgorithmConfig(dual_clip=3.0, clip_high=0.3, lam=0.5, kl_target=0.1, options={"x": 1})
    assert named_options(algorithm, LOSS) == {"clip_high": 0.3, "dual_clip": 3.0}
    assert named_options(algorithm, ESTIMATOR) == {"lam": 0.5}


def loss(logprobs, old_logprobs, advantages, mask, *, clip_high=0.1, sharpness=2.0, aggregation="seq_mean_token_sum"):
    """A loss of the user's, for its signature alone."""


def plain_loss(logprobs, old_logprobs, advantages, mask):
    """One without options."""


OWN = f"{__name__}:loss"


def test_every_option_belongs_to_the_key_that_chooses_its_function():
    assert {"gamma", "lam", "pass_k", "normalize_std"} == set(option_names(ESTIMATOR))
    assert {"clip_low", "aggregation"} <= set(option_names(LOSS))
    assert not set(option_names(ESTIMATOR)) & set(option_names(LOSS))


def test_a_function_gets_the_options_that_it_takes_and_that_are_set():
    algorithm = AlgorithmConfig(policy_loss=OWN, clip_low=0.3, clip_high=0.3, lam=0.5, options={"sharpness": 3, "x": 1})
    assert chosen_options(loss, algorithm, LOSS) == {"clip_high": 0.3, "sharpness": 3}
    assert chosen_options(plain_loss, algorithm, LOSS) == {}
    algorithm.policy_loss = "clip"  # `options` are for functions by import path
    assert chosen_options(loss, algorithm, LOSS) == {"clip_high": 0.3}


@pytest.mark.parametrize(
    ("function", "key", "found"),
    [(loss, None, "seq_mean_token_sum"), (loss, "token_mean", "token_mean"), (plain_loss, None, "token_mean")],
)
def test_the_config_decides_the_aggregation_then_the_signature(function, key, found):
    assert aggregation_of(function, AlgorithmConfig(aggregation=key)) == found


def test_own_defaults_of_a_function_by_import_path_are_read_on_request():
    chosen = {"policy_loss": OWN, "advantage_estimator": "gae"}
    assert own_defaults(chosen, custom=True)["clip_high"] == 0.1
    assert "clip_high" not in own_defaults(chosen)
    assert own_defaults({"policy_loss": "no.such:function"}, custom=True) == {"aggregation": "token_mean"}


@pytest.mark.parametrize(
    ("algorithm", "reads"),
    [
        (AlgorithmConfig(), False),
        (AlgorithmConfig(kl_coef=0.1), True),
        (AlgorithmConfig(policy_loss="kl_cov"), False),
    ],
)
def test_a_kl_reads_the_log_probs_of_the_reference(algorithm, reads):
    assert ("ref_logprobs" in algorithm.reads) == reads


def test_groups_that_are_compared_need_two_completions_that_differ():
    config = Config()
    check_group_size(config, "x")
    config.rollout.n = 1
    with pytest.raises(UserError, match="^rollout.n=1: x compares completions"):
        check_group_size(config, "x")
    config.rollout.n, config.rollout.temperature = 2, 0.0
    with pytest.raises(UserError, match="^rollout.temperature=0.0: greedy completions"):
        check_group_size(config, "x")
