"""Several streams of requests to one pool of engines."""

from __future__ import annotations

import dataclasses
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import plain_engine
from tests.support.generation import GREEDY, SAMPLED, alternate, contents, make_requests, tokens_of, with_sampling
from tests.support.plain_pool import answers, streaming
from trainer.config.engines import ENGINES
from trainer.generation.engine import Request


@pytest.mark.parametrize("spec", [streaming(), plain_engine.SPEC], ids=["streaming", "batched"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_two_streams_that_are_read_by_turns_get_their_own_completions(start, monkeypatch, spec, deterministic):
    monkeypatch.setitem(ENGINES, "plain", spec)
    pool, _ = start("cuda", num_engines=2, max_num_seqs=36 if deterministic else 3, deterministic=deterministic)
    pool.start(version=1, is_initial=True)
    requests = [[Request([i, 0], seed, SAMPLED) for i in range(12)] for seed in (7, 8, 9)]
    first, second, third = (pool.stream(some) for some in requests)
    completions = next(first)
    assert tokens_of(alternate(second, third)[1]) == [[i, 0, 9, 0] for i in range(12)]
    for chunk in first:
        completions |= chunk
    assert tokens_of([completions[i] for i in range(12)]) == [[i, 0, 7, 0] for i in range(12)]


def test_streams_of_transformers_are_bit_equal_to_separate_ones(start, model_paths, tmp_path):
    """With other sampling parameters, and in one call, too."""
    shutil.copytree(model_paths[True], tmp_path, dirs_exist_ok=True)
    pool, _ = start(engine="transformers", num_engines=2, max_num_seqs=3, max_response_tokens=24)
    pool.start(version=1, is_initial=True)
    stops = dataclasses.replace(SAMPLED, max_tokens=24, stop_token_ids=tuple(range(0, 256, 7)))
    requests = make_requests(8)
    alike = [with_sampling(requests, sampling) for sampling in (SAMPLED, GREEDY, stops)]
    alone = [contents(pool.generate(some)) for some in alike]
    assert [contents(one) for one in alternate(*map(pool.stream, alike))] == alone
    mixed = contents(pool.generate([request for trio in zip(*alike, strict=True) for request in trio]))
    assert [mixed[i::3] for i in range(3)] == alone


def test_a_stream_that_is_closed_leaves_nothing_for_the_next_one(start, monkeypatch):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, _ = start("cuda", num_engines=2, max_num_seqs=3)
    pool.start(version=1, is_initial=True)
    stream = pool.stream([Request([i, 0], 7, SAMPLED) for i in range(12)])
    next(stream)
    stream.close()
    assert answers(pool, 12) == [[i, 7, 0] for i in range(12)]


def test_a_stream_whose_requests_a_sync_has_aborted_is_not_read_on(start, monkeypatch):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, _ = start(num_engines=2, max_num_seqs=12)
    pool.start(version=1, is_initial=True)
    stream = pool.stream([Request([i, 0], 7, SAMPLED) for i in range(12)])
    next(stream)
    pool.sync_weights(2)
    assert answers(pool, 4) == [[i, 7, 0] for i in range(4)]
    with pytest.raises(AssertionError, match="a weight sync has aborted the requests of this stream"):
        list(stream)


def test_streams_of_two_threads_are_refused(start):
    pool, _ = start()
    pool.start(version=1, is_initial=True)
    stream = pool.stream([Request([i], 7, SAMPLED) for i in range(3)])
    with ThreadPoolExecutor(1) as thread:
        next(stream)
        list(stream)
        assert thread.submit(answers, pool).result() == [[0, 7, 0], [1, 7, 0]], "none is open"
        stream = pool.stream([Request([i, 0], 7, SAMPLED) for i in range(300)])
        next(stream)
        with pytest.raises(AssertionError, match="one thread reads all open streams of an engine pool"):
            thread.submit(answers, pool).result()
