"""The functions that a config chooses are checked before anything starts."""

from __future__ import annotations

import inspect
import sys

import pytest

from tests.support.config import config_of
from tests.support.tables import table
from trainer.algorithms import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES, resolve
from trainer.algorithms.registry import needs_different_completions
from trainer.config import LOSS, AlgorithmConfig, Config, chosen_options, compose
from trainer.config.algorithm import TeacherConfig
from trainer.config.fields import walk_keys
from trainer.errors import UserError
from trainer.objectives.check import check_functions, user_options

FUNCTIONS = """
import functools
import torch
from trainer.algorithms import ADVANTAGES, POLICY_LOSSES

def scaled(rewards, mask, group_ids, scale=1.0):
    return ADVANTAGES["rloo"](scale * rewards, mask, group_ids)

def clipped(rewards, mask, group_ids, clip_low=1.0):
    return ADVANTAGES["rloo"](rewards, mask, group_ids)

def open_to_any(logprobs, old_logprobs, advantages, mask, *, aggregation, totals, **options):
    return POLICY_LOSSES["reinforce"](logprobs, old_logprobs, advantages, mask)

def one_tensor(rewards, mask, group_ids):
    return rewards

def whitened(rewards, mask, group_ids):
    scores = rewards.sum(dim=1).view(2, 2)
    scores = (scores - scores.mean(dim=1, keepdim=True)) / scores.std(dim=1, keepdim=True)
    return scores.view(4, 1) * mask, rewards

def needs_values(rewards, mask, group_ids, *, values, baselines):
    return values, values - baselines[:, None]

def needs_other(rewards, mask, group_ids, *, entropies):
    return entropies, entropies

def bare(logprobs, old_logprobs, advantages, mask, *, aggregation, totals):
    return logprobs.sum(), {}

def reading(logprobs, old_logprobs, advantages, mask, ref_logprobs, *, group_ids, values, returns, beta=0.1, **_):
    margin = logprobs.sum() - ref_logprobs.sum() + (values - returns).sum()
    return beta * margin, {"groups": torch.tensor(float(len(group_ids.unique())))}

def averaged(losses):
    @functools.wraps(losses)
    def loss(*arrays, aggregation, totals):
        return losses(*arrays).sum() / totals.tokens, {}
    return loss

@averaged
def decorated(logprobs, old_logprobs, advantages, mask):
    return -logprobs * advantages * mask

def numbers(logprobs, old_logprobs, advantages, mask, *, aggregation, totals):
    return logprobs.sum(), {"share": 0.5}

def taken(logprobs, old_logprobs, advantages, mask, *, aggregation, totals):
    return logprobs.sum(), {"grad_norm": logprobs.sum().detach()}

def arrays_of_numpy(rewards, mask, group_ids):
    return rewards.numpy(), rewards.numpy()

def no_metrics(logprobs, old_logprobs, advantages, mask, *, aggregation, totals):
    return logprobs

def old_first(old_log_prob, log_prob, advantages, response_mask, aggregation, totals):
    return log_prob.sum(), {}

def no_totals(logprobs, old_logprobs, advantages, mask, aggregation="token_mean"):
    return logprobs.sum(), {}

def detached(logprobs, old_logprobs, advantages, mask, *, aggregation, totals):
    return logprobs.sum().detach(), {"clip_frac": 0.0, "approx_kl": 0.0}
"""


@pytest.fixture
def own_functions(tmp_path, monkeypatch) -> None:
    (tmp_path / "own_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_functions", None)


@table(
    "settings",
    [
        {},
        {"advantage_estimator": "own_functions:scaled", "options": {"scale": 3}},
        {"policy_loss": "own_functions:decorated"},
        {"policy_loss": "own_functions:open_to_any", "options": {"whatever": 3}},
        {"policy_loss": "own_functions:open_to_any", "aggregation": "seq_mean_token_sum"},
        {"advantage_estimator": "own_functions:needs_values"},
        {"policy_loss": "own_functions:bare"},
        {"policy_loss": "own_functions:reading", "options": {"beta": 0.5}},
        {"advantage_estimator": "grpo_passk", "options": {"pass_k": 8}},
        {"rollout_correction": "mis", "options": {"rollout_correction_low": 2}},
        {"rollout_correction": "tis", "options": {"rollout_correction_low": 3, "dual_clip": 3}},
        {"kl_coef": 0.1, "options": {"kl_horizon": 512, "kl_target": 0.1}},
    ],
)
def test_valid_functions_are_accepted(settings, own_functions):
    check_functions(Config(algorithm=AlgorithmConfig(**settings)))


