"""Engines that die, hang or fail: who takes their requests, and what starts in their place."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support import plain_engine
from tests.support.generation import SAMPLED, tokens_of
from tests.support.plain_pool import answers, begin, fault, streaming
from trainer.config.engines import ENGINES
from trainer.errors import FailureSource, NonRetryableError, WorkerError, set_failure_source
from trainer.generation.engine import Request
from trainer.models.weight_deltas import digest_of
from trainer.process.failures import can_recover, read_incidents


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("FaultyStreamingEngine", "kill"),
        ("FaultyStreamingEngine", "stop"),
        ("FaultyStreamingEngine", "memory"),
        ("FaultyEngine", "kill"),
    ],
)
def test_requests_of_a_lost_engine_go_to_the_others(start, monkeypatch, incidents, engine, kind):
    """The next sync brings the new engine the weights, and it serves again."""
    unit = "request" if "Streaming" in engine else "batch"
    monkeypatch.setitem(ENGINES, "plain", dataclasses.replace(streaming(engine), unit=unit))
    pool, ranks = start(num_engines=2, max_restarts=3, max_num_seqs=64)
    pool.start(version=1, is_initial=True)
    requests = [Request([i, 0], i, SAMPLED) for i in range(12)]
    first = pool.generate(requests)
    fault(incidents, f"{kind} 3")
    again = pool.generate(requests)
    assert tokens_of(again) == tokens_of(first) == [[i, 0, i, 0] for i in range(12)]
    assert len({one.logprobs[0] for one in again}) <= 2
    with pool._at_rest():
        pool._engines.load()
    ranks.call("policy", "train")
    pool.sync_weights(2)
    last = pool.generate(requests)
    assert tokens_of(last) == [[i, 0, i, 1] for i in range(12)]
    new = {one.logprobs[0] for one in last} - {one.logprobs[0] for one in first}
    assert len(new) == 1, "one engine is another process"
    (incident,) = read_incidents(str(incidents))
    assert incident.role == "engine" and incident.action == "replaced the engine" and incident.cost_s == 0


def test_an_engine_that_keeps_its_old_adapter_is_replaced(start, monkeypatch, incidents):
    """Its completions carry the new version, so nothing else would show it."""
    spec = dataclasses.replace(plain_engine.SPEC, path=f"{plain_engine.__name__}:ProvingEngine")
    monkeypatch.setitem(ENGINES, "plain", spec)
    pool, ranks = start(num_engines=2, max_restarts=1, lora=True)
    pool.start(version=1, is_initial=False)
    (incidents / "stuck").touch()
    ranks.call("policy", "train")
    pool.sync_weights(2)
    assert pool.weights_digest == digest_of(b"1")
    assert answers(pool, 4) == [[i, 7, 1] for i in range(4)]
    (incidents / "stuck").touch()
    ranks.call("policy", "train")
    old, new = digest_of(b"1"), digest_of(b"2")
    wrong = f"serves other weights than it was given: their digest is {old}, and that of the ranks is {new}"
    with pytest.raises(WorkerError, match=wrong):
        pool.sync_weights(3)


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast", "adapter"])
def test_the_death_of_the_last_engine_pauses_the_step(start, monkeypatch, incidents, transport):
    """A new engine gets the current weights, not those that it was started with."""
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    setting = {"lora": True} if transport == "adapter" else {"weight_sync": transport}
    pool, ranks = start(num_engines=1, max_restarts=3, max_num_seqs=64, **setting)
    ranks.call("policy", "train")
    pool.start(version=4, is_initial=False)
    channel = getattr(pool._transport, "transfer", None)
    fault(incidents, "kill 3", "kill 5")
    requests = [Request([i, 0], i, SAMPLED) for i in range(8)]
    completions = pool.generate(requests)
    assert tokens_of(completions) == [[i, 0, i, 1] for i in range(8)]
    assert {one.weight_versions for one in completions} == {(4, 4)}
    assert transport != "broadcast" or pool._transport.transfer != channel, (
        "a new process cannot join the group of a dead one"
    )
    one, two = read_incidents(str(incidents))
    assert one.cost_s + two.cost_s > 0


@pytest.mark.parametrize("transport", ["shared_memory", "adapter", "broadcast", "none yet"])
def test_engines_get_the_kept_weights_when_the_ranks_have_others(start, monkeypatch, incidents, transport):
    """The last engine dies while the ranks train. "none yet": the initial weights."""
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    setting = {"lora": True} if transport == "adapter" else {"weight_sync": transport}
    if transport == "none yet":
        setting = {"weight_sync": "shared_memory"}
    pool, ranks = start(num_engines=2, max_restarts=3, max_num_seqs=64, keeps_weights=True, **setting)
    if transport != "none yet":
        ranks.call("policy", "train")
    pool.start(version=4, is_initial=transport == "none yet")
    ranks.call("policy", "train")
    fault(incidents, "kill 3", "kill 5")
    requests = [Request([i, 0], i, SAMPLED) for i in range(8)]
    generated = begin(pool, requests)
    if transport == "broadcast":
        with pytest.raises(WorkerError, match="no engine is left that has the weights of the rollouts") as raised:
            generated.result()
        assert can_recover(raised.value)
        return
    completions = generated.result()
    assert tokens_of(completions) == [[i, 0, i, 0 if transport == "none yet" else 1] for i in range(8)]
    assert {one.weight_versions for one in completions} == {(4, 4)}
    pool.sync_weights(5)
    assert answers(pool) == [[i, 7, 1 if transport == "none yet" else 2] for i in range(2)]
    pool.shutdown()
    assert not (incidents / "weights").exists()


def test_an_engine_that_comes_back_joins_the_batch_that_is_generated(start, monkeypatch, incidents):
    """It need not wait for the next sync if the weights were kept."""
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    options = {"max_restarts": 3, "max_num_seqs": 2, "weight_sync": "shared_memory", "keeps_weights": True}
    pool, ranks = start("cuda", num_engines=2, **options)
    pool.start(version=4, is_initial=False)
    ranks.call("policy", "train")
    before = {one.logprobs[0] for one in pool.generate([Request([i, 0], i, SAMPLED) for i in range(8)])}
    fault(incidents, "kill 3")
    homes: set[float] = set()
    waiting = [begin(pool, [Request([i % 8, 0], i, SAMPLED) for i in range(8)])]
    while len(homes - before) == 0:
        waiting.append(begin(pool, [Request([0, 0], 7, SAMPLED)] * 16))
        homes |= {one.logprobs[0] for one in waiting.pop(0).result()}
    assert pool._engines.lifecycle.serving == [0, 1] and len(before) == 2


def test_an_engine_that_dies_as_it_starts_is_started_again(start, monkeypatch, incidents):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    fault(incidents, "kill start")
    pool, _ = start(num_engines=2, max_restarts=1, max_num_seqs=64)
    pool.start(version=1, is_initial=True)
    assert answers(pool) == [[0, 7, 0], [1, 7, 0]]
    assert [one.cause for one in read_incidents(str(incidents))] == ["killed process"]


def test_an_engine_that_dies_between_its_loading_and_the_start_is_started_again(start, monkeypatch, incidents):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, _ = start(num_engines=2, max_restarts=1, max_num_seqs=64)
    with pool._at_rest():
        pool._engines.load()
    pool._engines.group.end(0)
    pool.start(version=1, is_initial=True)
    assert answers(pool) == [[0, 7, 0], [1, 7, 0]]
    assert [one.action for one in read_incidents(str(incidents))] == ["replaced the engine"]


def test_new_engines_have_an_end(start, monkeypatch, incidents):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, _ = start(num_engines=2, max_restarts=1, max_num_seqs=64)
    pool.start(version=1, is_initial=True)
    fault(incidents, "kill 1", "kill 3")
    with pytest.raises(WorkerError, match="^engine . died") as raised:
        pool.generate([Request([i, 0], i, SAMPLED) for i in range(8)])
    assert not can_recover(raised.value)


def test_engines_that_are_lost_with_one_node_count_once(start, monkeypatch, incidents):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, _ = start(num_engines=3, max_restarts=1, max_num_seqs=64)
    pool.start(version=1, is_initial=True)

    def lose(engine: int, node: str) -> None:
        error = WorkerError(f"engine {engine} is lost with its node", cause="node")
        set_failure_source(error, FailureSource(f"engine {engine}", node))
        pool._engines.mark_failed([engine], error)

    lose(0, "10.0.0.1")
    lose(1, "10.0.0.1")
    with pytest.raises(WorkerError, match="engine 2 is lost"):
        lose(2, "10.0.0.2")


def test_an_engine_that_runs_out_of_memory_twice_at_one_step_is_at_fault(start, monkeypatch, incidents):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, _ = start(num_engines=2, max_restarts=3, max_num_seqs=64)
    pool.start(version=1, is_initial=True)
    fault(incidents, "memory 1", "memory 3")
    with pytest.raises(NonRetryableError, match="no memory left"):
        pool.generate([Request([i, 0], i, SAMPLED) for i in range(8)])


def test_an_engine_that_dies_while_it_gets_a_broadcast_is_replaced_by_the_next_start(start, monkeypatch, incidents):
    """The ranks may wait for it forever, so the failure is raised, and the run starts its ranks again."""
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, ranks = start(num_engines=2, max_restarts=3, max_num_seqs=64, weight_sync="broadcast")
    pool.start(version=1, is_initial=True)
    fault(incidents, "kill sync")
    ranks.call("policy", "train")
    with pytest.raises(WorkerError, match="engine . died") as raised:
        pool.sync_weights(2)
    assert can_recover(raised.value)
    pool.start(version=2, is_initial=False)
    assert answers(pool) == [[0, 7, 1], [1, 7, 1]]


def test_a_new_engine_that_still_loads_does_not_hold_up_a_sync(start, monkeypatch, incidents):
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, ranks = start(num_engines=2, max_restarts=3, max_num_seqs=64, weight_sync="broadcast")
    pool.start(version=1, is_initial=True)
    fault(incidents, "kill 1", "wait start")
    assert len(pool.generate([Request([i, 0], i, SAMPLED) for i in range(4)])) == 4
    ranks.call("policy", "train")
    pool.sync_weights(2)
    assert answers(pool) == [[0, 7, 1], [1, 7, 1]]
    (incidents / "go on").touch()
    with pool._at_rest():
        pool._engines.load()
    pool.sync_weights(2)
    assert len({one.logprobs[0] for one in pool.generate([Request([i], 7, SAMPLED) for i in range(8)])}) == 2


def test_engines_that_hold_a_version_need_no_sync_when_the_ranks_start_again(start, monkeypatch, incidents):
    """`train` changes the weights of the ranks, so a sync would show. An engine that starts again needs one."""
    monkeypatch.setitem(ENGINES, "plain", streaming("FaultyStreamingEngine"))
    pool, ranks = start(num_engines=2, max_restarts=3, max_num_seqs=64, weight_sync="shared_memory")
    ranks.call("policy", "train")
    pool.start(version=4, is_initial=False)
    ranks.call("policy", "train")
    pool.start(version=4, is_initial=False)
    assert answers(pool) == [[0, 7, 1], [1, 7, 1]]
    pool.start(version=5, is_initial=False)
    assert answers(pool) == [[0, 7, 2], [1, 7, 2]]
    ranks.call("policy", "train")
    pool._engines.group.end(0)
    pool.start(version=5, is_initial=False)
    with pool._at_rest():
        pool._engines.load()
    pool.start(version=5, is_initial=False)
    assert answers(pool) == [[0, 7, 3], [1, 7, 3]]
