"""Samples as arrays: one row each, or one for all samples of an episode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.episodes import Episode, Sample
from trainer.parallel.batching import Batch, stack_padded


def batch_of(episodes: Sequence[Episode], step: int = 0) -> Batch:
    """Return the samples of episodes as arrays, in the order of the episodes (see `build_batch`)."""
    samples = [sample for episode in episodes for sample in episode.samples]
    return build_batch(samples, [episode.group for episode in episodes for _ in episode.samples], step)


def build_batch(samples: Sequence[Sample], groups: Sequence[str] | None = None, step: int = 0) -> Batch:
    """Return samples as arrays, one row each, padded on the right.

    Args:
        groups: the group of each sample. Estimators compare the rows of a group. None: each is alone.
        step: the one that trains on them, with weights of this version.

    Returns:
        `input_ids`, `mask` (1 = a token to learn from) and, if the tokens were sampled, `rollout_logprobs`: `(B, T)`;
        `lengths`, `group_ids`: `(B,)`; if older weights or another policy sampled some of them, `is_stale`: `(B,)`; if
        another policy did, `is_foreign`: `(B,)`.
    """
    lengths = np.asarray([len(sample.token_ids) for sample in samples], dtype=np.int64)
    width = int(lengths.max())
    groups = [str(i) for i in range(len(samples))] if groups is None else groups
    names = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    batch = {
        "input_ids": stack_padded([sample.token_ids for sample in samples], np.int32, width),
        "mask": stack_padded([sample.mask for sample in samples], np.float32, width),
        "lengths": lengths,
        "group_ids": np.asarray([names[group] for group in groups], dtype=np.int64),
    }
    if all(sample.logprobs is not None for sample in samples):
        batch["rollout_logprobs"] = stack_padded([sample.logprobs for sample in samples], np.float32, width)
    foreign = np.asarray([sample.is_foreign for sample in samples])
    if foreign.any():
        batch["is_foreign"] = foreign
    stale = foreign | [sample.mask.any() and 0 < (sample.weight_versions or (step,))[0] < step for sample in samples]
    if stale.any():
        batch["is_stale"] = stale
    return batch


def join_samples(batch: Batch, episode_ids: np.ndarray) -> Batch:
    """Return `batch` with one row for each episode: the tokens of its samples, one sample after another.

    Args:
        episode_ids: `(B,)`, the episode of each row, ascending from 0.
    """
    slices = _columns(batch["lengths"], episode_ids)
    lengths = np.bincount(episode_ids, weights=batch["lengths"]).astype(np.int64)
    first = np.searchsorted(episode_ids, np.arange(len(lengths)))
    joined = {name: array[first] for name, array in batch.items() if array.ndim == 1} | {"lengths": lengths}
    for name, array in batch.items():
        if array.ndim == 2:
            joined[name] = np.zeros((len(lengths), int(lengths.max())), array.dtype)
            for row, (episode, columns) in enumerate(zip(episode_ids, slices, strict=True)):
                joined[name][episode, columns] = array[row, : batch["lengths"][row]]
    return joined


def split_samples(array: np.ndarray, batch: Batch, episode_ids: np.ndarray) -> np.ndarray:
    """Return the rows `(B, T)` of `batch` of an array with one row for each episode (see `join_samples`)."""
    split = np.zeros(batch["input_ids"].shape, array.dtype)
    for row, (episode, columns) in enumerate(zip(episode_ids, _columns(batch["lengths"], episode_ids), strict=True)):
        split[row, : batch["lengths"][row]] = array[episode, columns]
    return split


def _columns(lengths: np.ndarray, episode_ids: np.ndarray) -> list[slice]:
    """Return where each row lies in the row of its episode."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    begins = starts[np.searchsorted(episode_ids, episode_ids)]  # the start of the first row of the same episode
    return [slice(int(a), int(b)) for a, b in zip(starts - begins, ends - begins, strict=True)]
