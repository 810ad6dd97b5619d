"""Streams that take requests while others are generated."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support import plain_engine, token_engine
from tests.support.generation import SAMPLED, read_stream, tokens_of
from tests.support.plain_pool import answers, fault, streaming
from trainer.config import EnvironmentConfig, RolloutConfig, TinyConfig
from trainer.config.engines import ENGINES
from trainer.generation.engine import Completion, Request, join_interval_s
from trainer.generation.request_stream import StreamAborted
from trainer.models.tiny import build_tiny
from trainer.process import time_limits


@pytest.mark.parametrize("spec", [streaming(), plain_engine.SPEC, token_engine.ENGINE], ids=["one", "batch", "token"])
def test_requests_are_submitted_to_an_open_stream_by_any_thread_at_any_time(start, monkeypatch, spec):
    """The key of a request may come again. The stream ends when no more follow, and all are complete."""
    monkeypatch.setitem(ENGINES, "plain", spec)
    pool, _ = start(num_engines=2, max_num_seqs=64)
    pool.start(version=1, is_initial=True)
    with ThreadPoolExecutor(2) as threads, pool.open_stream() as stream:
        assert stream.is_idle
        threads.submit(stream.submit, {7: Request([1, 0], 5, SAMPLED)}).result()
        assert not stream.is_idle and list(next(stream)) == [7] and stream.is_idle
        again = [threads.submit(stream.submit, {key: Request([key, 1], 6, SAMPLED)}) for key in range(20)]
        completions: dict[int, Completion] = {}
        while len(completions) < 20:
            completions |= next(stream)
        stream.submit({3: Request([3, 2], 6, SAMPLED)})
        stream.finish()
        assert all(one.done() for one in again) and list(read_stream(stream)) == [3] and list(stream) == []
    if spec is not token_engine.ENGINE:
        assert tokens_of([completions[key] for key in range(20)]) == [[key, 1, 6, 0] for key in range(20)]


def test_a_request_joins_those_that_an_engine_generates(start, monkeypatch):
    """One takes 200 tokens, and the next one a single token: that is complete first."""
    monkeypatch.setitem(ENGINES, "plain", token_engine.ENGINE)
    pool, _ = start(num_engines=1)
    pool.start(version=1, is_initial=True)
    long, short = (dataclasses.replace(SAMPLED, max_tokens=count) for count in (200, 2))
    with pool.open_stream() as stream:
        stream.submit({0: Request([1], 199, long)})
        stream.wake()
        assert next(stream) == {} and not stream.is_idle
        monkeypatch.setattr(time_limits, "POLL_INTERVAL_S", 60.0)
        timer = threading.Timer(0.1, stream.submit, [{1: Request([1], 0, short)}])
        timer.start()
        assert list(next(stream)) == [1] and list(next(stream)) == [0]


def test_the_reader_of_an_open_stream_is_woken_or_aborted_while_nothing_is_under_way(start, monkeypatch):
    monkeypatch.setattr(time_limits, "POLL_INTERVAL_S", 60.0)
    pool, _ = start(num_engines=1)
    pool.start(version=1, is_initial=True)
    with pool.open_stream() as stream, ThreadPoolExecutor(1) as threads:
        reader = threads.submit(next, stream)
        stream.wake()
        assert reader.result() == {}
        reader = threads.submit(next, stream)
        pool.abort()
        with pytest.raises(StreamAborted):
            reader.result()
        with pytest.raises(StreamAborted):
            stream.submit({0: Request([0], 7, SAMPLED)})
    assert answers(pool, 4) == [[i, 7, 0] for i in range(4)]


@pytest.mark.parametrize("engine", ["FaultyStreamingEngine", "FaultyEngine"])
def test_an_open_stream_survives_the_engines_that_have_its_requests(start, monkeypatch, incidents, engine):
    spec = dataclasses.replace(streaming(engine), streaming="Streaming" in engine)
    monkeypatch.setitem(ENGINES, "plain", spec)
    monkeypatch.setattr(time_limits, "RESTART_FIRST_DELAY_S", 0.0)
    pool, _ = start(num_engines=2, max_restarts=9, max_num_seqs=64)
    pool.start(version=1, is_initial=True)
    fault(incidents, "kill 3", "kill 13")
    with pool.open_stream() as stream:
        completions: dict[int, Completion] = {}
        for begin in range(0, 20, 5):
            stream.submit({key: Request([key], 7, SAMPLED) for key in range(begin, begin + 5)})
            completions |= next(stream)
        stream.finish()
        read_stream(stream, completions)
    assert tokens_of([completions[key] for key in range(20)]) == [[key, 7, 0] for key in range(20)]


def test_bits_come_again_where_requests_join_if_the_engine_says_so(start, monkeypatch, tmp_path):
    monkeypatch.setitem(ENGINES, "plain", streaming())
    pool, _ = start(num_engines=1)
    assert pool.repeats
    pool._cfg.environment = EnvironmentConfig(name="guess:Guess", schedule="stream")
    assert not pool.repeats
    rules = [None, f"{__name__}:is_tiny", f"{__name__}:is_not_tiny"]
    build_tiny(TinyConfig(hidden_size=64, intermediate_size=128), str(tmp_path))
    found = []
    for rule in rules:
        pool, _ = start(num_engines=1)
        pool._cfg.environment = EnvironmentConfig(name="guess:Guess", schedule="stream")
        pool._spec = dataclasses.replace(ENGINES["vllm"], joins_exactly_if=rule)
        pool._model_path = str(tmp_path)
        found.append(pool.repeats)
    assert found == [True, True, False]


def is_tiny(rollout: RolloutConfig, device: str, model: Any) -> bool:
    return (rollout.max_response_tokens > 0, device, model.hidden_size) == (True, "cpu", 64)


def is_not_tiny(rollout: RolloutConfig, device: str, model: Any) -> bool:
    return not is_tiny(rollout, device, model)


def test_an_engine_with_many_requests_takes_breaks_less_often():
    intervals = [join_interval_s(running) / time_limits.JOIN_S for running in (0, 1, 4, 16, 64)]
    assert intervals == [0.25, 0.25, 0.25, 1.0, 4.0]
