"""From completions to the batch the ranks train on, and the numbers worth knowing about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.algorithms import (
    ADVANTAGES,
    correction_weights,
    informative_groups,
    kl_penalty,
    mismatch,
    options_of,
    overlong_penalty,
    resolve,
)
from trainer.config import AlgorithmConfig, Config, chosen_options
from trainer.parallel.batching import Batch, stack_padded

if TYPE_CHECKING:
    from trainer.data.source import DrawnPrompt
    from trainer.generation.engine import Completion


@dataclass(frozen=True)
class Rollouts:
    """What a step has sampled."""

    prompts: list[DrawnPrompt]
    """P prompts to train on."""
    completions: list[Completion]
    """P * n completions, those of one prompt together."""
    rewards: np.ndarray
    """`(P * n,)`."""
    drawn: list[DrawnPrompt]
    """What the ledger counts as consumed once the step commits: the prompts, and those passed over for them."""
    drawn_rewards: list[float]
    """The mean reward of each of them."""
    metrics: dict[str, float]
    baselines: np.ndarray | None = None
    """`(P * n,)`, the reward of each prompt's greedy completion (for `remax`)."""


def choose_groups(rewards: np.ndarray, wanted: int, complete: bool) -> tuple[list[int], int] | None:
    """Which groups of completions to train on, of those sampled so far: the first `wanted` that teach something.

    Args:
        rewards: `(P, n)`.
        complete: no more will be sampled: fill up with the first of the others.

    Returns:
        the chosen groups, ascending, and how many groups are used up (the ledger goes by a prefix); None when
        more must be sampled.
    """
    informative = np.flatnonzero(rewards.max(axis=1) != rewards.min(axis=1))[:wanted].tolist()
    if len(informative) == wanted:
        return informative, informative[-1] + 1
    if not complete:
        return None
    others = [i for i in range(len(rewards)) if i not in set(informative)]
    return sorted(informative + others[: wanted - len(informative)]), len(rewards)


