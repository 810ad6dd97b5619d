"""Requests of many coroutines to one pool of engines."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import shutil
import signal
import threading

import numpy as np
import pytest

from tests.support import plain_engine
from tests.support.generation import GREEDY, SAMPLED, contents, make_requests, tokens_of, with_sampling
from tests.support.plain_pool import answers, begin, fault, streaming, wait_for
from trainer.config.engines import ENGINES
from trainer.errors import WorkerError
from trainer.generation.engine import CUT, Completion, Pending, Request
from trainer.generation.engines import RequestsDropped
from trainer.process import time_limits
from trainer.process.failures import read_incidents
from trainer.process.signals import SIGNALS, Stopped


def spec_of(engine: str) -> plain_engine.EngineSpec:
    return dataclasses.replace(streaming(engine), unit="request" if "Streaming" in engine else "batch")


@pytest.mark.parametrize("engine", ["StreamingEngine", "PlainEngine"])
def test_requests_that_are_made_together_or_apart_get_their_own_completions(start, monkeypatch, engine):
    monkeypatch.setitem(ENGINES, "plain", spec_of(engine))
    pool, _ = start("cuda", num_engines=2, max_num_seqs=3)
    pool.start(version=1, is_initial=True)
    waiting = [begin(pool, [Request([i, 0], seed, SAMPLED) for i in range(12)]) for seed in (7, 8, 9)]
    for seed, one in zip((7, 8, 9), waiting, strict=True):
        assert tokens_of(one.result()) == [[i, 0, seed, 0] for i in range(12)]


def test_batches_of_transformers_are_bit_equal_beside_others(start, model_paths, tmp_path):
    """With other sampling parameters, in one call and in calls of their own."""
    shutil.copytree(model_paths[True], tmp_path, dirs_exist_ok=True)
    pool, _ = start(engine="transformers", num_engines=1, max_num_seqs=3, max_response_tokens=24)
    pool.start(version=1, is_initial=True)
    stops = dataclasses.replace(SAMPLED, max_tokens=24, stop_token_ids=tuple(range(0, 256, 7)))
    alike = [with_sampling(make_requests(6), sampling) for sampling in (SAMPLED, GREEDY, stops)]
    alone = [contents(pool.generate(some)) for some in alike]
    waiting = [begin(pool, some) for some in alike]
    assert [contents(one.result()) for one in waiting] == alone
    mixed = contents(pool.generate([request for trio in zip(*alike, strict=True) for request in trio]))
    assert [mixed[i::3] for i in range(3)] == alone


def test_requests_that_nobody_waits_for_any_more_leave_nothing_for_the_next_ones(start, monkeypatch):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, _ = start("cuda", num_engines=2, max_num_seqs=3)
    pool.start(version=1, is_initial=True)
    begin(pool, [Request([i, 0], 7, SAMPLED) for i in range(12)]).cancel()
    assert answers(pool, 12) == [[i, 7, 0] for i in range(12)]


def test_a_sync_drops_the_requests_that_are_under_way(start, monkeypatch, incidents):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, _ = start(num_engines=1, max_num_seqs=64)
    pool.start(version=1, is_initial=True)
    fault(incidents, "wait 20")
    waiting = [begin(pool, [Request([i, 0], 7, SAMPLED) for i in range(first, first + 12)]) for first in (20, 40)]
    wait_for(lambda: not list(incidents.glob("fault *")))
    (incidents / "go on").touch()
    pool.sync_weights(2)
    for one in waiting:
        with pytest.raises(RequestsDropped):
            one.result()
    assert answers(pool, 4) == [[i, 7, 0] for i in range(4)]


def test_an_engine_that_was_replaced_while_all_rested_gets_its_requests_again(start, monkeypatch, incidents):
    monkeypatch.setitem(ENGINES, "plain", spec_of("FaultyStreamingEngine"))
    monkeypatch.setattr(time_limits, "RESTART_FIRST_DELAY_S", 0.0)
    pool, _ = start(num_engines=1, max_restarts=1, max_num_seqs=64)
    pool.start(version=1, is_initial=True)
    fault(incidents, "wait 20")
    waiting = begin(pool, [Request([i, 0], 7, SAMPLED) for i in range(20, 32)])
    wait_for(lambda: not list(incidents.glob("fault *")))
    (incidents / "go on").touch()
    with pool._at_rest():
        pool._engines.group.end(0)
        pool._engines.check()
        pool._engines.load()
        pool._sync(1, "keep")
    assert [tokens[:1] for tokens in tokens_of(pool.loop.run(pool_wait(waiting)))] == [[i] for i in range(20, 32)]


@pytest.mark.parametrize(("engine", "keeps"), [("FaultyStreamingEngine", True), ("FaultyEngine", False)])
def test_many_ask_while_weights_change_and_engines_die(start, monkeypatch, incidents, engine, keeps):
    """The main thread trains ranks and brings weights meanwhile. Without kept weights, one engine lives on."""
    monkeypatch.setitem(ENGINES, "plain", spec_of(engine))
    monkeypatch.setattr(time_limits, "RESTART_FIRST_DELAY_S", 0.0)
    options = {"max_restarts": 99, "max_num_seqs": 16, "weight_sync": "shared_memory", "keeps_weights": keeps}
    pool, ranks = start("cuda", num_engines=2, **options)
    pool.start(version=1, is_initial=True)
    rng, versions = random.Random(3), set()
    for version in range(2, 8):
        waiting = []
        for seed in range(40):
            requests = [Request([2000 + i, version], seed, SAMPLED) for i in range(3)]
            waiting.append((requests, begin(pool, requests)))
        for _, dropped in waiting[::5]:
            dropped.cancel()
        ranks.call("policy", "train")
        pool.sync_weights(version, "keep")
        if version % 3 == 0 and (keeps or len(pool._engines.lifecycle.serving) == 2):
            pool._engines.group.end(rng.randrange(2) if keeps else 0)
        for requests, one in waiting:
            if not one.cancelled():
                found = pool.loop.run(pool_wait(one))
                assert [tokens[:3] for tokens in tokens_of(found)] == [
                    [*request.prompt_token_ids.tolist(), request.seed] for request in requests
                ]
                versions |= {completion.weight_versions for completion in found}
    assert len({newest for _, newest in versions}) > 2
    assert all(one.role == "engine" for one in read_incidents(str(incidents)))


async def pool_wait(future):
    import asyncio

    return await asyncio.wrap_future(future)


@pytest.mark.parametrize("engine", ["FaultyStreamingEngine", "FaultyEngine"])
def test_log_probs_that_are_nan_are_a_failure_of_their_engine(start, monkeypatch, incidents, engine):
    """Nobody gets such a token, because it would make the loss NaN, and come back from the journal after a restart."""
    monkeypatch.setitem(ENGINES, "plain", spec_of(engine))
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


def test_a_failure_ends_the_requests_of_all(start, monkeypatch, incidents):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, _ = start(num_engines=1, max_restarts=0, max_num_seqs=64)
    pool.start(version=1, is_initial=True)
    fault(incidents, "kill 25")
    waiting = [begin(pool, [Request([i, 0], 7, SAMPLED) for i in range(one, one + 10)]) for one in (20, 40, 60)]
    for one in waiting:
        with pytest.raises(WorkerError, match="engine 0 died"):
            one.result()


def test_a_signal_ends_the_wait_of_the_main_thread(start, monkeypatch, incidents):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, _ = start(num_engines=1, max_num_seqs=64)
    pool.start(version=1, is_initial=True)
    fault(incidents, "wait 0")
    with SIGNALS.listening():
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Stopped, match="SIGTERM"):
            answers(pool)
    (incidents / "go on").touch()


def test_the_parts_of_a_completion_become_one():
    """Each engine gets a request for what is missing, whose draws do not depend on those before."""
    request = Request([1, 2], 5, SAMPLED)
    most = request.sampling.max_tokens

    async def run() -> Completion:
        pending = Pending(request, asyncio.get_running_loop().create_future())
        assert not pending.add(Completion([10, 11], [-1.0, -2.0], CUT, 3))
        assert pending.request.prompt_token_ids.tolist() == [1, 2, 10, 11]
        assert pending.request.sampling == dataclasses.replace(SAMPLED, max_tokens=most - 2)
        second = pending.request.seed
        assert not pending.add(Completion([12, 13, 14], [-3.0] * 3, CUT, (3, 4), ((3, 1), (4, 2))))
        assert pending.request.prompt_token_ids.tolist() == [1, 2, 10, 11, 12, 13, 14]
        assert pending.request.sampling.max_tokens == most - 5
        assert len({request.seed, second, pending.request.seed}) == 3
        assert pending.add(Completion([15], [-4.0], "stop", 4))
        return pending.completion.result()

    whole = asyncio.run(run())
    assert whole.token_ids.tolist() == [10, 11, 12, 13, 14, 15] and whole.finish_reason == "stop"
    assert whole.logprobs.tolist() == [-1.0, -2.0, -3.0, -3.0, -3.0, -4.0]
    assert whole.weight_versions == (3, 4) and whole.version_spans == ((3, 3), (4, 3))