@table(
    "settings, problem",
    [
        (
            {"advantage_estimator": "own_functions:scaled", "options": {"scael": 3}},
            "algorithm.options.scael=3: no chosen function has this option; the options are .*scale$",
        ),
        (
            {"advantage_estimator": "own_functions:scaled", "options": {"clip_low": 0.1}},
            "algorithm.options.clip_low=0.1: no chosen function has this option; the options are .*scale$",
        ),
        (
            {"advantage_estimator": "own_functions:clipped", "policy_loss": "sapo", "clip_low": 0.1},
            "algorithm.clip_low=0.1: algorithm.policy_loss=sapo does not take it; it takes tau_pos, tau_neg, "
            "aggregation$",
        ),
        (
            {"policy_loss": "own_functions:open_to_any", "clip_low": 0.1},
            "algorithm.clip_low=0.1: .*open_to_any does not take it",
        ),
        (
            {"advantage_estimator": "own_functions:one_tensor"},
            r"it must return \(advantages, returns\), .* of the rewards, \(4, 3\)$",
        ),
        (
            {"advantage_estimator": "own_functions:arrays_of_numpy"},
            r"it must return \(advantages, returns\), both tensors",
        ),
        ({"advantage_estimator": "own_functions:whitened"}, "it returned NaN or an infinity; mind a group of equal"),
        ({"advantage_estimator": "own_functions:needs_other"}, "TypeError: .* missing .* 'entropies'"),
        ({"policy_loss": "own_functions:numbers"}, "its metrics must be scalar tensors by their names"),
        ({"policy_loss": "own_functions:no_metrics"}, r"must return \(loss, metrics\), the loss a scalar tensor"),
        (
            {"policy_loss": "own_functions:old_first"},
            "its first parameter is old_log_prob; the order is logprobs, old_logprobs, advantages, mask$",
        ),
        ({"policy_loss": "own_functions:no_totals"}, "unexpected keyword argument 'totals'"),
        ({"policy_loss": "own_functions:taken"}, "its metric grad_norm has the name of one of the trainer's"),
        ({"policy_loss": "own_functions:detached"}, "its loss does not depend on the log-probs"),
        ({"policy_loss": "math:sqrt"}, "algorithm.policy_loss=math:sqrt: on four completions .* TypeError"),
        ({"policy_loss": "magic"}, "algorithm.policy_loss=magic: choose one of clip, gspo"),
        ({"advantage_estimator": "magic"}, "algorithm.advantage_estimator=magic: choose one of gae, reward, grpo"),
        ({"options": {"tau_pos": 1.0}}, "algorithm.options.tau_pos=1.0: no chosen function has .* are .*dual_clip$"),
        ({"policy_loss": "gspo", "options": {"dual_clip": 3.0}}, "algorithm.options.dual_clip=3.0: no chosen function"),
        ({"options": {"clip_high": 0.3}}, "algorithm.options.clip_high=0.3: no chosen function has this option"),
        ({"options": {"kl_horizon": 512}}, "algorithm.options.kl_horizon=512: no chosen function has this option"),
        ({"options": {"dual_clip": 1}}, "algorithm.options.dual_clip=1: must be above 1$"),
        ({"options": {"dual_clip": "x"}}, "algorithm.options.dual_clip=x: must be a number$"),
        ({"options": {"rollout_correction_level": "x"}}, "rollout_correction_level=x: choose one of token, arithmetic"),
        (
            {"rollout_correction": "mis", "options": {"rollout_correction_low": 3}},
            "rollout_correction_low=3: exceeds rollout_correction_high=2.0",
        ),
        (
            {"advantage_estimator": "grpo_passk", "options": {"pass_k": 1.5}},
            "algorithm.options.pass_k=1.5: must be a whole number$",
        ),
        (
            {"advantage_estimator": "grpo_passk", "options": {"pass_k": 9}},
            "algorithm.options.pass_k=9: exceeds rollout.n=8",
        ),
        (
            {"options": {"kl_target": 0.1, "kl_horizon": 500}},
            "algorithm.options.kl_horizon=500: must be at least the 512 completions of one step",
        ),
        (
            {"advantage_estimator": "rloo", "policy_loss": "reinforce", "clip_low": 0.1},
            "algorithm.clip_low=0.1: algorithm.policy_loss=reinforce does not take it; it takes aggregation$",
        ),
        (
            {"advantage_estimator": "grpo", "options": {"normalize_std": 1}},
            "algorithm.options.normalize_std=1: must be true or false$",
        ),
        (
            {"advantage_estimator": "rloo", "options": {"gamma": 0.9}},
            "algorithm.options.gamma=0.9: no chosen function has this option; the options are .*filter_zero_variance",
        ),
        ({"advantage_estimator": "gae", "options": {"lam": 1.5}}, "algorithm.options.lam=1.5: must be at most 1$"),
        ({"options": {"overlong_masking": 1}}, "algorithm.options.overlong_masking=1: must be true or false$"),
        ({"options": {"overlong_factor": 2.0}}, "algorithm.options.overlong_factor=2.0: no chosen function has this"),
        (
            {"dynamic_sampling": True, "options": {"max_gen_batches": 0}},
            "algorithm.options.max_gen_batches=0: must be at least 1$",
        ),
        (
            {"dynamic_sampling": True, "options": {"max_gen_batches": 1.5}},
            "algorithm.options.max_gen_batches=1.5: must be a whole number$",
        ),
        (
            {"policy_loss": "clip_cov", "options": {"cov_high": 0.5}},
            "algorithm.options.cov_low=1.0: exceeds cov_high=0.5, which leaves no token",
        ),
        (
            {"policy_loss": "clip_cov", "options": {"cov_low": 6.0}},
            "options.cov_low=6.0: exceeds cov_high=5.0",
        ),
        (
            {"advantage_estimator": "reverse_kl"},
            "algorithm.teacher.path=null: algorithm.advantage_estimator=reverse_kl .*; name a teacher",
        ),
    ],
)
def test_invalid_functions_and_options_are_refused(settings, problem, own_functions):
    with pytest.raises(UserError, match=problem) as error:
        check_functions(Config(algorithm=AlgorithmConfig(**settings)))
    assert "\n" not in str(error.value)