def build_batch(prompts: Sequence[DrawnPrompt], completions: Sequence[Completion]) -> Batch:
    """Prompt and completion of each row, padded on the right.

    Args:
        prompts: P prompts.
        completions: P * n completions, those of one prompt together.

    Returns:
        `input_ids`, `mask` (1 = completion token), `rollout_logprobs`: `(B, T)`; `lengths`,
        `group_ids`: `(B,)`.
    """
    n = len(completions) // len(prompts)
    heads = [list(prompts[i // n].prompt.token_ids) for i in range(len(completions))]
    starts = [len(head) for head in heads]
    rows = [head + list(c.token_ids) for head, c in zip(heads, completions, strict=True)]
    lengths = np.asarray([len(row) for row in rows], dtype=np.int64)
    width = int(lengths.max())
    return {
        "input_ids": stack_padded(rows, np.int64, width),
        "mask": stack_padded([[1.0] * len(c.token_ids) for c in completions], np.float32, width, starts),
        "rollout_logprobs": stack_padded([c.logprobs for c in completions], np.float32, width, starts),
        "lengths": lengths,
        "group_ids": np.arange(len(completions), dtype=np.int64) // n,
    }


def shape_rewards(rewards: np.ndarray, completions: Sequence[Completion], cfg: Config) -> np.ndarray:
    """The rewards `(B,)` that are trained on: with DAPO's punishment of long completions, if that is on."""
    a = cfg.algorithm
    if a.overlong_buffer == 0:
        return rewards
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    penalty = overlong_penalty(lengths, cfg.rollout.max_response_tokens, a.overlong_buffer, a.overlong_factor)
    return rewards + penalty.numpy()


def add_advantages(
    batch: Batch, rewards: np.ndarray, algorithm: AlgorithmConfig, kl_coef: float = 0.0,
    baselines: np.ndarray | None = None,
) -> Batch:  # fmt: skip
    """`batch` with `advantages` and `returns` `(B, T)`.

    The reward `(B,)` is given at the last completion token; with `kl_in=reward` every token also pays
    `kl_coef` times its KL to the reference.

    Args:
        baselines: `(B,)`, what `remax` subtracts.
    """
    tensors = {name: torch.from_numpy(value) for name, value in batch.items()}
    mask = tensors["mask"]
    token_rewards = torch.zeros_like(mask)
    positions = torch.arange(mask.shape[1])
    last = torch.where(mask > 0, positions, 0).amax(dim=1)  # tool output may follow it
    token_rewards[torch.arange(len(last)), last] = torch.from_numpy(rewards.astype(np.float32))
    if algorithm.kl_in == "reward" and "ref_logprobs" in batch:
        kl = kl_penalty(tensors["old_logprobs"], tensors["ref_logprobs"], algorithm.kl_estimator, mask)
        token_rewards = token_rewards - kl_coef * kl
    function = resolve(ADVANTAGES, algorithm.advantage_estimator, "algorithm.advantage_estimator")
    given = {"values": tensors.get("values"), "baselines": None if baselines is None else torch.from_numpy(baselines)}
    options = chosen_options(function, algorithm) | {
        name: value.float() for name, value in given.items() if value is not None and name in options_of(function)
    }
    advantages, returns = function(token_rewards, mask, tensors["group_ids"], **options)
    return {**batch, "advantages": advantages.float().numpy(), "returns": returns.float().numpy()}


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(return - value) / Var(return). Returns that are all equal leave nothing to explain: 1 for values that
    miss them by a constant at most, else 0, as in scikit-learn."""
    values, returns = values.astype(np.float64), returns.astype(np.float64)
    errors = returns - values
    if returns.var() <= 1e-12 * np.square(returns).mean():  # equal but for rounding
        return float(errors.max() == errors.min())
    return float(1 - errors.var() / returns.var())


def correct_rollouts(batch: Batch, algorithm: AlgorithmConfig) -> tuple[Batch, dict[str, float]]:
    """`batch` whose advantages are multiplied by the weights of `algorithm.rollout_correction`, and metrics.

    That weighs the surrogate terms of every policy loss, which are linear in the advantages; what `clip_cov` and
    `kl_cov` choose, and the penalty of the latter, go by the corrected advantages but are not weighted.
    """
    if algorithm.rollout_correction is None:
        return batch, {}
    mask = torch.from_numpy(batch["mask"])
    weights, bound = correction_weights(
        torch.from_numpy(batch["old_logprobs"]), torch.from_numpy(batch["rollout_logprobs"]), mask,
        kind=algorithm.rollout_correction, level=algorithm.rollout_correction_level,
        low=algorithm.rollout_correction_low, high=algorithm.rollout_correction_high,
    )  # fmt: skip
    metrics = {"rollout/corrected_frac": float(bound.sum()) / max(float(mask.sum()), 1.0)}
    return {**batch, "advantages": batch["advantages"] * weights.numpy()}, metrics


def leave_out_rows(batch: Batch, rewards: np.ndarray, completions: Sequence[Completion], a: AlgorithmConfig) -> Batch:
    """`batch` whose `mask` is 0 in the rows that are not to be learnt from."""
    keep = np.ones(len(rewards), dtype=bool)
    if a.filter_zero_variance:
        keep &= informative_groups(torch.from_numpy(rewards), torch.from_numpy(batch["group_ids"])).numpy()
    if a.overlong_masking:
        keep &= np.asarray([c.finish_reason != "length" for c in completions])
    return batch if keep.all() else {**batch, "mask": batch["mask"] * keep[:, None]}


def describe(batch: Batch, rewards: np.ndarray, completions: Sequence[Completion]) -> dict[str, float]:
    """Reward, length and agreement metrics of one step's experience (names in `trainer.metrics.names`)."""
    lengths = np.asarray([len(c.token_ids) for c in completions])
    by_group = rewards.reshape(int(batch["group_ids"].max()) + 1, -1)
    mask = batch["mask"] > 0
    difference = np.abs(batch["old_logprobs"] - batch["rollout_logprobs"])[mask]
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/zero_std_frac": (by_group.max(axis=1) == by_group.min(axis=1)).mean(),
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/clip_ratio": np.mean([c.finish_reason == "length" for c in completions]),
        "rollout/logprob_diff_mean": difference.mean(),
        "rollout/logprob_diff_max": difference.max(),
    }
    shown = mismatch(*(torch.from_numpy(batch[n]) for n in ("old_logprobs", "rollout_logprobs", "mask")))
    metrics |= {f"rollout/{name}": value for name, value in shown.items()}
    if "values" in batch:
        metrics["critic/explained_variance"] = explained_variance(batch["values"][mask], batch["returns"][mask])
    return {name: float(value) for name, value in metrics.items()}
