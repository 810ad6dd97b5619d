"""Advantage estimators: `ADVANTAGES[name](rewards, mask, group_ids, **options) -> (advantages, returns)`.

`rewards` and `mask` are `(B, T)`. `group_ids` is `(B,)`, equal for completions of one prompt. R_i is the sum of the
token rewards of completion i, g its group, n the size of the group. Both results are `(B, T)`, float32 or wider, 0
where `mask` is 0, and have no gradient. Only a critic is trained on the returns. Whitening is (x - mean) /
sqrt(variance + eps) over the completion tokens of the batch, with the unbiased variance. A single token keeps its
value, and equal values become 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trainer.algorithms.aggregation import masked
from trainer.algorithms.kl import at_least_float32, log_ratio
from trainer.algorithms.registry import compares_completions


@torch.no_grad()
def gae(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    values: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    normalize_std: bool = False,
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2015, equations 11 and 16).

        delta_t = r_t + gamma V_{t+1} - V_t          A_t = delta_t + gamma lam A_{t+1}

    where t + 1 is the next completion token: tokens with mask 0 (prompt, tool output, padding) are skipped. The value
    after the last completion token is 0.

    Args:
        values: `(B, T)`; `values[:, t]` is the value of the state before token t.
        normalize_std: whiten the advantages over all completion tokens of the batch.

    Returns:
        the advantages, and the returns: advantage before whitening + value.
    """
    rewards, values = (masked(tensor, mask) for tensor in at_least_float32(rewards, values))
    active = mask > 0
    next_value = rewards.new_zeros(len(rewards))
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(active[:, t], advantage, advantages[:, t])
        next_advantage = torch.where(active[:, t], advantage, next_advantage)
        next_value = torch.where(active[:, t], values[:, t], next_value)
    returns = masked(advantages + values, mask)
    return (_whiten(advantages, mask, eps) if normalize_std else advantages), returns


