"""Several streams of requests to one pool of engines."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support import plain_engine
from tests.support.generation import (
    GREEDY,
    SAMPLED,
    alternate,
    contents,
    make_requests,
    read_stream,
    tokens_of,
    with_sampling,
)
from tests.support.plain_pool import answers, fault, streaming, wait_for
from trainer.config.engines import ENGINES
from trainer.errors import WorkerError
from trainer.generation.engine import Request
from trainer.generation.engine_pool import EnginePool
from trainer.generation.request_stream import StreamAborted
from trainer.process import time_limits
from trainer.process.failure_log import read_incidents
from trainer.process.signals import SIGNALS, Stopped


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
    """With other sampling parameters, in one call, and of some of the requests, too."""
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
    for wanted in ([5], [0, 3, 6]):
        some = {index: one for chunk in pool.stream(alike[2], wanted) for index, one in chunk.items()}
        assert sorted(some) == wanted and contents([some[i] for i in wanted]) == [alone[2][i] for i in wanted]
    with pool.open_stream() as stream:
        stream.submit(dict(enumerate(alike[0])))
        stream.finish()
        together = read_stream(stream)
        assert contents([together[i] for i in range(len(requests))]) == alone[0]


def test_a_stream_that_is_closed_leaves_nothing_for_the_next_one(start, monkeypatch):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, _ = start("cuda", num_engines=2, max_num_seqs=3)
    pool.start(version=1, is_initial=True)
    stream = pool.stream([Request([i, 0], 7, SAMPLED) for i in range(12)])
    next(stream)
    stream.close()
    assert answers(pool, 12) == [[i, 7, 0] for i in range(12)]


def test_the_reader_of_an_idle_stream_gets_empty_chunks(start, monkeypatch, incidents):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, _ = start(num_engines=1, max_num_seqs=64)
    pool.start(version=1, is_initial=True)
    fault(incidents, "wait 5")
    stream = pool.stream([Request([i, 0], 7, SAMPLED) for i in range(12)], idle_s=0.1)
    completions = {}
    while chunk := next(stream):
        completions |= chunk
    assert len(completions) < 12
    (incidents / "go on").touch()
    completions |= {index: one for chunk in stream for index, one in chunk.items()}
    assert tokens_of([completions[i] for i in range(12)]) == [[i, 0, 7, 0] for i in range(12)]


@pytest.mark.parametrize("is_sync", [True, False])
def test_streams_that_are_aborted_end_on_the_threads_of_their_readers(start, monkeypatch, incidents, is_sync):
    """One of them leads, and the engine does not answer it."""
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, _ = start(num_engines=1, max_num_seqs=64)
    pool.start(version=1, is_initial=True)
    mine = pool.stream([Request([i, 0], 7, SAMPLED) for i in range(12)])
    next(mine)
    fault(incidents, "wait 20")
    with ThreadPoolExecutor(2) as threads:
        others = [threads.submit(answers, pool, range(first, first + 12)) for first in (20, 40)]
        wait_for(lambda: not list(incidents.glob("fault *")))
        if is_sync:
            (incidents / "go on").touch()
            pool.sync_weights(2)
        else:
            pool.abort()
        for other in others:
            with pytest.raises(StreamAborted):
                other.result()
    with pytest.raises(StreamAborted):
        list(mine)
    (incidents / "go on").touch()
    assert answers(pool, 4) == [[i, 7, 0] for i in range(4)]


def run_streams(pool: EnginePool, thread: int, count: int, size: int, versions: set) -> None:
    """Read `count` streams, some of them closed early; check that each gets its own completions."""
    for number in range(count):
        seed = 1000 * thread + number
        requests = {i: Request([2000 + i, thread], seed, SAMPLED) for i in range(size)}
        if number % 5 == 3:
            with pool.open_stream() as open_stream:
                completions = {}
                for i, request in requests.items():
                    open_stream.submit({i: request})
                    completions |= next(open_stream) if i % 4 == 3 else {}
                open_stream.finish()
                read_stream(open_stream, completions)
        else:
            stream = pool.stream(list(requests.values()))
            if number % 5 == 4:
                next(stream)
                stream.close()
                continue
            completions = {index: one for chunk in stream for index, one in chunk.items()}
        assert [tokens_of([completions[i]])[0][:3] for i in range(size)] == [
            [2000 + i, thread, seed] for i in range(size)
        ]
        versions |= {one.weight_versions for one in completions.values()}


@pytest.mark.parametrize("engine", ["FaultyStreamingEngine", "FaultyEngine"])
@pytest.mark.parametrize("keeps", [True, False])
def test_many_threads_read_while_weights_change_and_engines_die(start, monkeypatch, incidents, engine, keeps):
    """The main thread trains ranks and brings weights meanwhile. Without kept weights, one engine lives on."""
    spec = dataclasses.replace(streaming(engine), streaming="Streaming" in engine)
    monkeypatch.setitem(ENGINES, "plain", spec)
    monkeypatch.setattr(time_limits, "RESTART_FIRST_DELAY_S", 0.0)
    options = {"max_restarts": 99, "max_num_seqs": 16, "weight_sync": "shared_memory", "keeps_weights": keeps}
    pool, ranks = start("cuda", num_engines=2, **options)
    pool.start(version=1, is_initial=True)
    versions: set[tuple[int, int]] = set()
    rng, version = random.Random(3), 1
    with ThreadPoolExecutor(4) as threads:
        readers = [threads.submit(run_streams, pool, thread, 25, 12, versions) for thread in range(4)]
        while not all(reader.done() for reader in readers):
            ranks.call("policy", "train")
            version += 1
            pool.sync_weights(version, "keep")
            if version % 3 == 0 and (keeps or len(pool._engines.lifecycle.serving) == 2):
                pool._engines.group.end(rng.randrange(2) if keeps else 0)
            run_streams(pool, 9, 1, 3, versions)
        for reader in readers:
            reader.result()
    assert version > 3 and len({newest for _, newest in versions}) > 2
    assert all(one.role == "engine" for one in read_incidents(str(incidents)))


@pytest.mark.parametrize("engine", ["FaultyStreamingEngine", "FaultyEngine"])
def test_log_probs_that_are_nan_are_a_failure_of_their_engine(start, monkeypatch, incidents, engine):
    """Nobody gets such a token, because it would make the loss NaN, and come back from the journal after a restart."""
    spec = dataclasses.replace(streaming(engine), streaming="Streaming" in engine)
    monkeypatch.setitem(ENGINES, "plain", spec)
    monkeypatch.setattr(time_limits, "RESTART_FIRST_DELAY_S", 0.0)
    pool, _ = start(num_engines=2, max_restarts=1, max_num_seqs=64)
    pool.start(version=1, is_initial=True)
    fault(incidents, "nan 3")
    completions = pool.generate([Request([i], 7, SAMPLED) for i in range(6)])
    assert tokens_of(completions) == [[i, 7, 0] for i in range(6)]
    assert not any(np.isnan(one.logprobs).any() for one in completions)
    fault(incidents, "nan 3")
    with pytest.raises(WorkerError, match="^engine . has returned a token whose log-prob is NaN .*rollout.dtype"):
        pool.generate([Request([i], 7, SAMPLED) for i in range(6)])


def test_a_failure_ends_the_streams_of_all_threads(start, monkeypatch, incidents):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, _ = start(num_engines=1, max_restarts=0, max_num_seqs=64)
    pool.start(version=1, is_initial=True)
    with ThreadPoolExecutor(3) as threads:
        fault(incidents, "kill 25")
        readers = [threads.submit(answers, pool, range(first, first + 10)) for first in (20, 40, 60)]
        for reader in readers:
            # The second sentence is that of a thread which asked only after the engine had died.
            with pytest.raises(WorkerError, match="engine 0 died|no engine is left that has the weights"):
                reader.result()


def test_a_signal_on_the_main_thread_ends_the_streams_of_all_threads(start, monkeypatch, incidents):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, _ = start(num_engines=1, max_num_seqs=64)
    pool.start(version=1, is_initial=True)
    fault(incidents, "wait 20")
    with ThreadPoolExecutor(2) as threads, SIGNALS.listening():
        other = threads.submit(answers, pool, range(20, 30))
        wait_for(lambda: not list(incidents.glob("fault *")))
        threads.submit(os.kill, os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped, match="SIGTERM"):
            answers(pool)
        with pytest.raises(Stopped, match="SIGTERM"):
            other.result()
    (incidents / "go on").touch()
