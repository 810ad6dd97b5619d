"""A key that a resume may change acts on the ranks as if the run had been started with its new value."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.tables import table
from tests.support.whole_batches import update_batch
from trainer.checkpoint.sharded import ShardedFiles
from trainer.config import Config, critic_role, policy_role
from trainer.models.tiny import TinyShape, build_tiny
from trainer.parallel.batching import Batch
from trainer.workers.base import TrainedWorker
from trainer.workers.optimizers import learning_rate
from trainer.workers.rank import Rank

GROUPS, PER_GROUP, WIDTH = 4, 2, 16
ALL = ("weights", "optimizer", "rng")
TASKS = {"policy": "rl", "critic": "rl", "supervised": "sft", "dpo": "dpo", "reward model": "rm"}
OPTIMIZERS = {"policy": "trainer.policy.optimizer", "critic": "trainer.critic.optimizer", "supervised": "sft.optimizer"}
OWN_KEYS = {"critic": ("lr",), "supervised": ("lr", "scheduler", "warmup_steps", "schedule_steps")}
"""Keys that a role does not share with the policy."""

Settings = dict[str, Any]
COSINE = {"scheduler": "cosine"}
LORA = {"trainer.policy.lora.rank": 4}

OPTIMIZER_CHANGES: list[tuple[str, Any, Settings]] = [
    ("lr", 3e-3, {}),
    ("betas", [0.5, 0.9], {}),
    ("eps", 1e-2, {}),
    ("weight_decay", 0.5, {}),
    ("max_grad_norm", 1e-3, {}),
    ("scheduler", "cosine", {}),
    ("warmup_steps", 9, {}),
    ("min_lr_ratio", 0.9, COSINE),
    ("schedule_steps", 3, COSINE),
]
"""Key, new value, and what the run has set before and after."""

CHANGES: dict[str, list[tuple[str, Any, Settings]]] = {
    "policy": [
        ("trainer.mini_batch_size", 1, {}),
        ("trainer.update_epochs", 2, {}),
        ("trainer.policy.lora.alpha", 64.0, LORA),
        ("trainer.policy.fsdp.param_dtype", "bfloat16", {}),
        ("trainer.policy.optimizer.options", {"momentum": 0.5}, {"trainer.policy.optimizer.name": "muon"}),
        ("algorithm.policy_loss", "gspo", {}),
        ("algorithm.clip_low", 0.01, {}),
        ("algorithm.clip_high", 0.01, {}),
        ("algorithm.options", {"dual_clip": 1.01}, {}),
        ("algorithm.options", {"sharpness": 3.0}, {"algorithm.policy_loss": f"{__name__}:sharp_loss"}),
        ("algorithm.aggregation", "seq_mean_token_mean", {}),
        ("algorithm.kl_coef", 2.0, {}),
        ("algorithm.kl_estimator", "k2", {}),
        ("algorithm.kl_in", "reward", {}),
        ("algorithm.opd_kl_coef", 2.0, {"algorithm.opd_kl_coef": 0.1}),
        ("algorithm.entropy_coef", 0.5, {}),
        ("rollout.temperature", 0.5, {}),
        ("rollout.max_response_tokens", 99, {"algorithm.aggregation": "seq_mean_token_sum_norm"}),
        ("model.attn_implementation", "eager", {}),
    ],
    "critic": [
        ("trainer.mini_batch_size", 1, {}),
        ("algorithm.options", {"value_clip": 1e-3}, {}),
    ],
    "supervised": [("sft.max_weight", 0.5, {"sft.max_weight": 2.0})],
    "dpo": [
        ("dpo.beta", 0.5, {}),
        ("dpo.loss_type", "ipo", {}),
        ("dpo.label_smoothing", 0.3, {}),
        ("dpo.sft_coef", 1.0, {}),
        ("dpo.simpo_gamma", 2.0, {"dpo.loss_type": "simpo"}),
    ],
    "reward model": [("rm.center_rewards_coefficient", 1.0, {})],
}
CASES = [
    *((role, key, value, before) for role, changes in CHANGES.items() for key, value, before in changes),
    *(
        (role, f"{section}.{key}", value, {f"{section}.{name}": x for name, x in before.items()})
        for role, section in OPTIMIZERS.items()
        for key, value, before in OPTIMIZER_CHANGES
        if key in OWN_KEYS.get(role, (key,))
    ),
]
PROVEN_KEYS = {key for _, key, *_ in CASES}
"""Keys that a resume changes with permission, and whose changes the tests of this file prove."""


def sharp_loss(logprobs, old_logprobs, advantages, mask, *, aggregation, totals, sharpness=1.0):
    """A loss of the user's own, with an option."""
    from trainer.algorithms import POLICY_LOSSES

    return POLICY_LOSSES["reinforce"](
        logprobs, old_logprobs, sharpness * advantages, mask, aggregation=aggregation, totals=totals
    )


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, head_dim=16, seed=3), path)
    return path


