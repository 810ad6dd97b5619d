"""What a policy gradient makes of the rows of a step on the driver: advantages, corrections, metrics."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from trainer.algorithms import (
    ADVANTAGES,
    correction_weights,
    informative_groups,
    kl_penalty,
    resolve,
    train_inference_mismatch,
)
from trainer.algorithms.aggregation import masked
from trainer.algorithms.registry import needs_different_completions
from trainer.config import ESTIMATOR, AlgorithmConfig, chosen_options
from trainer.config.algorithm import CORRECTION_OPTIONS, GIVEN, unprefixed
from trainer.import_utils import parameter_names
from trainer.parallel.batching import Batch, MicroBatch, select
from trainer.parallel.load_balancing import has_old_logprobs
from trainer.sandbox.limits import LARGEST_REWARD

LOG = logging.getLogger(__name__)


def add_advantages(
    batch: Batch,
    rewards: np.ndarray,
    algorithm: AlgorithmConfig,
    kl_coef: float = 0.0,
    baselines: np.ndarray | None = None,
    learnable: np.ndarray | None = None,
) -> Batch:
    """Return `batch` with `advantages` and `returns` `(B, T)`.

    Args:
        rewards: `(B,)` (see `reward_tokens`).
        baselines: `(B,)`, subtracted by `remax`.
        learnable: `(B,)`, the rows that the estimator gets; the others have advantage and return 0. None: all rows.
    """
    if learnable is None or learnable.all():
        return batch | _advantages(batch, rewards, algorithm, kl_coef, baselines)
    rows = np.flatnonzero(learnable)
    found = {name: np.zeros_like(batch["mask"]) for name in ("advantages", "returns")}
    if len(rows):
        chosen = select(batch, rows)
        chosen["group_ids"] = np.unique(chosen["group_ids"], return_inverse=True)[1]
        of_rows = None if baselines is None else baselines[rows]
        for name, values in _advantages(chosen, rewards[rows], algorithm, kl_coef, of_rows).items():
            found[name][rows] = values
    return batch | found


def reward_tokens(batch: Batch, rewards: np.ndarray, algorithm: AlgorithmConfig, kl_coef: float) -> torch.Tensor:
    """Return the reward of each token, `(B, T)`. The reward `(B,)` is given at the last completion token; with
    `kl_in=reward` every token also pays `kl_coef` times its KL to the reference."""
    mask = torch.from_numpy(batch["mask"])
    token_rewards = torch.zeros_like(mask)
    positions = torch.arange(mask.shape[1])
    last = torch.where(mask > 0, positions, 0).amax(dim=1)  # tool output may follow it
    token_rewards[torch.arange(len(last)), last] = torch.from_numpy(rewards.astype(np.float32))
    if algorithm.kl_in == "reward" and "ref_logprobs" in batch:
        old, reference = (torch.from_numpy(batch[name]) for name in ("old_logprobs", "ref_logprobs"))
        token_rewards = token_rewards - kl_coef * kl_penalty(old, reference, algorithm.kl_estimator, mask)
    return token_rewards


def _advantages(
    batch: Batch, rewards: np.ndarray, algorithm: AlgorithmConfig, kl_coef: float, baselines: np.ndarray | None
) -> Batch:
    tensors = {name: torch.from_numpy(value) for name, value in batch.items()}
    mask, token_rewards = tensors["mask"], reward_tokens(batch, rewards, algorithm, kl_coef)
    function = resolve(ADVANTAGES, algorithm.advantage_estimator, "algorithm.advantage_estimator")
    arrays = tensors if baselines is None else tensors | {"baselines": torch.from_numpy(baselines)}
    named = [name for name in parameter_names(function) if name in arrays and name not in GIVEN[ESTIMATOR]]
    options = chosen_options(function, algorithm, ESTIMATOR) | {name: arrays[name].float() for name in named}
    advantages, returns = function(token_rewards, mask, tensors["group_ids"], **options)
    return {"advantages": advantages.float().numpy(), "returns": returns.float().numpy()}


def choose_learnable_rows(
    batch: Batch, rewards: np.ndarray, known: np.ndarray, algorithm: AlgorithmConfig, kl_coef: float
) -> np.ndarray:
    """Return `(B,)`, true for the rows, one for each episode, that can be learnt from.

    The reward of such a row is known and, with its penalties, not beyond `LARGEST_REWARD`. If the estimator compares
    the completions of a prompt, at least one other row of the group is like that.

    Args:
        rewards: `(B,)`, with `overlong_penalty`.
        known: `(B,)`, false where the reward, or the baseline that `remax` subtracts from it, failed.
    """
    learnable = known.copy()
    if algorithm.overlong_buffer or (algorithm.kl_in == "reward" and "ref_logprobs" in batch):
        paid = masked(reward_tokens(batch, rewards, algorithm, kl_coef), torch.from_numpy(batch["mask"])).double()
        sums = np.maximum(np.abs(rewards), paid.sum(dim=1).abs().numpy())
        beyond = np.isfinite(sums) & (sums > LARGEST_REWARD)  # what is not finite ends the run at its loss
        if (beyond & known).any():
            LOG.warning(
                "%d rewards are left out: with the penalties of algorithm.overlong_buffer and algorithm.kl_coef they "
                "are beyond %g",
                (beyond & known).sum(),
                LARGEST_REWARD,
            )
        learnable &= ~beyond
    estimator = resolve(ADVANTAGES, algorithm.advantage_estimator, "algorithm.advantage_estimator")
    if not learnable.all() and needs_different_completions(estimator):
        _, groups = np.unique(batch["group_ids"], return_inverse=True)
        learnable &= np.bincount(groups, weights=learnable)[groups] >= 2
    return learnable


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """Return 1 - Var(return - value) / Var(return). If all returns are equal, the result is 1 for values with a
    constant error and 0 for others, as in scikit-learn."""
    values, returns = values.astype(np.float64), returns.astype(np.float64)
    errors = returns - values
    if returns.var() <= 1e-12 * np.square(returns).mean():  # equal but for rounding
        return float(errors.max() == errors.min())
    return float(1 - errors.var() / returns.var())


def correct_advantages(batch: Batch, algorithm: AlgorithmConfig, kind: str | None) -> np.ndarray:
    """Return the advantages `(B, T)`, multiplied by the weights of a rollout correction.

    Every policy loss is linear in the advantages, so this weighs the terms of its surrogate. `clip_cov` and `kl_cov`
    choose tokens by the corrected advantages, and the penalty of `kl_cov` has no weight. Rows whose old log-probs only
    the update computes are corrected there.

    Args:
        kind: see `correction_of`.
    """
    if kind is None or "old_logprobs" not in batch or "rollout_logprobs" not in batch:
        return batch["advantages"]
    weights, _ = token_weights(batch, algorithm, kind)
    known = has_old_logprobs(batch)[:, None]
    return np.where(known, batch["advantages"] * weights.numpy(), batch["advantages"])


def correction_metrics(batch: Batch, algorithm: AlgorithmConfig, kind: str) -> dict[str, float]:
    _, bound = token_weights(batch, algorithm, kind)
    return {"rollout_is/clip_frac": float(bound.sum()) / max(float(batch["mask"].sum()), 1.0)}


def token_weights(
    batch: Batch | MicroBatch, algorithm: AlgorithmConfig, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `correction_weights` of the tokens, `(B, T)`, and which of them are bounded."""
    arrays = (torch.as_tensor(batch[name]) for name in ("old_logprobs", "rollout_logprobs", "mask"))
    return correction_weights(*arrays, kind=kind, **unprefixed(algorithm, CORRECTION_OPTIONS))


