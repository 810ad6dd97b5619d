"""Keys of `algorithm.*`: contradictions, what is read, and the options of the chosen functions."""

from __future__ import annotations

import pytest

from tests.cpu.unit.config.contradictions import (  # noqa: F401
    test_contradictions_are_refused_in_one_sentence,
    test_what_is_at_a_bound_is_accepted,
)
from tests.support.config import config_of
from trainer.algorithms import ADVANTAGES, POLICY_LOSSES
from trainer.config import ESTIMATOR, LOSS, AlgorithmConfig, Config, compose, named_options
from trainer.config.algorithm import (
    BUILT_IN_INPUTS,
    INPUTS,
    aggregation_of,
    chosen_options,
    correction_of,
)
from trainer.config.rules import check_group_size
from trainer.errors import UserError
from trainer.import_utils import parameter_names

TAUGHT = ("algorithm=opd", "algorithm.teacher.path=t")
OVER_THE_VOCABULARY = ("algorithm.teacher.path=t", "algorithm.opd_kl_coef=1", "algorithm.teacher.divergence=jsd")
SERVED = ("algorithm=opd", "algorithm.teacher.url=http://a:1")
MIXED = (
    "algorithm=opd",
    "data=files",
    "trainer.val_interval=-1",
    *(f"+data.mix.{name}.files=[x]" for name in ("math", "code")),
)

CONTRADICTIONS = [
    (["algorithm=ppo", "algorithm.kl_estimator=k3+"], r"algorithm.kl_estimator=k3\+.*straight-through"),
    (["algorithm=cispo", "+algorithm.options.kl_target=1"], "algorithm.options.kl_target=1.*kl_coef"),
    (["algorithm=remax", "rollout.n=1", "algorithm.dynamic_sampling=true"], "rollout.n=1.*dynamic_sampling"),
    (["algorithm=dapo", "rollout.temperature=0"], "rollout.temperature=0.0: .*dynamic_sampling"),
    (["algorithm.opd_kl_coef=1"], "algorithm.opd_kl_coef=1.0: needs algorithm.teacher.path"),
    (["algorithm.advantage_estimator=zero"], "algorithm.advantage_estimator=zero: trains nothing"),
    (["algorithm.teacher.path=t"], "algorithm.teacher.path=t: nothing reads the teacher"),
    ([*TAUGHT, "algorithm.teacher.divergence=jsd"], "algorithm.teacher.divergence=jsd: needs algorithm.opd_kl_coef"),
    ([*TAUGHT, "algorithm.opd_kl_coef=1", "algorithm.teacher.beta=0.2"], "beta=0.2: needs .*divergence=jsd"),
    ([*TAUGHT, "algorithm.opd_kl_coef=1", "algorithm.teacher.beta=0.01"], "beta=0.01: must be at least 0.05"),
    ([*TAUGHT, "rollout.temperature=0.7"], "algorithm.teacher.temperature=1.0: .*at rollout.temperature=0.7 alone"),
    (["algorithm.teacher.temperature=2"], "algorithm.teacher.temperature=2.0: needs algorithm.teacher.path"),
    ([*SERVED, "algorithm.teacher.path=t"], "algorithm.teacher.url=http://a:1: the teacher is on the ranks .* or on"),
    ([*SERVED, "algorithm.teacher.url=http://a:1/x"], "http://a:1/x is no address of a server"),
    (
        [*SERVED, "algorithm.opd_kl_coef=1", "algorithm.teacher.top_k=8"],
        "algorithm.teacher.top_k=8: needs .*a divergence over the vocabulary",
    ),
    ([*SERVED, "rollout.temperature=2", "algorithm.teacher.temperature=2"], "temperature=2.0: a server gives the"),
    (["algorithm=opd", "algorithm.teacher.path={math:m}"], "data.mix has no source math"),
    ([*MIXED, "algorithm.teacher.path={math:m}"], "algorithm.teacher.path=.*names no teacher for data.mix.code"),
    (
        [*MIXED, "algorithm.teacher.path={math:m,code:c}", *OVER_THE_VOCABULARY[1:]],
        "algorithm.teacher.divergence=jsd: several teachers on the ranks",
    ),
    (["algorithm.overlong_buffer=17"], "algorithm.overlong_buffer=17: exceeds rollout.max_response_tokens=16"),
    (
        ["algorithm.advantage_estimator=grpo_passk", "algorithm.overlong_buffer=2"],
        "algorithm.advantage_estimator=grpo_passk: .*a penalty taken off",
    ),
    (
        ["algorithm.advantage_estimator=grpo_passk", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1"],
        "algorithm.advantage_estimator=grpo_passk: .*a penalty taken off",
    ),
    (
        ["algorithm.rollout_correction=tis", "algorithm.old_logprobs=rollout"],
        "algorithm.rollout_correction=tis: corrects the engine's log-probs",
    ),
    (["algorithm=gspo", "algorithm.ref_sync_interval=5"], "algorithm.ref_sync_interval=5: there is no reference"),
]
AT_THE_BOUND = [
    TAUGHT,
    SERVED,
    [*MIXED, "algorithm.teacher.url={math:http://a:1,code:http://b:1}", *OVER_THE_VOCABULARY[1:]],
    [*MIXED, "algorithm.teacher.path={math:m,code:c}"],
    [*TAUGHT, "rollout.temperature=0.7", "algorithm.teacher.temperature=0.7", "algorithm.opd_kl_coef=1"],
    [*OVER_THE_VOCABULARY, "algorithm.advantage_estimator=zero", "algorithm.teacher.temperature=2"],
    ["algorithm.advantage_estimator=grpo_passk", "algorithm.kl_in=loss"],
    ["algorithm.advantage_estimator=grpo_passk", "algorithm.kl_in=reward", "algorithm.kl_coef=0"],
    ["algorithm.overlong_buffer=16"],
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
        (["rollout.ahead=1", "algorithm.rollout_correction=mis"], "mis"),
        (["algorithm.rollout_correction=tis"], "tis"),
    ],
    ids=str,
)
def test_rollouts_of_older_weights_are_corrected_unless_that_is_off(overrides, kind):
    assert correction_of(config_of(overrides)) == kind


