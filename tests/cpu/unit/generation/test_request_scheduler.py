"""Which engine generates which requests."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from trainer.generation.engine import Completion, Request
from trainer.generation.request_scheduler import RequestScheduler, by_length, by_prompt, request_costs, share_out


def requests_of(*lengths: int) -> list[Request]:
    """Requests with different prompts of these lengths."""
    return [Request([i] * length, seed=0) for i, length in enumerate(lengths)]


def feed(
    pieces: list[list[int]], costs: list[float], engines: int = 2, capacity: int | None = None
) -> RequestScheduler:
    return RequestScheduler(pieces, costs, engines, capacity)


def test_a_request_costs_its_limit_and_its_part_of_the_prompt():
    requests = [Request([1] * 12, seed) for seed in range(3)] + [Request([2] * 5, 0)]
    assert request_costs(requests, max_tokens=100) == [104, 104, 104, 105]


def test_completions_of_a_prompt_stay_together_and_the_longest_come_first():
    requests = [requests_of(2, 9, 5)[i] for i in (0, 1, 2, 2, 1, 0)]
    assert by_prompt(requests, max_tokens=10) == [[1, 4], [2, 3], [0, 5]]
    assert by_prompt(requests, max_tokens=10, most=1) == [[1], [4], [2], [3], [0], [5]]
    assert by_prompt([*requests, requests[0]], max_tokens=10)[0] == [0, 5, 6], "more completions are more work"
    assert by_prompt([], max_tokens=10) == []


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
    assert two.mark_done(1, [2]) and two.assign([1]) == {1: [4, 5]}
    assert not two.mark_done(0, [0, 1]) and two.assign([0]) == {0: [6]}
    assert two.mark_done(1, [3, 4]) and two.assign([1]) == {}


def test_a_piece_larger_than_the_room_runs_alone():
    assert feed([[0, 1, 2], [3]], [1] * 4, engines=1, capacity=2).assign([0]) == {0: [0, 1, 2]}


def everything(shared: RequestScheduler, engines: int) -> dict[int, list[int]]:
    given = shared.assign(range(engines))
    assert sorted(place for places in given.values() for place in places) == list(range(8)) and not shared.is_waiting
    return given


def test_on_cpu_with_one_engine_and_by_plan_time_does_not_decide_which_requests_run_together():
    """Engines get all of their requests at once, also if that is more than they generate together."""
    requests = [requests_of(3, 4, 5, 6)[i // 2] for i in range(8)]
    given = everything(share_out(requests, 10, 2, most=2, streaming=True, device="cpu"), 2)
    assert given == {0: [6, 7, 0, 1], 1: [4, 5, 2, 3]}
    everything(share_out(requests, 10, 1, most=2, streaming=True, device="cuda"), 1)
    everything(share_out(requests, 10, 2, most=2, streaming=True, device="cuda", planned=[0, 1]), 2)


def test_several_engines_on_gpus_get_further_requests_when_they_have_room():
    requests = [requests_of(3, 4, 5, 6)[i // 2] for i in range(8)]
    shared = share_out(requests, 10, 2, most=2, streaming=True, device="cuda")
    assert shared.assign([0, 1]) == {0: [6, 7], 1: [4, 5]} and shared.is_waiting
    assert shared.mark_done(1, [4]) and shared.assign([1]) == {}
    assert not shared.mark_done(1, [5]) and shared.assign([1]) == {1: [2, 3]}
    three = share_out([requests[0]] * 3, 10, 2, most=2, streaming=True, device="cuda")
    assert three.assign([0, 1]) == {0: [0, 1], 1: [2]}, "a prompt with more completions than capacity is cut"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_engines_that_do_not_stream_get_one_batch_at_a_time(device):
    shared = share_out(requests_of(*range(1, 9)), 10, 2, most=2, streaming=False, device=device)
    assert shared.assign([0, 1]) == {0: [6, 7], 1: [4, 5]} and shared.is_waiting
    assert shared.assign([0, 1]) == {}
    assert not shared.mark_done(1, [4, 5]) and shared.assign([1]) == {1: [2, 3]}


def test_what_a_lost_engine_has_not_completed_comes_first_again():
    """Completions that have come are not generated again, and the others keep their order."""
    shared = feed([[0, 1, 2], [3], [4, 5], [6]], [1] * 7, capacity=4)
    assert shared.assign([0]) == {0: [0, 1, 2, 3]}
    assert shared.mark_done(0, [1]) and shared.mark_done(0, [3])
    shared.requeue(0)
    assert shared.is_waiting and shared.assign([1]) == {1: [0, 2, 4, 5]}
    assert shared.assign([0]) == {0: [6]}, "the lost engine has nothing left to do"
    assert not shared.mark_done(1, [0, 2, 4, 5])
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
        planned = RequestScheduler(pieces, costs, 2, 0, planned=[0, 1])
        given: dict[int, list[int]] = {0: [], 1: []}
        for engine in (first, second, first, first, second, second, first):  # in this order they become free
            for number, places in planned.assign([engine]).items():
                given[number] += places
            planned.mark_done(engine, given[engine])
        assert given == {0: [0, 3], 1: [1, 2, 4]} and not planned.is_waiting


def test_without_a_limit_a_plan_gives_all_at_once():
    assert RequestScheduler([[0], [1], [2]], [1, 1, 1], 2, None, planned=[0, 1]).assign([0, 1]) == {0: [0, 2], 1: [1]}


def test_what_was_planned_for_a_lost_engine_goes_to_the_others():
    for is_busy in (True, False):
        planned = RequestScheduler([[0], [1], [2], [3]], [1] * 4, 2, 0, planned=[0, 1])
        if is_busy:
            assert planned.assign([1]) == {1: [1]}
            planned.requeue(1)
        planned.replan([0])
        taken = []
        while planned.is_waiting:
            taken += planned.assign([0])[0]
            planned.mark_done(0, taken)
        assert sorted(taken) == [0, 1, 2, 3]
    assert RequestScheduler([[0]], [1], 2, 0, planned=[]).assign([1]) == {1: [0]}, "no engine serves yet"
