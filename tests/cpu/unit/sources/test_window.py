"""Groups in flight: no row is lost or trained twice across kills, staleness is bounded, and nothing waits forever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.data.ledger import Ledger, SampleIndex
from trainer.sources.window import Window


def ledger_of(rows: int) -> Ledger:
    return Ledger(list(range(rows)), 7, "prompts", lambda: "")


def test_a_window_of_one_trains_in_the_order_of_drawing():
    window = Window(batch=2, max_staleness=1, window=1)
    assert window.capacity() == 4 and window.admit(4) == [0, 1, 2, 3]
    for number in (1, 2, 3):
        window.finish(number)
    assert window.take(2) is None and window.waiting == [0, 1, 2, 3]
    window.finish(0)
    assert window.take(2) == [0, 1] and window.capacity() == 0
    window.publish()
    assert window.capacity() == 2 and window.take(2) == [2, 3]


def test_few_groups_pass_one_that_takes_long():
    window = Window(batch=1, max_staleness=9, window=3)
    window.admit(10)
    for number in range(1, 10):
        window.finish(number)
    assert [window.take(1) for _ in range(3)] == [[1], [2], None], "it is trained next, however many are finished"
    window.finish(0)
    assert window.take(3) == [0, 3, 4]


def test_what_a_step_cannot_do_without_is_known_before_the_others_are_finished():
    window = Window(batch=2, max_staleness=2, window=2)
    window.admit(6)
    assert not window.can_take_without({0}, 2), "the first one holds the window, whatever becomes of the others"
    assert window.can_take_without({1}, 2) and window.can_take_without((), 6) and not window.can_take_without((), 7)


def test_a_step_takes_the_groups_that_it_took_before_if_they_are_in_reach():
    window = Window(batch=2, max_staleness=2, window=3)
    window.admit(6)
    assert window.reach(2) == [0, 1, 2, 3] and window.reach(9) == [0, 1, 2, 3, 4, 5]
    assert not window.can_take([3]) and window.can_take([0, 3]) and not window.can_take([-1])
    assert window.can_take([2, 1]) and not window.can_take([2, 2])
    window.finish(2)
    assert window.take_those([2, 1]) is None and window.waiting == [0, 1, 2, 3, 4, 5]
    window.finish(1)
    assert window.take_those([2, 1]) == [2, 1] and window.waiting == [0, 3, 4, 5] == window.unfinished
    assert window.capacity() == 0
    window.publish()
    assert window.capacity() == 2


@given(
    st.data(),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 9),
    st.integers(1, 40),
)
def test_no_row_is_lost_or_trained_twice_across_kills(data, batch, max_staleness, window_size, rows):
    """Groups finish in any order; the run dies at any moment and continues from its last checkpoint."""
    total = 12
    saved, step = ledger_of(rows).state_dict(), 0
    trained: list[tuple[int, SampleIndex]] = []  # up to the checkpoint
    for _ in range(data.draw(st.integers(0, 3), "kills") + 1):
        ledger, first, since = ledger_of(rows), step, []
        ledger.load_state_dict(saved)
        window = Window(batch, max_staleness, window_size)
        drawn: dict[int, tuple[SampleIndex, int]] = {}  # row, and the version at its admission
        may_die = data.draw(st.booleans(), "dies")
        at = first
        while at < total:
            in_flight = [row for row, _ in drawn.values()]
            count = window.capacity()
            for number, row in zip(window.admit(count), ledger.peek(count, in_flight), strict=True):
                drawn[number] = row, at + 1
            unfinished = window.unfinished
            taken = window.take(batch)
            if taken is None:
                assert unfinished, "all is finished, and no step can be made"
                window.finish(data.draw(st.sampled_from(unfinished), "finishes"))
                continue
            used = [drawn.pop(number) for number in taken]
            for _, version in used:
                assert version <= at + 1 <= window.last_step(version)
                assert window.last_step(version) - version == max_staleness + -(-(window_size - 1) // batch)
            at += 1
            window.publish()
            ledger.commit([row for row, _ in used], [0.0] * len(used))
            since += [(at, row) for row, _ in used]
            if data.draw(st.booleans(), "saves"):
                saved, step, trained, since = ledger.state_dict(), at, trained + since, []
            if may_die and data.draw(st.integers(0, 3), "dies now") == 0:
                break
        else:
            saved, step, trained = ledger.state_dict(), at, trained + since
            break
    rows_trained = [row for _, row in trained]
    assert len(rows_trained) == len(set(rows_trained)) == step * batch
    assert [at for at, _ in trained] == [number for number in range(1, step + 1) for _ in range(batch)]
    order = ledger_of(rows).peek(step * batch + (max_staleness + 1) * batch + window_size)
    assert set(rows_trained) <= set(order), "none is passed by more than those under way"
