"""Samples as arrays: one row each, or one for all samples of a conversation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from trainer.episodes import Episode, Sample
from trainer.parallel.batching import Batch, stack_padded


def batch_of(episodes: Sequence[Episode], step: int = 0) -> Batch:
    """Return the samples of episodes as arrays, in the order of the episodes (see `build_batch`). A group is a prompt
    and a player. With several players, `prompt_ids` `(B,)` are equal for the groups of a prompt."""
    samples = [sample for episode in episodes for sample in episode.samples]
    groups = [(episode.group, sample.player) for episode in episodes for sample in episode.samples]
    batch = build_batch(samples, groups, step)
    if any(player for _, player in groups):
        batch["prompt_ids"] = _numbered([prompt for prompt, _ in groups])
    return batch


def conversations_of(episodes: Sequence[Episode]) -> tuple[list[Episode], list[Sample], np.ndarray]:
    """Return the conversations of episodes, one for each player: the episode and the first sample of each, and the
    conversation `(B,)` of each sample, ascending from 0."""
    rows = [(episode, sample) for episode in episodes for sample in episode.samples]
    numbers = [(i, sample.player) for i, episode in enumerate(episodes) for sample in episode.samples]
    ids = _numbered(numbers)
    first = np.unique(ids, return_index=True)[1]
    return [rows[i][0] for i in first], [rows[i][1] for i in first], ids


def _numbered(names: Sequence[Hashable]) -> np.ndarray:
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return np.asarray([numbers[name] for name in names], dtype=np.int64)


def build_batch(samples: Sequence[Sample], groups: Sequence[Hashable] | None = None, step: int = 0) -> Batch:
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
    batch = {
        "input_ids": stack_padded([sample.token_ids for sample in samples], np.int32, width),
        "mask": stack_padded([sample.mask for sample in samples], np.float32, width),
        "lengths": lengths,
        "group_ids": _numbered(range(len(samples)) if groups is None else groups),
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


def join_samples(batch: Batch, conversation_ids: np.ndarray) -> Batch:
    """Return `batch` with one row for each conversation (`(B,)`, ascending from 0): its samples' tokens, one after
    another."""
    slices = _columns(batch["lengths"], conversation_ids)
    lengths = np.bincount(conversation_ids, weights=batch["lengths"]).astype(np.int64)
    first = np.searchsorted(conversation_ids, np.arange(len(lengths)))
    joined = {name: array[first] for name, array in batch.items() if array.ndim == 1} | {"lengths": lengths}
    for name, array in batch.items():
        if array.ndim == 2:
            joined[name] = np.zeros((len(lengths), int(lengths.max())), array.dtype)
            for row, (number, columns) in enumerate(zip(conversation_ids, slices, strict=True)):
                joined[name][number, columns] = array[row, : batch["lengths"][row]]
    return joined


def split_samples(array: np.ndarray, batch: Batch, conversation_ids: np.ndarray) -> np.ndarray:
    """Return the rows `(B, T)` of `batch` of an array with one row for each conversation (see `join_samples`)."""
    split = np.zeros(batch["input_ids"].shape, array.dtype)
    slices = _columns(batch["lengths"], conversation_ids)
    for row, (number, columns) in enumerate(zip(conversation_ids, slices, strict=True)):
        split[row, : batch["lengths"][row]] = array[number, columns]
    return split


def _columns(lengths: np.ndarray, conversation_ids: np.ndarray) -> list[slice]:
    ends = np.cumsum(lengths)
    starts = ends - lengths
    begins = starts[np.searchsorted(conversation_ids, conversation_ids)]  # of the first row of the same one
    return [slice(int(a), int(b)) for a, b in zip(starts - begins, ends - begins, strict=True)]