@torch.no_grad()
def reward(rewards: Tensor, mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The reward without a baseline (REINFORCE; Williams, 1992): A_i = R_i.

    With reward 1 and the loss `reinforce`, this is maximum likelihood: supervised training.
    """
    return _to_tokens(_scores(rewards, mask), mask)


@torch.no_grad()
def zero(rewards: Tensor, mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """No advantage: the divergence from the teacher (`opd_kl_coef`) alone is trained, and rewards are measured."""
    nothing = torch.zeros_like(*at_least_float32(rewards))
    return nothing, nothing


@torch.no_grad()
def reverse_kl(
    rewards: Tensor, mask: Tensor, group_ids: Tensor, *, old_logprobs: Tensor, teacher_logprobs: Tensor
) -> tuple[Tensor, Tensor]:
    """On-policy distillation (Lu et al., Thinking Machines, 2025): A_t = log p_t - log q_t.

    p is the probability of the token by the teacher, q that by the old policy. The expected policy gradient is that of
    -KL(policy || teacher). Rewards are measured, and not trained on.
    """
    advantages = masked(-log_ratio(old_logprobs, teacher_logprobs, mask), mask)
    return advantages, advantages


@compares_completions
@torch.no_grad()
def grpo(
    rewards: Tensor, mask: Tensor, group_ids: Tensor, *, normalize_std: bool = True, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage (Shao et al., DeepSeekMath, 2024, section 4.1).

        A_i = (R_i - mean_g R) / (std_g R + eps)

    with the unbiased standard deviation. Without `normalize_std` there is no division (Dr. GRPO, Liu et al., 2025).
    A group of one, or of equal rewards, has advantage 0.
    """
    scores, group = _scores(rewards, mask), _Groups(group_ids)
    centered = group.centered(scores)
    if normalize_std:
        centered = centered / (group.std(centered)[group.index] + eps)
    return _to_tokens(centered, mask)


@compares_completions
@torch.no_grad()
def rloo(rewards: Tensor, mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """REINFORCE leave-one-out (Kool et al., 2019; Ahmadian et al., Back to Basics, 2024).

        A_i = R_i - mean of the other rewards of g = n / (n - 1) (R_i - mean_g R)

    A group of one has advantage 0.
    """
    scores, group = _scores(rewards, mask), _Groups(group_ids)
    size = group.size[group.index].to(scores)
    return _to_tokens(group.centered(scores) * size / (size - 1).clamp(min=1), mask)


@torch.no_grad()
def reinforce_plus_plus(
    rewards: Tensor, mask: Tensor, group_ids: Tensor, *, gamma: float = 1.0, eps: float = 1e-8
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (Hu, 2025): the discounted reward to go, whitened over all tokens of the batch.

        G_t = r_t + gamma G_{t+1}          A_t = (G_t - mean G) / sqrt(var G + eps)

    Returns:
        the advantages, and G.
    """
    returns = _reward_to_go(rewards, mask, gamma)
    return _whiten(returns, mask, eps), returns


@compares_completions
@torch.no_grad()
def reinforce_plus_plus_baseline(
    rewards: Tensor, mask: Tensor, group_ids: Tensor, *, eps: float = 1e-8
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with the group's mean as baseline (Hu, 2025): R_i - mean_g R, whitened over all tokens of the batch.

    A batch in which the rewards of each group are equal has advantage 0.
    """
    scores = _Groups(group_ids).centered(_scores(rewards, mask))
    advantages = _whiten(_to_tokens(scores, mask)[0], mask, eps)
    return advantages, advantages


@torch.no_grad()
def remax(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    baselines: Tensor,
    gamma: float = 1.0,
    normalize_std: bool = False,
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """ReMax (Li et al., 2023): the reward to go minus the reward of the prompt's greedy completion.

    A greedy completion is better than most samples. So most advantages are negative, unless they are whitened.

    Args:
        baselines: `(B,)`, the reward of the greedy completion of each row's prompt.
        normalize_std: whiten the advantages over all completion tokens of the batch.

    Returns:
        the advantages, and the reward to go.
    """
    returns, baselines = at_least_float32(_reward_to_go(rewards, mask, gamma), baselines)
    advantages = masked(returns - baselines.unsqueeze(-1), mask)
    return (_whiten(advantages, mask, eps) if normalize_std else advantages), returns


@torch.no_grad()
def rae(rewards: Tensor, mask: Tensor, group_ids: Tensor, *, player_baselines: Tensor) -> tuple[Tensor, Tensor]:
    """Role-conditioned advantage estimation (Liu et al., SPIRAL, 2025, section 3.3), for self-play.

        A_i = R_i - b          b <- d b + (1 - d) R_i

    b is the moving average of the rewards of the player of completion i, from 0, and is read before its own update. So
    what a player gains by its place in the game is no credit. Any size of group will do. d is the option
    `baseline_decay` (0.95). Each player of each source has an average, which is part of checkpoints.

    Args:
        player_baselines: `(B,)`, b of each row (see `MovingAverages`).
    """
    scores, baselines = at_least_float32(_scores(rewards, mask), player_baselines)
    return _to_tokens(scores - baselines, mask)


class MovingAverages:
    """The moving averages of `rae`, with d = `decay`."""

    def __init__(self, decay: float = 0.95):
        self.decay = decay
        self.averages: dict[str, float] = {}

    def read(self, players: Sequence[str], rewards: Sequence[float | None]) -> tuple[list[float], dict[str, float]]:
        """Return the average of each player before its reward, one after another, and the averages after all of them.

        Args:
            rewards: None: it is not known, and changes nothing.
        """
        averages, baselines = dict(self.averages), []
        for player, reward in zip(players, rewards, strict=True):
            baselines.append(averages.get(player, 0.0))
            if reward is not None:
                averages[player] = self.decay * baselines[-1] + (1 - self.decay) * reward
        return baselines, averages

    def state_dict(self) -> dict[str, float]:
        return dict(self.averages)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.averages = dict(state)


@compares_completions
@torch.no_grad()
def maxrl(rewards: Tensor, mask: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Maximum-likelihood RL (Tajwar et al., 2026): A_i = (R_i - mean_g R) / mean_g R.

    For rewards of 0 and 1, the expected gradient is that of a truncated expansion of log p(correct) instead of
    p(correct), so hard prompts weigh more. Rewards must not be negative. A group whose mean is at most `eps` has
    advantage 0.
    """
    scores, group = _scores(rewards, mask), _Groups(group_ids)
    mean = group.mean(scores)[group.index]
    scaled = group.centered(scores) / torch.where(mean > eps, mean, torch.ones_like(mean))
    return _to_tokens(torch.where(mean > eps, scaled, torch.zeros_like(scaled)), mask)


@compares_completions
@torch.no_grad()
def opo(rewards: Tensor, mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """On-policy RL with the optimal baseline (Hao et al., 2025): A_i = R_i - sum_g(l R) / sum_g(l).

    l_i is the length of the completion. A group of one, or of equal rewards, has advantage 0.
    """
    scores, group = _scores(rewards, mask), _Groups(group_ids)
    lengths = (mask > 0).sum(dim=-1).to(scores.dtype)
    # Subtract the mean first, because equal rewards then cancel without rounding.
    centered = group.centered(scores)
    baseline = group.sum(lengths * centered) / group.sum(lengths).clamp(min=1)
    advantages = torch.where(group.is_constant(scores), torch.zeros_like(scores), centered - baseline[group.index])
    return _to_tokens(advantages, mask)


@compares_completions
@torch.no_grad()
def grpo_passk(
    rewards: Tensor, mask: Tensor, group_ids: Tensor, *, pass_k: int = 2, eps: float = 1e-8
) -> tuple[Tensor, Tensor]:
    """Pass@k training, analytic form (Chen et al., 2025, equations 10 to 16).

    A completion with a reward of at least 1 is correct; w of the group's n are wrong. Over all subsets of size k:

        p = 1 - C(w, k) / C(n, k)          s = sqrt(p (1 - p))
        A_correct = (1 - p) / s            A_wrong = (1 - p - C(w - 1, k - 1) / C(n - 1, k - 1)) / s

    A group has advantage 0 if it always or never passes (s = 0), or is smaller than k.

    Args:
        pass_k: k, at least 1.
    """
    if pass_k < 1:
        raise ValueError(f"algorithm.options.pass_k={pass_k}: must be at least 1")
    scores, group = _scores(rewards, mask), _Groups(group_ids)
    correct = (scores >= 1).to(scores.dtype)
    sizes, wrong = group.size.tolist(), group.sum(1 - correct).tolist()
    of_correct, of_wrong = torch.zeros_like(group.size), torch.zeros_like(group.size)
    for g, (n, w) in enumerate(zip(map(int, sizes), map(int, wrong), strict=True)):
        if n < pass_k:
            continue
        p = 1 - math.comb(w, pass_k) / math.comb(n, pass_k)
        s = math.sqrt(p * (1 - p))
        if s > eps:
            of_correct[g] = (1 - p) / s
            of_wrong[g] = (1 - p - math.comb(max(w - 1, 0), pass_k - 1) / math.comb(n - 1, pass_k - 1)) / s
    advantages = torch.where(correct > 0, of_correct[group.index], of_wrong[group.index])
    return _to_tokens(advantages.to(scores), mask)


class _Groups:
    """Sums, means and standard deviations over the rows of each group."""

    def __init__(self, group_ids: Tensor):
        _, self.index = torch.unique(group_ids, return_inverse=True)
        self.count = int(self.index.max()) + 1 if len(group_ids) else 0
        self.size = torch.zeros(self.count, dtype=torch.float64, device=group_ids.device)
        self.size.index_add_(0, self.index, torch.ones_like(self.index, dtype=torch.float64))

    def sum(self, values: Tensor) -> Tensor:
        return torch.zeros(self.count, dtype=values.dtype, device=values.device).index_add_(0, self.index, values)

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.size.to(values)

    def is_constant(self, values: Tensor) -> Tensor:
        """Return `(B,)`, True where all values of the row's group are equal. Exact, because it compares the values."""
        low = torch.full((self.count,), torch.inf, dtype=values.dtype, device=values.device)
        high = -low
        low = low.scatter_reduce(0, self.index, values, "amin")
        high = high.scatter_reduce(0, self.index, values, "amax")
        return (low == high)[self.index]

    def centered(self, values: Tensor) -> Tensor:
        """Return the differences from the group's mean. They are exactly 0 in a group of equal values."""
        difference = values - self.mean(values)[self.index]
        return torch.where(self.is_constant(values), torch.zeros_like(values), difference)

    def std(self, centered: Tensor) -> Tensor:
        """Return the unbiased standard deviation of each group, from centred values."""
        return (self.sum(centered.square()) / (self.size.to(centered) - 1).clamp(min=1)).sqrt()


def _scores(rewards: Tensor, mask: Tensor) -> Tensor:
    return masked(*at_least_float32(rewards), mask).sum(dim=-1)


def _to_tokens(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    tokens = scores.unsqueeze(-1) * (mask > 0)
    return tokens, tokens


def _reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    rewards, active = masked(*at_least_float32(rewards), mask), mask > 0
    following = rewards.new_zeros(len(rewards))
    returns = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        reward_to_go = rewards[:, t] + gamma * following
        returns[:, t] = torch.where(active[:, t], reward_to_go, returns[:, t])
        following = torch.where(active[:, t], reward_to_go, following)
    return returns


def _whiten(values: Tensor, mask: Tensor, eps: float) -> Tensor:
    active = values[mask > 0]
    if active.numel() < 2:
        return values
    if active.min() == active.max():  # the mean of equal values is rounded, and eps is too small to hide the error
        return torch.zeros_like(values)
    return masked((values - active.mean()) * torch.rsqrt(active.var() + eps), mask)


ADVANTAGES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    function.__name__: function
    for function in (
        *(gae, reward, grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline),
        *(remax, rae, maxrl, opo, grpo_passk, reverse_kl, zero),
    )
}


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Soft penalty for long completions (DAPO, Yu et al., 2025, equation 13), `(B,)`. Add it to the rewards.

        0                                                     if length <= max_length - buffer
        -factor (length - (max_length - buffer)) / buffer     otherwise, down to -factor at max_length

    Args:
        lengths: `(B,)`, numbers of completion tokens.
    """
    if buffer < 1:
        raise ValueError(f"algorithm.overlong_buffer={buffer}: must be at least 1 token")
    excess = (lengths.double() - (max_length - buffer)) / buffer
    return -factor * excess.clamp(0.0, 1.0)


def shape_rewards(rewards: Tensor, lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Return the rewards `(B,)` to train on: with `overlong_penalty`, unless `buffer` is 0."""
    return rewards + overlong_penalty(lengths, max_length, buffer, factor) if buffer else rewards


def informative_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return `(B,)`, True where the rewards of the row's group differ.

    With a group baseline, a group of equal rewards has advantage 0 and no gradient.
    """
    return ~_Groups(group_ids).is_constant(rewards)