def mask_rows(
    batch: Batch,
    rewards: np.ndarray,
    status: Sequence[str],
    algorithm: AlgorithmConfig,
    learnable: np.ndarray | None = None,
) -> Batch:
    """Return `batch` with `mask` 0 in the rows that are not to be learnt from, by the status of their episodes, and
    (see `choose_learnable_rows`) `learnable` `(B,)`."""
    keep = np.ones(len(rewards), dtype=bool) if learnable is None else learnable.copy()
    if algorithm.run_option("filter_zero_variance") and keep.any():
        rows = np.flatnonzero(keep)
        group_ids = torch.from_numpy(batch["group_ids"][rows])
        keep[rows] = informative_groups(torch.from_numpy(rewards[rows]), group_ids).numpy()
    if algorithm.run_option("overlong_masking"):
        keep &= np.asarray(status) != "length"
    return batch if keep.all() else {**batch, "mask": batch["mask"] * keep[:, None]}


def describe_rewards(
    batch: Batch, rewards: np.ndarray, status: Sequence[str], known: np.ndarray | None = None
) -> dict[str, float]:
    """Return metrics of rewards and lengths. `known` `(B,)` is false where the reward failed."""
    known = np.ones(len(rewards), dtype=bool) if known is None else known
    lengths = (batch["mask"] > 0).sum(axis=1)
    groups = range(int(batch["group_ids"].max()) + 1)
    by_group = [rewards[known & (batch["group_ids"] == group)] for group in groups]
    metrics = {"reward/mean": rewards[known].mean(), "reward/std": rewards[known].std()} if known.any() else {}
    metrics |= {
        "reward/zero_std_frac": np.mean([not len(group) or group.max() == group.min() for group in by_group]),
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/clip_ratio": (np.asarray(status) == "length").mean(),
    }
    return {name: float(value) for name, value in metrics.items()}


def logprob_mismatch(batch: Batch) -> dict[str, float]:
    """Return metrics of the difference between the engine's and the trainer's log-probs; none without a token. Tokens
    that another policy has sampled have no part in it."""
    if "is_foreign" in batch:
        batch = {**batch, "mask": batch["mask"] * ~batch["is_foreign"][:, None]}
    mask = batch["mask"] > 0
    if not mask.any():  # no agent of the step has asked the policy
        return {}
    difference = np.abs(batch["old_logprobs"] - batch["rollout_logprobs"])[mask]
    metrics = {"rollout/logprob_diff_mean": difference.mean(), "rollout/logprob_diff_max": difference.max()}
    shown = train_inference_mismatch(
        *(torch.from_numpy(batch[name]) for name in ("old_logprobs", "rollout_logprobs", "mask"))
    )
    return {name: float(v) for name, v in (metrics | {f"rollout/{name}": v for name, v in shown.items()}).items()}
