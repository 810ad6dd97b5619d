"""Which examples a supervised step trains on."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import SFTConfig
from trainer.episodes import Sample
from trainer.errors import UserError
from trainer.sources.supervised import SupervisedSource

WIDTH = 12


def examples_of(*lengths: int) -> list[Sample]:
    """Examples whose tokens say whose they are; the second half of each is to be learnt."""
    return [
        Sample(np.full(n, i + 1), np.asarray([0] * (n - n // 2) + [1] * (n // 2), np.float32))
        for i, n in enumerate(lengths)
    ]


def source_of(parts, rows: int = 3, seed: int = 1, weights=()) -> SupervisedSource:
    sft = SFTConfig(batch_size=rows, max_length=WIDTH)
    return SupervisedSource(sft, parts, seed, {f"source{i}": weight for i, weight in enumerate(weights)})


def names(episodes) -> list[int]:
    return [int(episode.samples[0].token_ids[0]) for episode in episodes]


LENGTHS = st.lists(st.integers(1, WIDTH), min_size=1, max_size=20)


@settings(deadline=None)  # the machine may be busy
@given(lengths=LENGTHS, rows=st.integers(1, 5))
def test_every_epoch_has_every_example_once(lengths, rows):
    source, seen = source_of([examples_of(*lengths)], rows), []
    step = 0
    while source.epoch < 3:
        step += 1
        episodes = source.next(step)
        tokens = sum(len(episode.samples[0].token_ids) for episode in episodes)
        assert tokens <= rows * WIDTH < tokens + rows * max(lengths), "no row had room for the next example"
        assert len({episode.uid for episode in episodes}) == len(episodes)
        seen += names(episodes)
        source.commit(step)
    assert source.epoch == len(seen) / len(lengths)
    epochs = [seen[i * len(lengths) : (i + 1) * len(lengths)] for i in range(3)]
    assert all(sorted(epoch) == list(range(1, len(lengths) + 1)) for epoch in epochs)
    if len(lengths) > 8:
        assert epochs[0] != epochs[1]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=4),
    weights=st.lists(st.floats(0.05, 1), min_size=4, max_size=4),
    killed_at=st.integers(0, 5),
    uncommitted=st.integers(0, 2),
)
def test_data_sets_are_drawn_by_weight_and_a_restart_continues(sizes, weights, killed_at, uncommitted):
    weights = weights[: len(sizes)]
    parts = [[Sample(np.full(3, p), np.ones(3, np.float32)) for _ in range(n)] for p, n in enumerate(sizes)]

    def steps(source: SupervisedSource, first: int, last: int) -> list[list[str]]:
        found = []
        for step in range(first, last):
            found.append([(episode.uid, names([episode])[0]) for episode in source.next(step)])
            source.commit(step)
        return found

    straight = steps(source_of(parts, 4, weights=weights), 0, 8)
    drawn = [part for step in straight for _, part in step]
    uids = [uid for step in straight for uid, _ in step]
    assert len(set(uids)) == len(uids), "each data set has a first row in each epoch"
    for part, weight in enumerate(weights):
        share = weight / sum(weights)
        for count in range(1, len(drawn) + 1):  # never further from its share than rounding to whole examples takes
            assert abs(drawn[:count].count(part) - share * count) < len(parts)
    first = source_of(parts, 4, weights=weights)
    steps(first, 0, killed_at)
    state = json.loads(json.dumps(first.state_dict()))
    steps(first, killed_at, killed_at + uncommitted)  # trained on, but never saved
    again = source_of(parts, 4, weights=weights)
    again.load_state_dict(state)
    assert steps(again, killed_at, 8) == straight[killed_at:]


def test_other_seeds_and_examples_are_refused():
    examples = examples_of(*range(1, 12))
    source, other = source_of([examples]), source_of([examples], seed=2)
    assert names(source.next(1)) != names(other.next(1))
    with pytest.raises(UserError, match="trainer.seed: the order of the examples is not that"):
        other.load_state_dict(source.state_dict())
    with pytest.raises(UserError, match="data: the number of examples is not that"):
        source_of([examples[:-1]]).load_state_dict(source.state_dict())
    changed = [*examples[:-1], Sample(examples[-1].token_ids + 1, examples[-1].mask)]
    with pytest.raises(UserError, match="data: the examples' content is not that"):
        source_of([changed]).load_state_dict(source.state_dict())
    with pytest.raises(UserError, match="format None"):
        source.load_state_dict({})


def test_sources_of_a_mix_have_their_shares_and_epochs_and_a_resume_may_change_the_weights():
    def source_with(**weights: float) -> SupervisedSource:
        parts = {"long": examples_of(6, 6, 6, 6), "short": examples_of(6, 6)}
        sft = SFTConfig(batch_size=3, max_length=WIDTH)
        return SupervisedSource(sft, [parts[name] for name in sorted(weights)], 1, dict(sorted(weights.items())))

    def train(source: SupervisedSource, step: int) -> list[str]:
        uids = [episode.uid for episode in source.next(step)]
        metrics.update(source.add_metrics(step, {"sft/loss": 1.0}))
        source.commit(step)
        return uids

    metrics: dict[str, float] = {}
    source = source_with(long=2, short=1)
    first, second = train(source, 1), train(source, 2)
    assert metrics == {
        "sft/loss": 1.0,
        "data/long/prompts": 8.0,
        "data/long/epoch": 2.0,
        "data/short/prompts": 4.0,
        "data/short/epoch": 2.0,
    }
    assert [uid.partition(":")[0] for uid in first + second] == ["long", "short", "long"] * 4
    assert {episode.source for episode in source.next(9)} == {"mix.long", "mix.short"}
    assert len({*first, *second}) == 12 and source.epoch == 2
    saved = json.loads(json.dumps(source.state_dict()))
    other = source_with(long=1, short=1)
    other.load_state_dict(saved)
    assert [uid.partition(":")[0] for uid in train(other, 3)] == ["long", "short"] * 3
    with pytest.raises(UserError, match="^data.mix: the run was saved with a mix of sources"):
        source_of([examples_of(6, 6)]).load_state_dict(saved)