def configured(*changes: Settings) -> Config:
    cfg = Config()
    cfg.rollout.max_logprob_diff = None  # no engine has sampled the batch
    defaults: Settings = {
        "trainer.total_steps": 10,
        "trainer.train_batch_size": GROUPS,
        "trainer.mini_batch_size": GROUPS,
        "algorithm.kl_coef": 0.1,
        "sft.steps": 10,
    }
    defaults |= {f"{section}.lr": 1e-3 for section in OPTIMIZERS.values()}
    defaults |= {"trainer.policy.optimizer.max_grad_norm": 0.0, "sft.optimizer.warmup_steps": 0}
    for change in (defaults, *changes):
        for key, value in change.items():
            *sections, name = key.split(".")
            node: Any = cfg
            for section in sections:
                node = getattr(node, section)
            setattr(node, name, copy.deepcopy(value))
    return cfg


def make_batch() -> Batch:
    """Rows that serve all kinds of training alike; KL, ratios and clips all matter."""
    rng = np.random.default_rng(0)
    size = GROUPS * PER_GROUP
    lengths = rng.integers(8, WIDTH + 1, size)
    mask = (np.arange(WIDTH) >= 4) & (np.arange(WIDTH) < lengths[:, None])
    noise = rng.normal(size=(6, size, WIDTH)).astype(np.float32) * mask
    return {
        "input_ids": rng.integers(0, 256, (size, WIDTH)).astype(np.int64),
        "mask": mask.astype(np.float32),
        "lengths": lengths,
        "group_ids": np.repeat(np.arange(GROUPS), PER_GROUP),
        "advantages": noise[0],
        "returns": noise[1],
        "old_logprobs": (-5.6 + 0.5 * noise[2]) * mask,
        "rollout_logprobs": -5.6 * mask,
        "ref_logprobs": (-5.6 + 0.5 * noise[3]) * mask,
        "teacher_logprobs": (-5.6 + 0.5 * noise[5]) * mask,
        "values": 0.1 * noise[4],
        "is_chosen": np.tile(np.asarray([1, 0], np.float32), GROUPS),
        "margins": np.zeros(size, np.float32),
    }


def build(rank: Rank, role: str, cfg: Config, path: str) -> TrainedWorker:
    rank.cfg = dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, task=TASKS[role]))
    name = "critic" if role == "critic" else "policy"
    rank.build(roles(rank.cfg, [name]) if role in ("policy", "critic") else rank.cfg.roles, path)
    worker = rank.roles[name]
    assert isinstance(worker, TrainedWorker)
    return worker


def update(rank: Rank, role: str, step: int) -> dict[str, float]:
    if role == "critic":
        return update_batch(rank, "critic", make_batch(), step).metrics
    batch = make_batch()
    if role == "supervised":
        batch |= {"advantages": batch["mask"], "group_ids": np.zeros_like(batch["group_ids"])}
        del batch["ref_logprobs"]
    return update_batch(rank, "policy", batch, step).metrics


def fingerprint(worker: TrainedWorker) -> str:
    """Of weights and moments, to the last bit."""
    digest = hashlib.sha256()
    for parameter in worker.module.parameters():
        digest.update(parameter.full_tensor().detach().numpy().tobytes())
        states = [one.state[parameter] for one in worker.optimizers.all if parameter in one.state]
        for name, value in sorted(item for state in states for item in state.items()):
            digest.update(name.encode() + (value.full_tensor() if name != "step" else value).numpy().tobytes())
    return digest.hexdigest()


