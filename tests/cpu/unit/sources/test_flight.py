"""Groups in flight: no row is lost or trained twice across kills, staleness is bounded, and nothing waits forever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.ledger import Ledger, SampleIndex
from trainer.sources.in_flight import Flight, GroupState


def ledger_of(rows: int) -> Ledger:
    return Ledger(list(range(rows)), 7, "prompts", lambda: "")


def test_steps_take_groups_in_the_order_of_drawing():
    flight = Flight(batch=2, max_staleness=1)
    assert flight.capacity() == 4 and flight.admit(4) == [0, 1, 2, 3]
    for number in (1, 2, 3):
        flight.finish(number)
    assert flight.take(2) is None and flight.untaken == [0, 1, 2, 3]
    flight.finish(0)
    assert flight.take(2) == [0, 1] and flight.capacity() == 0
    flight.publish()
    assert flight.capacity() == 2 and flight.take(2) == [2, 3] and flight.within(GroupState.TAKEN) == [0, 1, 2, 3]


def test_a_group_that_is_given_back_is_taken_next():
    flight = Flight(batch=1, max_staleness=2)
    for number in flight.admit(3):
        flight.finish(number)
    assert flight.take(2) == [0, 1]
    flight.give_back([1])
    assert flight.take(2) == [1, 2]


@pytest.mark.parametrize(
    "forbidden",
    [lambda flight: flight.finish(0), lambda flight: flight.give_back([0]), lambda flight: flight.forget([0])],
    ids=["finished twice", "given back", "forgotten"],
)
def test_a_group_that_is_finished_and_not_taken_has_no_other_way(forbidden):
    flight = Flight(batch=1, max_staleness=0)
    flight.admit(1)
    flight.finish(0)
    with pytest.raises(AssertionError):
        forbidden(flight)


@given(st.data(), st.integers(1, 4), st.integers(0, 3), st.integers(1, 40))
def test_no_row_is_lost_or_trained_twice_across_kills(data, batch, max_staleness, rows):
    """Groups finish in any order; the run dies at any moment and continues from its last checkpoint."""
    total = 12
    saved, step = ledger_of(rows).state_dict(), 0
    trained: list[SampleIndex] = []  # up to the checkpoint
    for _ in range(data.draw(st.integers(0, 3), "kills") + 1):
        ledger, since = ledger_of(rows), []
        ledger.load_state_dict(saved)
        flight = Flight(batch, max_staleness)
        drawn: dict[int, tuple[SampleIndex, int]] = {}  # row, and the version at its admission
        may_die = data.draw(st.booleans(), "dies")
        at = step
        while at < total:
            count = flight.capacity()
            rows_drawn = ledger.peek(count, [row for row, _ in drawn.values()])
            for number, row in zip(flight.admit(count), rows_drawn, strict=True):
                drawn[number] = row, at + 1
            unfinished = flight.within(GroupState.RUNNING)
            taken = flight.take(batch)
            if taken is None:
                assert unfinished, "all is finished, and no step can be made"
                flight.finish(data.draw(st.sampled_from(unfinished), "finishes"))
                continue
            used = [drawn.pop(number) for number in taken]
            assert all(version <= at + 1 <= version + max_staleness for _, version in used)
            at += 1
            flight.publish()
            flight.forget(taken)
            ledger.commit([row for row, _ in used], [0.0] * len(used))
            since += [row for row, _ in used]
            if data.draw(st.booleans(), "saves"):
                saved, step, trained, since = ledger.state_dict(), at, trained + since, []
            if may_die and data.draw(st.integers(0, 3), "dies now") == 0:
                break
        else:
            saved, step, trained = ledger.state_dict(), at, trained + since
            break
    assert trained == ledger_of(rows).peek(step * batch)
