"""Every algorithm once more: plain Python floats and loops, written from the papers, sharing no code with ours.

A row is a list of the values at its completion tokens, in order; what the mask hides is not there at all.
"""

from __future__ import annotations

import itertools
import math
from statistics import fmean

Row = list[float]


# Advantages: rows of rewards, group ids -> rows of advantages


def groups_of(ids: list[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row, group in enumerate(ids):
        found.setdefault(group, []).append(row)
    return found


def spread(scores: list[float], rewards: list[Row]) -> list[Row]:
    return [[score] * len(row) for score, row in zip(scores, rewards, strict=True)]


def whiten(rows: list[Row], eps: float) -> list[Row]:
    flat = [x for row in rows for x in row]
    if len(flat) < 2:
        return rows
    mean = fmean(flat)
    variance = sum((x - mean) ** 2 for x in flat) / (len(flat) - 1)
    return [[(x - mean) / math.sqrt(variance + eps) for x in row] for row in rows]


def to_go(rewards: list[Row], gamma: float) -> list[Row]:
    return [[sum(gamma ** (u - t) * row[u] for u in range(t, len(row))) for t in range(len(row))] for row in rewards]


def gae(rewards, ids, values, gamma, lam, normalize_std=False):
    out = []
    for r, v in zip(rewards, values, strict=True):
        deltas = [r[t] + gamma * (v[t + 1] if t + 1 < len(r) else 0.0) - v[t] for t in range(len(r))]
        out.append([sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, len(r))) for t in range(len(r))])
    return whiten(out, 1e-8) if normalize_std else out


def reward(rewards, ids):
    return spread([sum(row) for row in rewards], rewards)


def zero(rewards: list[list[float]], ids: list[int]) -> list[list[float]]:
    return [[0.0] * len(row) for row in rewards]


def reverse_kl(
    rewards: list[list[float]],
    ids: list[int],
    old_logprobs: list[list[float]],
    teacher_logprobs: list[list[float]],
) -> list[list[float]]:
    both = zip(old_logprobs, teacher_logprobs, strict=True)
    return [[t - o for o, t in zip(*pair, strict=True)] for pair in both]


def grpo(rewards, ids, normalize_std=True):
    scores, out = [sum(row) for row in rewards], [0.0] * len(rewards)
    for members in groups_of(ids).values():
        own = [scores[i] for i in members]
        if max(own) == min(own):
            continue
        mean = fmean(own)
        std = math.sqrt(sum((x - mean) ** 2 for x in own) / (len(own) - 1))
        for i in members:
            out[i] = (scores[i] - mean) / (std + 1e-6) if normalize_std else scores[i] - mean
    return spread(out, rewards)


def rloo(rewards, ids):
    scores, out = [sum(row) for row in rewards], [0.0] * len(rewards)
    for members in groups_of(ids).values():
        for i in members:
            others = [scores[j] for j in members if j != i]
            out[i] = scores[i] - fmean(others) if others else 0.0
    return spread(out, rewards)


def reinforce_plus_plus(rewards, ids, gamma):
    return whiten(to_go(rewards, gamma), 1e-8)


def reinforce_plus_plus_baseline(rewards, ids):
    return whiten(grpo(rewards, ids, normalize_std=False), 1e-8)


def remax(rewards, ids, baselines, gamma, normalize_std=False):
    out = [[g - b for g in row] for row, b in zip(to_go(rewards, gamma), baselines, strict=True)]
    return whiten(out, 1e-8) if normalize_std else out


def rae(rewards, ids, baselines):
    return [[sum(row) - baseline] * len(row) for row, baseline in zip(rewards, baselines, strict=True)]


def maxrl(rewards, ids):
    scores, out = [sum(row) for row in rewards], [0.0] * len(rewards)
    for members in groups_of(ids).values():
        own = [scores[i] for i in members]
        if fmean(own) > 1e-6 and max(own) != min(own):
            for i in members:
                out[i] = (scores[i] - fmean(own)) / fmean(own)
    return spread(out, rewards)


def opo(rewards, ids):
    scores, out = [sum(row) for row in rewards], [0.0] * len(rewards)
    for members in groups_of(ids).values():
        own = [scores[i] for i in members]
        if max(own) == min(own):
            continue
        baseline = sum(len(rewards[i]) * scores[i] for i in members) / sum(len(rewards[i]) for i in members)
        for i in members:
            out[i] = scores[i] - baseline
    return spread(out, rewards)


def grpo_passk(rewards, ids, pass_k):
    """By listing all subsets of k completions: a subset's reward is 1 if one of it is right."""
    right, out = [sum(row) >= 1 for row in rewards], [0.0] * len(rewards)
    for members in groups_of(ids).values():
        if len(members) < pass_k:
            continue
        subsets = [(s, float(any(right[i] for i in s))) for s in itertools.combinations(members, pass_k)]
        mean = fmean(reward for _, reward in subsets)
        std = math.sqrt(fmean((reward - mean) ** 2 for _, reward in subsets))
        if std < 1e-8:
            continue
        for i in members:
            out[i] = fmean((reward - mean) / std for subset, reward in subsets if i in subset)
    return spread(out, rewards)