def test_a_correction_can_be_off_in_a_file(tmp_path):
    """YAML reads off as false."""
    path = tmp_path / "mine.yaml"
    path.write_text("algorithm:\n  rollout_correction: off\nrollout:\n  ahead: 1\n")
    config = compose(config_file=str(path))
    assert config.algorithm.rollout_correction == "off" and correction_of(config) is None


def test_named_options_are_those_that_are_set():
    algorithm = AlgorithmConfig(clip_high=0.3, options={"x": 1, "y": None})
    assert algorithm.options == {"x": 1}, "null is the default of the function"
    assert named_options(algorithm, LOSS) == {"clip_high": 0.3}
    assert named_options(algorithm, ESTIMATOR) == {}


def loss(logprobs, old_logprobs, advantages, mask, *, clip_high=0.1, sharpness=2.0, aggregation="seq_mean_token_sum"):
    """A loss of the user's, for its signature alone."""


def plain_loss(logprobs, old_logprobs, advantages, mask):
    """One without options."""


OWN = f"{__name__}:loss"


def test_the_table_of_inputs_says_what_the_built_in_functions_read():
    found = {
        name: frozenset(parameter_names(function)) & frozenset(INPUTS[key])
        for key, functions in ((ESTIMATOR, ADVANTAGES), (LOSS, POLICY_LOSSES))
        for name, function in functions.items()
    }
    assert {name: inputs for name, inputs in found.items() if inputs} == BUILT_IN_INPUTS


def test_a_function_gets_the_options_that_it_takes_and_that_are_set():
    algorithm = AlgorithmConfig(policy_loss=OWN, clip_low=0.3, clip_high=0.3, options={"sharpness": 3, "x": 1})
    assert chosen_options(loss, algorithm, LOSS) == {"clip_high": 0.3, "sharpness": 3}
    assert chosen_options(plain_loss, algorithm, LOSS) == {}


@pytest.mark.parametrize(
    ("function", "key", "found"),
    [(loss, None, "seq_mean_token_sum"), (loss, "token_mean", "token_mean"), (plain_loss, None, "token_mean")],
)
def test_the_config_decides_the_aggregation_then_the_signature(function, key, found):
    assert aggregation_of(function, AlgorithmConfig(aggregation=key)) == found


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