def move_state(old: TrainedWorker, new: TrainedWorker) -> None:
    """Give `new` the weights, moments and counter of `old`, and leave it all that its config has set."""
    new.module.load_state_dict(old.module.state_dict())
    for before, after in zip(old.optimizers.all, new.optimizers.all, strict=True):
        states = {  # or both would have the same tensors
            number: {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
            for number, state in before.state_dict()["state"].items()
        }
        after.load_state_dict({"state": states, "param_groups": after.state_dict()["param_groups"]})
    new.optimizers.steps = old.optimizers.steps


def first_step(rank: Rank, role: str, cfg: Config, path: str, files: ShardedFiles) -> TrainedWorker:
    """Train and save a step."""
    worker = build(rank, role, cfg, path)
    update(rank, role, 1)
    rank.begin_save(["critic" if role == "critic" else "policy"], files)
    rank.finish_save()
    return worker


def second_step(rank: Rank, role: str, cfg: Config, path: str, state: TrainedWorker | ShardedFiles) -> str:
    """The outcome of the second step under `cfg`, of a run with this state or of one that resumes from these files."""
    worker = build(rank, role, cfg, path)
    if isinstance(state, ShardedFiles):
        rank.call("critic" if role == "critic" else "policy", "load", state, ALL)
    else:
        move_state(state, worker)
    metrics = update(rank, role, 2)
    return f"{fingerprint(worker)} {metrics}"


def steps_after_changes(rank: Rank, role: str, path: str, directory: str) -> dict[str, tuple[str, str, str]]:
    """The second step after each change of a role, by its key: resumed, started with the new value, and unchanged.

    Changes of equal configs share the first step.
    """
    begun: dict[str, tuple[TrainedWorker, ShardedFiles, str]] = {}
    found = {}
    for of, key, value, before in CASES:
        if of != role:
            continue
        if str(before) not in begun:
            files = ShardedFiles(f"{directory}/{len(begun)}")
            old = first_step(rank, role, configured(before), path, files)
            begun[str(before)] = old, files, second_step(rank, role, configured(before), path, old)
        old, files, unchanged = begun[str(before)]
        after = configured(before, {key: value})
        resumed, started = (second_step(rank, role, after, path, state) for state in (files, old))
        found[key] = resumed, started, unchanged
    return found


@pytest.fixture(scope="module")
def outcomes(model_path, tmp_path_factory) -> Callable[[str], dict[str, tuple[str, str, str]]]:
    """What one process computes of all changes of a role."""

    @functools.cache
    def compute(role: str) -> dict[str, tuple[str, str, str]]:
        directory = str(tmp_path_factory.mktemp("checkpoints"))
        return run_ranks(1, steps_after_changes, role, model_path, directory, cfg=configured())[0]

    return compute


@table("role, key", [case[:2] for case in CASES])
def test_a_change_acts_as_if_the_run_had_started_with_it(outcomes, role, key):
    resumed, started, unchanged = outcomes(role)[key]
    assert resumed == started, "the resumed run does not compute what a run with the new value computes"
    assert resumed != unchanged, "the new value changes nothing"


def rate_of_the_next_step(rank: Rank, role: str, cfg: Config, path: str, directory: str) -> list[float]:
    name = "critic" if role == "critic" else "policy"
    build(rank, role, cfg, path)
    update(rank, role, 1)
    rank.begin_save([name], ShardedFiles(directory))
    rank.finish_save()
    rates = []
    for what, steps_added in ((ALL, 0), (ALL, 3), (("weights",), 3)):
        build(rank, role, cfg, path)
        rank.call(name, "load", ShardedFiles(directory), what, steps_added)
        rates.append(update(rank, role, 2)["lr"])
    return rates


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_the_schedule_moves_only_if_the_optimizer_is_restored(model_path, tmp_path, role):
    cfg = configured({f"trainer.policy.optimizer.{name}": value for name, value in COSINE.items()})
    rates = run_ranks(1, rate_of_the_next_step, role, cfg, model_path, str(tmp_path), cfg=cfg)[0]
    optimizer = policy_role(cfg).optimizer if role == "policy" else critic_role(cfg).optimizer
    assert rates == [learning_rate(optimizer, step, 10) for step in (1, 4, 0)]