@table("estimator", ADVANTAGES)
def test_estimators_that_compare_completions_need_several_different_ones(estimator):
    compares = ("grpo", "rloo", "reinforce_plus_plus_baseline", "maxrl", "opo", "grpo_passk")
    assert needs_different_completions(ADVANTAGES[estimator]) == (estimator in compares)
    for key, value in (("n", 1), ("temperature", 0.0)):
        teacher = TeacherConfig(path="/t")
        config = Config(algorithm=AlgorithmConfig(advantage_estimator=estimator, teacher=teacher, opd_kl_coef=1.0))
        setattr(config.rollout, key, value)
        if estimator not in compares:
            check_functions(config)
            continue
        with pytest.raises(UserError, match=rf"^rollout.{key}={value}: .*algorithm.advantage_estimator={estimator}"):
            check_functions(config)


def test_every_option_of_a_built_in_function_has_a_default():
    for registry in (ADVANTAGES, POLICY_LOSSES):
        for function in registry.values():
            defaults = [inspect.signature(function).parameters[name].default for name in user_options(function)]
            assert inspect.Parameter.empty not in defaults, "null must mean the function's own default"


@table(
    "key, names",
    [
        ("aggregation", (None, *AGGREGATIONS)),
        ("kl_estimator", KL_ESTIMATORS),
        ("rollout_correction", ("auto", "off", *CORRECTIONS)),
    ],
)
def test_the_schema_offers_the_registered_functions(key, names):
    rules = {name: rule for name, _, rule in walk_keys(AlgorithmConfig())}
    assert set(rules[key].choices) == set(names)


@table("policy_loss", POLICY_LOSSES)
def test_a_loss_that_cannot_correct_for_older_weights_is_refused(policy_loss):
    stale = [f"algorithm.policy_loss={policy_loss}", "rollout.ahead=1", "algorithm.old_logprobs=rollout"]
    if policy_loss != "reinforce":
        check_functions(config_of(stale))
    else:
        with pytest.raises(UserError, match="^algorithm.policy_loss=reinforce: has no ratio .*rollout.ahead=1; choose"):
            check_functions(config_of(stale))
    check_functions(config_of([*stale, "algorithm.rollout_correction=off"]))
    check_functions(config_of([*stale, "algorithm.old_logprobs=recompute"]))
    check_functions(config_of([*stale, "rollout.ahead=0"]))


def test_replay_without_a_correction_or_what_the_estimator_reads_is_refused():
    replay = ["data.synthetic=null", "data.train_size=-1", "data.val_size=-1", "data.mix.old.files=[a.arrow]"]
    replay += ["data.mix.old.replay=true", "trainer.val_interval=-1"]
    for more in ([], ["algorithm.rollout_correction=mis"], ["algorithm.old_logprobs=rollout"]):
        check_functions(config_of([*replay, *more]))
    refused = {"algorithm.rollout_correction=off": "nothing corrects", "algorithm=remax": "no greedy completion"}
    for key, problem in refused.items():
        with pytest.raises(UserError, match=f"^data.mix.old.replay=true: .*{problem}"):
            check_functions(config_of([*replay, key]))


def test_functions_by_import_path_get_their_options(tmp_path, monkeypatch):
    (tmp_path / "my_options.py").write_text("def mine(logprobs, old, advantages, mask, *, sharpness, clip_low): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = "my_options:mine"
    options = ["algorithm.clip_low=0.1", "+algorithm.options.sharpness=3"]
    algorithm = compose([f"algorithm.policy_loss={path}", *options]).algorithm
    function = resolve(POLICY_LOSSES, path, "algorithm.policy_loss")
    assert chosen_options(function, algorithm, LOSS) == {"clip_low": 0.1, "sharpness": 3}