# Policy losses: rows -> rows of token losses


def ratio(new: float, old: float) -> float:
    return math.exp(new - old)


def clamp(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def per_token(function, new, old, advantages):
    return [
        [function(n, o, a) for n, o, a in zip(*rows, strict=True)] for rows in zip(new, old, advantages, strict=True)
    ]


def clip(new, old, advantages, clip_low=0.2, clip_high=0.2, dual_clip=None):
    def token(n, o, a):
        r = ratio(n, o)
        gain = min(r * a, clamp(r, 1 - clip_low, 1 + clip_high) * a)
        if dual_clip is not None and a < 0:
            gain = max(gain, dual_clip * a)
        return -gain

    return per_token(token, new, old, advantages)


def gspo(new, old, advantages, clip_low=3e-4, clip_high=4e-4):
    out = []
    for n, o, a in zip(new, old, advantages, strict=True):
        if not n:
            out.append([])
            continue
        s = math.exp(fmean(x - y for x, y in zip(n, o, strict=True)))
        out.append([-min(s * x, clamp(s, 1 - clip_low, 1 + clip_high) * x) for x in a])
    return out


def cispo(new, old, advantages, clip_low=1.0, clip_high=0.28):
    return per_token(lambda n, o, a: -clamp(ratio(n, o), 1 - clip_low, 1 + clip_high) * a * n, new, old, advantages)


def sapo(new, old, advantages, tau_pos=1.0, tau_neg=1.05):
    def token(n, o, a):
        tau = tau_pos if a > 0 else tau_neg
        x = tau * (ratio(n, o) - 1)
        sigmoid = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
        return -4 / tau * sigmoid * a

    return per_token(token, new, old, advantages)


def covariances(new, advantages):
    logps, gains = [x for row in new for x in row], [x for row in advantages for x in row]
    if not logps:
        return []
    return [(a - fmean(gains)) * (n - fmean(logps)) for n, a in zip(logps, gains, strict=True)]


def clip_cov(new, old, advantages, clip_low=0.2, clip_high=0.2, **_):
    return clip(new, old, advantages, clip_low, clip_high)  # what is detached keeps its value


def kl_cov(new, old, advantages, cov_frac=2e-3, cov_kl_coef=1.0):
    found = covariances(new, advantages)
    order = sorted(range(len(found)), key=lambda i: (-found[i], i))
    order = order[: max(1, int(cov_frac * len(found))) if cov_frac else 0]
    indices = [(i, t) for i, row in enumerate(new) for t in range(len(row))]
    chosen = {indices[i] for i in order}
    out = per_token(lambda n, o, a: -ratio(n, o) * a, new, old, advantages)
    for i, t in chosen:
        out[i][t] += cov_kl_coef * abs(new[i][t] - old[i][t])
    return out


def reinforce(new, old, advantages):
    return per_token(lambda n, o, a: -a * n, new, old, advantages)


def importance_weighted_ce(new, old, advantages, max_weight=10.0):
    return per_token(lambda n, o, a: -min(ratio(n, o), max_weight) * a * n, new, old, advantages)


def aggregate(rows: list[Row], kind: str, width: int) -> float:
    filled = [row for row in rows if row]
    if kind == "token_mean":
        return sum(map(sum, rows)) / max(1, sum(map(len, rows)))
    if not filled:
        return 0.0
    if kind == "seq_mean_token_mean":
        return fmean(fmean(row) for row in filled)
    total = fmean(sum(row) for row in filled)
    return total / width if kind == "seq_mean_token_sum_norm" else total


# KL, correction, shaping


def kl(kind: str, new: float, ref: float) -> float:
    d = new - ref
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "abs": abs(d)}[kind.rstrip("+")]


def correction_weights(trainer, engine, kind, level, low, high):
    out = []
    for a, b in zip(trainer, engine, strict=True):
        logs = [x - y for x, y in zip(a, b, strict=True)]
        if level == "token":
            ratios = [math.exp(x) for x in logs]
        elif not logs:
            ratios = []
        else:
            one = {
                "arithmetic": lambda logs=logs: fmean(math.exp(x) for x in logs),
                "geometric": lambda logs=logs: math.exp(fmean(logs)),
                "product": lambda logs=logs: math.exp(clamp(sum(logs), -177.0, 177.0)),
            }[level]()
            ratios = [one] * len(logs)
        out.append([min(r, high) if kind == "tis" else (r if low <= r <= high else 0.0) for r in ratios])
    return out


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    start = max_length - buffer
    if length <= start:
        return 0.0
    return -factor * min(1.0, (length - start) / buffer)
