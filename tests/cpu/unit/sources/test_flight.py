"""Groups in flight: no row is lost or trained twice across kills, staleness is bounded, and nothing waits forever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.ledger import Ledger, SampleIndex
from trainer.sources.in_flight import Flight, GroupState, _FlyingGroup


def ledger_of(rows: int) -> Ledger:
    return Ledger(list(range(rows)), 7, "prompts", lambda: "")


def admit(flight: Flight, rows: list[SampleIndex], version: int = 1) -> list[_FlyingGroup]:
    groups = [_FlyingGroup(row, 0, version) for row in rows]
    flight.groups += groups
    return groups


def finish(*groups: _FlyingGroup) -> None:
    for group in groups:
        group.move(GroupState.RUNNING, GroupState.FINISHED)


ROWS = ledger_of(9).peek(4)


def test_steps_take_groups_in_the_order_of_drawing():
    flight = Flight(batch=2, max_staleness=1)
    assert flight.capacity() == 4
    first, *others = groups = admit(flight, ROWS)
    finish(*others)
    assert flight.take(2) is None and flight.untaken == groups
    finish(first)
    assert flight.take(2) == groups[:2] and flight.capacity() == 0
    flight.publish()
    assert flight.capacity() == 2 and flight.take(2) == groups[2:]
    assert {group.state for group in groups} == {GroupState.TAKEN}


def test_a_group_that_is_given_back_is_taken_next():
    flight = Flight(batch=1, max_staleness=2)
    groups = admit(flight, ROWS[:3])
    finish(*groups)
    assert flight.take(2) == groups[:2]
    flight.give_back(groups[1:2])
    assert flight.take(2) == groups[1:]


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda flight: finish(*flight.groups),
        lambda flight: flight.give_back(flight.groups),
        lambda flight: flight.forget(flight.groups),
    ],
    ids=["finished twice", "given back", "forgotten"],
)
def test_a_group_that_is_finished_and_not_taken_has_no_other_way(forbidden):
    flight = Flight(batch=1, max_staleness=0)
    finish(*admit(flight, ROWS[:1]))
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
        may_die = data.draw(st.booleans(), "dies")
        at = step
        while at < total:
            count = flight.capacity()
            admit(flight, ledger.peek(count, [group.row for group in flight.groups]), at + 1)
            unfinished = [group for group in flight.groups if group.state is GroupState.RUNNING]
            taken = flight.take(batch)
            if taken is None:
                assert unfinished, "all is finished, and no step can be made"
                finish(data.draw(st.sampled_from(unfinished), "finishes"))
                continue
            assert all(group.version <= at + 1 <= group.version + max_staleness for group in taken)
            at += 1
            flight.publish()
            flight.forget(taken)
            ledger.commit([group.row for group in taken], [0.0] * len(taken))
            since += [group.row for group in taken]
            if data.draw(st.booleans(), "saves"):
                saved, step, trained, since = ledger.state_dict(), at, trained + since, []
            if may_die and data.draw(st.integers(0, 3), "dies now") == 0:
                break
        else:
            saved, step, trained = ledger.state_dict(), at, trained + since
            break
    assert trained == ledger_of(rows).peek(step * batch)
