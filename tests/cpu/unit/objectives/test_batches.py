"""Samples as rows of a batch, and episodes of several samples as one row."""

from __future__ import annotations

import numpy as np

from trainer.config import AlgorithmConfig
from trainer.episodes import Sample
from trainer.objectives.batches import build_batch, join_samples, split_samples
from trainer.objectives.experience import add_advantages


def sample(prompt: list[int], *completion: int) -> Sample:
    ids, start = [*prompt, *completion], len(prompt)
    mask, logprobs = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32)
    mask[start:], logprobs[start:] = 1, [-0.5 * token for token in completion]
    return Sample(np.asarray(ids), mask, logprobs, (1, 1))


def test_a_batch_of_two_prompts_with_three_completions_each():
    first, second = [50, 51], [60, 61, 62, 63]
    samples = [sample(first, 1, 2, 3), sample(first, 4), sample(first, 5, 6)]
    samples += [sample(second, 7), sample(second, 8, 9), sample(second, 8)]
    found = build_batch(samples, ["0:7"] * 3 + ["0:3"] * 3)
    assert found.keys() == {"input_ids", "mask", "rollout_logprobs", "lengths", "group_ids"}
    assert found["input_ids"].tolist() == [
        [50, 51, 1, 2, 3, 0],
        [50, 51, 4, 0, 0, 0],
        [50, 51, 5, 6, 0, 0],
        [60, 61, 62, 63, 7, 0],
        [60, 61, 62, 63, 8, 9],
        [60, 61, 62, 63, 8, 0],
    ]
    assert found["mask"].tolist() == [
        [0, 0, 1, 1, 1, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 1, 0],
    ]
    assert found["rollout_logprobs"].tolist() == [
        [0, 0, -0.5, -1.0, -1.5, 0],
        [0, 0, -2.0, 0, 0, 0],
        [0, 0, -2.5, -3.0, 0, 0],
        [0, 0, 0, 0, -3.5, 0],
        [0, 0, 0, 0, -4.0, -4.5],
        [0, 0, 0, 0, -4.0, 0],
    ]
    assert found["lengths"].tolist() == [5, 3, 4, 5, 6, 5]
    assert found["group_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    types = {name: array.dtype.name for name, array in found.items()}
    assert types == {"input_ids": "int32", "mask": "float32", "rollout_logprobs": "float32",
                     "lengths": "int64", "group_ids": "int64"}  # fmt: skip


def test_tokens_that_nobody_sampled_have_no_log_probs():
    plain = Sample(np.asarray([1, 2, 3]), np.asarray([0, 1, 1], np.float32))
    found = build_batch([plain, plain], ["a", "b"])
    assert found.keys() == {"input_ids", "mask", "lengths", "group_ids"}
    assert found["group_ids"].tolist() == [0, 1]


def test_rows_that_older_weights_or_another_policy_have_sampled_are_marked():
    ones = np.ones(2, np.float32)
    versions = [(3, 3), (2, 3), None, (0, 0)]
    samples = [Sample(np.asarray([1, 2]), ones, -ones, one) for one in versions]
    samples.append(Sample(np.asarray([1, 2]), 0 * ones, 0 * ones, (0, 0)))  # nothing was sampled
    found = build_batch(samples, step=3)
    assert found["is_stale"].tolist() == [False, True, True, True, False]
    assert found["is_foreign"].tolist() == [False, False, True, True, False]
    assert not {"is_stale", "is_foreign"} & build_batch(samples[:1], step=3).keys()


def test_samples_of_one_episode_share_its_advantage():
    """The group is compared by episodes: a second sample does not count twice."""
    three = [sample([50], 1, 2), sample([50, 1, 2, 51], 3), sample([50], 4)]
    rows = build_batch(three, ["0:0"] * 3)
    episode_ids = np.array([0, 0, 1])
    joined = join_samples(rows, episode_ids)
    assert joined["input_ids"].tolist() == [[50, 1, 2, 50, 1, 2, 51, 3], [50, 4, 0, 0, 0, 0, 0, 0]]
    assert joined["mask"].tolist() == [[0, 1, 1, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert (joined["lengths"].tolist(), joined["group_ids"].tolist()) == ([8, 2], [0, 0])
    a = AlgorithmConfig(options={"normalize_std": False})
    advantages = add_advantages(joined, np.array([1.0, 0.0]), a)["advantages"]
    assert split_samples(advantages, rows, episode_ids).tolist() == [
        [0, 0.5, 0.5, 0, 0],
        [0, 0, 0, 0, 0.5],
        [0, -0.5, 0, 0, 0],
    ]
    alone = np.arange(3)
    assert (split_samples(join_samples(rows, alone)["input_ids"], rows, alone) == rows["input_ids"]).all()
