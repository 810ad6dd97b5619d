"""Which engine generates which requests."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Collection

import numpy as np
import pytest

from tests.support.generation import GREEDY, SAMPLED
from trainer.generation.engine import Completion, Request
from trainer.generation.request_scheduler import RequestScheduler, by_length, by_prompt, capacity_of, request_costs

HUNDRED = dataclasses.replace(SAMPLED, max_tokens=100)


def requests_of(*lengths: int) -> list[Request]:
    """Requests with different prompts of these lengths."""
    return [Request([i] * length, 0, SAMPLED) for i, length in enumerate(lengths)]


def feed(
    pieces: list[list[int]],
    costs: list[float],
    engines: int = 2,
    capacity: int | None = None,
    planned: Collection[int] = (),
) -> RequestScheduler:
    scheduler = RequestScheduler(engines, capacity)
    scheduler.add(pieces, dict(enumerate(costs)), planned)
    return scheduler


def mark_done(scheduler: RequestScheduler, engine: int, requests: list[int]) -> bool:
    """Return whether the engine has others left."""
    scheduler.mark_done(engine, requests)
    return scheduler.has_work(engine)


def test_a_request_costs_its_limit_and_its_part_of_the_prompt():
    requests = [Request([1] * 12, seed, HUNDRED) for seed in range(3)] + [Request([2] * 5, 0, HUNDRED)]
    assert request_costs(requests) == [104, 104, 104, 105]


def test_completions_of_a_prompt_stay_together_and_the_longest_come_first():
    requests = [requests_of(2, 9, 5)[i] for i in (0, 1, 2, 2, 1, 0)]
    assert by_prompt(requests) == [[1, 4], [2, 3], [0, 5]]
    assert by_prompt(requests, most=1) == [[1], [4], [2], [3], [0], [5]]
    assert by_prompt([*requests, requests[0]])[0] == [0, 5, 6], "more completions are more work"
    assert by_prompt([]) == []


def test_batches_hold_prompts_of_similar_length_as_many_for_each_engine():
    requests = requests_of(3, 1, 9, 5, 7)
    assert by_length(requests, engines=1, most=8) == [[1, 0, 3, 4, 2]]
    assert by_length(requests, engines=1, most=4) == [[4, 2], [1, 0, 3]]
    assert by_length(requests, engines=2, most=2) == [[2], [3, 4], [1, 0]]
    assert by_length(requests[:1], engines=3, most=8) == [[0]]
    assert by_length([], engines=2, most=8) == []


def test_the_load_is_balanced():
    one_long = feed([[0], [1], [2], [3]], [100, 20, 30, 40])
    assert one_long.assign([0, 1]) == {0: [0], 1: [1, 2, 3]}
    assert feed([[0]], [1], engines=3).assign([0, 1, 2]) == {0: [0]}
    assert feed([], []).assign([0, 1]) == {}


def test_an_engine_gets_more_once_it_has_room():
    two = feed([[0, 1], [2, 3], [4, 5], [6]], [1] * 7, capacity=3)
    assert two.assign([0, 1]) == {0: [0, 1], 1: [2, 3]}
    assert two.assign([0, 1]) == {}
    assert mark_done(two, 1, [2]) and two.assign([1]) == {1: [4, 5]}
    assert not mark_done(two, 0, [0, 1]) and two.assign([0]) == {0: [6]}
    assert mark_done(two, 1, [3, 4]) and two.assign([1]) == {}


def test_a_piece_larger_than_the_room_runs_alone():
    assert feed([[0, 1, 2], [3]], [1] * 4, engines=1, capacity=2).assign([0]) == {0: [0, 1, 2]}


@pytest.mark.parametrize(
    ("engines", "streaming", "device", "deterministic", "capacity"),
    [
        (2, True, "cpu", False, None),
        (1, True, "cuda", False, None),
        (2, True, "cuda", True, None),
        (2, True, "cuda", False, 4),
        (2, False, "cpu", False, 0),
        (1, False, "cuda", True, 0),
    ],
)
def test_engines_get_all_at_once_unless_others_could_take_from_the_rest(
    engines, streaming, device, deterministic, capacity
):
    """On CPU, with one engine and by plan, time does not decide which requests run together."""
    assert capacity_of(engines, 4, streaming, device, deterministic) == capacity


def test_batches_have_one_sampling():
    """A batch of a mixed call is that of a call with this sampling alone."""
    requests = requests_of(3, 1, 9, 5, 7)
    mixed = [dataclasses.replace(one, sampling=sampling) for one in requests for sampling in (SAMPLED, GREEDY)]
    expected = by_length(requests, engines=2, most=2)
    assert by_length(mixed, engines=2, most=2) == [[2 * i + j for i in piece] for j in (0, 1) for piece in expected]


def test_requests_of_several_streams_are_added_one_after_another():
    """Those that are planned come on top of what each engine has."""
    scheduler = feed([[0], [1]], [5, 1], planned=[0, 1])
    assert scheduler.assign([0, 1]) == {0: [0], 1: [1]}
    scheduler.add([[2], [3]], {2: 3, 3: 3}, planned=[0, 1])
    assert scheduler.assign([0, 1]) == {1: [2, 3]}
    scheduler = feed([[0, 1], [2]], [1] * 3, engines=1, capacity=0)
    scheduler.add([[3]], {3: 1})
    given = []
    while scheduler.is_waiting:
        given.append(scheduler.assign([0])[0])
        scheduler.mark_done(0, given[-1])
    assert given == [[0, 1], [2], [3]]


def test_nothing_is_left_of_requests_that_nobody_waits_for():
    scheduler = feed([[0, 1], [2, 3], [4], [5]], [1] * 6, capacity=2)
    assert scheduler.assign([0, 1]) == {0: [0, 1], 1: [2, 3]}
    scheduler.forget({0, 2, 3, 4})
    assert scheduler.assign([0, 1]) == {}, "the engines complete what they have begun"
    scheduler.requeue(0)
    assert scheduler.assign([0]) == {0: [1, 5]} and not scheduler.is_waiting
    assert mark_done(scheduler, 1, [2]) and not mark_done(scheduler, 1, [3])
    scheduler.clear()
    assert not scheduler.has_work(0)


def test_what_a_lost_engine_has_not_completed_comes_first_again():
    """Completions that have come are not generated again, and the others keep their order."""
    shared = feed([[0, 1, 2], [3], [4, 5], [6]], [1] * 7, capacity=4)
    assert shared.assign([0]) == {0: [0, 1, 2, 3]}
    assert mark_done(shared, 0, [1]) and mark_done(shared, 0, [3])
    shared.requeue(0)
    assert shared.is_waiting and shared.assign([1]) == {1: [0, 2, 4, 5]}
    assert shared.assign([0]) == {0: [6]}, "the lost engine has nothing left to do"
    assert not mark_done(shared, 1, [0, 2, 4, 5])
    shared.requeue(1)
    assert not shared.is_waiting, "all that it has begun is complete"


def test_an_engine_that_is_lost_twice_gives_back_what_it_has_got_since():
    lonely = feed([[0, 1], [2], [3, 4]], [1] * 5, engines=2)
    assert lonely.assign([0]) == {0: [0, 1, 2, 3, 4]}
    lonely.requeue(0)
    assert lonely.assign([0, 1]) == {0: [0, 1], 1: [2, 3, 4]}, "pieces in their order, to the engine with less to do"
    lonely.requeue(0)
    assert lonely.assign([0]) == {0: [0, 1]} and not lonely.is_waiting


def test_completions_travel_as_arrays():
    """Their bytes are neither pickled number by number nor copied, where the transport can avoid that."""
    completion, buffers = Completion([7] * 1000, [-0.5] * 1000, "stop", 1), []
    rest = pickle.dumps(completion, protocol=5, buffer_callback=buffers.append)
    assert sorted(memoryview(buffer).nbytes for buffer in buffers) == [4000, 4000] and len(rest) < 1000
    assert (completion.token_ids.dtype, completion.logprobs.dtype) == (np.int32, np.float32)


def test_a_plan_does_not_follow_who_is_done_first():
    pieces, costs = [[0], [1], [2], [3], [4]], [9, 8, 3, 3, 2]
    for first, second in ((0, 1), (1, 0)):
        planned = feed(pieces, costs, 2, 0, planned=[0, 1])
        given: dict[int, list[int]] = {0: [], 1: []}
        for engine in (first, second, first, first, second, second, first):  # in this order they become free
            for number, places in planned.assign([engine]).items():
                given[number] += places
            mark_done(planned, engine, given[engine])
        assert given == {0: [0, 3], 1: [1, 2, 4]} and not planned.is_waiting


def test_without_a_limit_a_plan_gives_all_at_once():
    assert feed([[0], [1], [2]], [1, 1, 1], planned=[0, 1]).assign([0, 1]) == {0: [0, 2], 1: [1]}


def test_what_was_planned_for_a_lost_engine_goes_to_the_others():
    for is_busy in (True, False):
        planned = feed([[0], [1], [2], [3]], [1] * 4, 2, 0, planned=[0, 1])
        if is_busy:
            assert planned.assign([1]) == {1: [1]}
            planned.requeue(1)
        planned.replan([0])
        taken = []
        while planned.is_waiting:
            taken += planned.assign([0])[0]
            mark_done(planned, 0, taken)
        assert sorted(taken) == [0, 1, 2, 3]
    assert feed([[0]], [1], 2, 0).assign([1]) == {1: [0]}, "no engine serves yet"


def test_engines_that_could_take_what_waits_are_known():
    scheduler = feed([[0, 1], [2]], [1.0] * 3, capacity=2)
    scheduler.assign([0])
    assert scheduler.takers([0, 1]) == [1]
    scheduler.mark_done(0, [0])
    assert scheduler.takers([0, 1]) == [0, 1]
    scheduler.assign([1])
    assert scheduler.takers([0, 1]) == []
    planned = feed([[0]], [1.0], planned=[1])
    assert planned.takers([0, 1]) == [1]


def test_an_engine_that_is_never_idle_forgets_what_it_has_done():
    scheduler = feed([[0]], [1.0], engines=1)
    scheduler.assign([0])
    for number in range(1, 100):
        scheduler.add([[number]], {number: 1.0})
        scheduler.assign([0])
        scheduler.mark_done(0, [number - 1])
    assert len(pickle.dumps(scheduler)) < 500
    scheduler.requeue(0)
    assert scheduler.assign([0]) == {0: [99]}
