"""The order of rows of several sources: each once an epoch of its source, and sources in exact proportion."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.ledger import Ledger, MixLedger, SampleIndex
from trainer.errors import UserError

SIZES = {"code": 4, "math": 7, "words": 3}


def ledger(weights: Mapping[str, float], sizes: Mapping[str, int] = SIZES, seed: int = 1, **contents: str) -> MixLedger:
    def of_source(name: str) -> Ledger:
        return Ledger(range(sizes[name]), seed, "prompts", lambda: contents.get(name, name), source=name)

    return MixLedger({name: of_source(name) for name in weights}, weights)


def resumed(source: MixLedger, weights: Mapping[str, float], **others) -> MixLedger:
    """The ledger of another start with these weights, at the place of `source`."""
    restarted = ledger(weights, **others)
    restarted.load_state_dict(json.loads(json.dumps(source.state_dict())))
    return restarted


def names(source: MixLedger, rows: list[SampleIndex]) -> list[str]:
    return [source.name_of(row) for row in rows]


def train(source: MixLedger, count: int) -> list[str]:
    rows = source.peek(count)
    source.commit(rows)
    return names(source, rows)


WEIGHTS = st.dictionaries(st.sampled_from(list(SIZES)), st.sampled_from([0.1, 0.5, 1, 2, 3.7, 10]), min_size=1)


@settings(deadline=None)  # the machine may be busy
@given(
    weights=WEIGHTS,
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.booleans()), min_size=1, max_size=12),
    chance=st.randoms(use_true_random=False),
)
def test_every_row_comes_once_an_epoch_whatever_finishes_first_and_over_kills(weights, steps, chance):
    """Steps are begun in order and finish in any order. A kill loses the steps that have not finished."""
    source, seen, in_flight = ledger(weights), [], []
    for size, finished, is_killed in steps:
        in_flight.append(source.peek(size, [row for step in in_flight for row in step]))
        for _ in range(min(finished, len(in_flight))):
            step = in_flight.pop(chance.randrange(len(in_flight)))
            source.commit(step)
            seen += step
        if is_killed:
            source, in_flight = resumed(source, weights), []
    for step in in_flight:
        source.commit(step)
        seen += step
    assert len(set(seen)) == len(seen), "a row was trained twice in an epoch"
    seen += source.peek(60)  # what kills have lost comes first
    for name in weights:
        rows = [row for row in seen if source.name_of(row) == name]
        if not rows:  # its share is that small
            continue
        *complete, last = [[row.index for row in rows if row.epoch == epoch] for epoch in range(rows[-1].epoch + 1)]
        assert all(sorted(epoch) == list(range(SIZES[name])) for epoch in complete), "a row was skipped"
        alone = Ledger(range(SIZES[name]), 1, "prompts", lambda: "", source=name)
        assert {*rows} == {replace(row, dataset=rows[0].dataset) for row in alone.peek(len(rows))} and len(last) > 0


@settings(deadline=None)
@given(weights=WEIGHTS, batches=st.lists(st.integers(1, 20), min_size=1, max_size=10))
def test_no_source_is_a_row_ahead_of_its_share_or_far_behind_it(weights, batches):
    source, total, drawn = ledger(weights), sum(weights.values()), Counter()
    for batch in batches:
        for name in train(source, batch):
            drawn[name] += 1
            count = sum(drawn.values())
            for one, weight in weights.items():
                behind = weight / total * count - drawn[one]
                assert -1 < behind < max(1, len(weights) - 1) + 1e-9


@settings(deadline=None)
@given(weights=WEIGHTS, batches=st.lists(st.integers(1, 9), min_size=1, max_size=8), ahead=st.integers(0, 3))
def test_an_interrupted_run_draws_what_an_uninterrupted_run_draws(weights, batches, ahead):
    source, seen = ledger(weights), []
    for batch in batches:
        source.peek(batch * ahead)  # looking ahead changes nothing
        rows = source.peek(batch)
        source.commit(rows)
        seen += rows
        source = resumed(source, weights)
    assert seen == ledger(weights).peek(len(seen))


def test_the_order_does_not_change():
    """Checkpoints stand on it: a run resumed with another version would skip and repeat rows."""
    source = ledger({"math": 2, "code": 1})
    rows = source.peek(6)
    assert names(source, rows) == ["math", "code", "math"] * 2
    assert [row.index for row in rows] == [1, 0, 0, 3, 3, 2]


def test_shares_do_not_depend_on_the_order_of_the_names():
    one, other = ledger({"math": 1, "code": 1, "words": 2}), ledger({"words": 2, "code": 1, "math": 1})
    assert one.peek(50) == other.peek(50)


PROVEN_KEYS = {"data.mix"}


def test_changed_weights_count_from_the_resume_on():
    """A source that was rare does not catch up on what it would have had with its new weight."""
    source = ledger({"math": 9, "code": 1})
    assert Counter(train(source, 100)) == {"math": 90, "code": 10}
    source = resumed(source, {"math": 1, "code": 1})
    assert Counter(train(source, 10)) == {"math": 5, "code": 5}
    source = resumed(source, {"math": 1, "code": 1})
    assert Counter(train(source, 11)) in ({"math": 6, "code": 5}, {"math": 5, "code": 6})


def test_sources_come_and_go_and_keep_their_places():
    source = ledger({"math": 1, "code": 1})
    before = source.peek(6)
    source.commit(before)
    source = resumed(source, {"math": 1, "words": 1})
    later = source.peek(6)
    source.commit(later)
    assert Counter(names(source, later)) == {"math": 3, "words": 3}
    source = resumed(source, {"math": 1, "code": 1, "words": 1})
    last = source.peek(9)
    assert Counter(names(source, last)) == {"math": 3, "code": 3, "words": 3}
    assert names(source, before) == ["code", "math"] * 3, "a source keeps its number"
    rows = [*before, *later, *last]
    assert len(set(rows)) == len(rows)
    of_math = [row.index for row in rows if source.name_of(row) == "math"]
    alone = Ledger(range(7), 1, "prompts", lambda: "math", source="math")
    assert of_math == [row.index for row in alone.peek(9)]


def test_going_back_to_a_checkpoint_without_a_source_begins_it_again():
    saved = ledger({"math": 1}).state_dict()
    source = ledger({"math": 1, "code": 1})
    source.load_state_dict(saved)
    first = source.peek(4)
    source.commit(first)
    source.load_state_dict(saved)
    assert source.peek(4) == first


def test_rows_in_flight_count_for_the_shares():
    source = ledger({"math": 3, "code": 1})
    in_flight = [row for row in source.peek(8) if source.name_of(row) == "code"]
    assert len(in_flight) == 2
    assert names(source, source.peek(6, in_flight)) == ["math"] * 6


def test_progress_is_that_of_the_sources():
    source = ledger({"math": 7, "code": 4})
    rows = source.peek(11)
    assert source.progress(rows) == {"code": (4, 1.0), "math": (7, 1.0)} and source.epoch == 0
    source.commit(rows)
    assert source.progress([]) == {"code": (4, 1.0), "math": (7, 1.0)} and source.epoch == 1


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            {"math": "edited"},
            "^data.mix.math: the prompts' content is not that of the checkpoint .* give the source an",
        ),
        ({"sizes": {"math": 8, "code": 4}}, r"^data.mix.math: the number of prompts is not .*8 instead of 7"),
        ({"seed": 2}, "(?s)^the run cannot continue with this data.mix:.*trainer.seed: the order"),
    ],
)
def test_other_rows_or_another_seed_are_refused(others, message):
    source = ledger({"math": 1, "code": 1})
    with pytest.raises(UserError, match=message):
        resumed(source, {"math": 1, "code": 1}, **others)


def test_a_run_without_a_mix_does_not_become_one_and_the_other_way_round():
    alone = Ledger(range(7), 1, "prompts", lambda: "math")
    mix = ledger({"math": 1})
    with pytest.raises(UserError, match="^data.mix: the run was saved without a mix, .* or fork the checkpoint"):
        mix.load_state_dict(alone.state_dict())
    with pytest.raises(
        UserError, match="^data.mix: the run was saved with a mix of sources, .* or fork the checkpoint"
    ):
        alone.load_state_dict(mix.state_dict())


@settings(deadline=None)
@given(st.data())
def test_a_damaged_state_is_refused_in_one_sentence(data):
    source = ledger({"math": 1, "code": 1})
    train(source, 5)
    state = json.loads(json.dumps(source.state_dict()))
    part, key = data.draw(
        st.sampled_from(
            [(state, key) for key in ("sources", "weights")]
            + [(one, key) for one in state["sources"] for key in ("name", "trained", "since", "ledger")]
        )
    )
    part[key] = data.draw(
        st.sampled_from([None, -1, 1.5, [], [1], "x" * random.Random(1).randrange(3, 4), {"positions": 3}])
    )
    restarted = ledger({"math": 1, "code": 1})
    try:
        restarted.load_state_dict(state)
    except UserError as error:
        assert "data" in str(error)
    else:
        assert restarted.peek(3)
