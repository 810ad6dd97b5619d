"""The pool: who gets which request, which weights answer, and who holds the memory of a shared GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from pathlib import Path

import pytest

from tests.support import plain_engine, token_engine
from tests.support.generation import SAMPLED, tokens_of
from tests.support.plain_engine import PlainRank, PlainRanks
from tests.support.plain_pool import answers, begin, fault, streaming, wait_for
from trainer.config.engines import ENGINES, EngineSpec
from trainer.errors import NonRetryableError, UserError, WorkerError
from trainer.generation.engine import Request
from trainer.generation.engine_pool import EnginePool
from trainer.generation.engines import RequestsDropped
from trainer.generation.lifecycle import State
from trainer.process import time_limits
from trainer.process.failures import can_recover, read_incidents

# --------------------------------------------------------------------------------------------------------
# Requests


def test_completions_come_in_order_and_prompts_stay_together(start, monkeypatch):
    monkeypatch.setitem(ENGINES, "plain", streaming())
    pool, _ = start(num_engines=3)
    pool.start(version=1, is_initial=True)
    requests = [Request([p, p + 1], j, SAMPLED) for j in range(4) for p in range(7)]
    completions = pool.generate(requests)
    assert tokens_of(completions) == [[*r.prompt_token_ids, r.seed, 0] for r in requests]
    homes: dict[float, set[tuple]] = {}
    for request, completion in zip(requests, completions, strict=True):
        homes.setdefault(completion.logprobs[0], set()).add(tuple(request.prompt_token_ids))
    assert sorted(len(prompts) for prompts in homes.values()) == [2, 2, 3]
    pool.shutdown()
    with pytest.raises(RuntimeError, match="the event loop has ended"):
        answers(pool)


def batched() -> EngineSpec:
    return dataclasses.replace(streaming("PatientEngine"), unit="batch")


@pytest.mark.parametrize(("spec", "waits"), [(streaming(), 0), (batched(), 11)], ids=["streaming", "batched"])
def test_an_engine_that_is_done_early_takes_from_the_rest(start, monkeypatch, spec, waits):
    """An engine holds two requests, and answers one of them after the ten that it does not hold."""
    monkeypatch.setitem(ENGINES, "plain", spec)
    pool, _ = start("cuda", num_engines=2, max_num_seqs=2)
    pool.start(version=1, is_initial=True)
    requests = [Request([i, 0], i, SAMPLED) for i in range(12)]
    requests[waits] = Request([plain_engine.WAITS, 10], waits, SAMPLED)
    completions = pool.generate(requests)
    assert tokens_of(completions) == [[*request.prompt_token_ids, request.seed, 0] for request in requests]
    shares = Counter(one.logprobs[0] for one in completions)
    assert sorted(shares.values()) == [2, 10]


def test_an_engine_that_never_answers_is_named(start, monkeypatch):
    monkeypatch.setitem(ENGINES, "plain", streaming())
    monkeypatch.setattr(time_limits, "POLL_INTERVAL_S", 0.1)
    monkeypatch.setattr(time_limits, "CALL_S", 6.0)
    pool, _ = start(num_engines=2)
    pool.start(version=1, is_initial=True)
    requests = [Request([i, 0], i, SAMPLED) for i in range(3)] + [Request([plain_engine.WAITS, 99], 0, SAMPLED)]
    with pytest.raises(WorkerError, match=r"^engine 1 \(process .*: no result after \d+ s"):
        pool.generate(requests)


def test_engines_start_while_the_ranks_do_other_things(start, monkeypatch, tmp_path):
    """On a shared GPU, too. Only what takes its memory waits."""
    spec = dataclasses.replace(plain_engine.SPEC, path=f"{plain_engine.__name__}:SlowEngine")
    monkeypatch.setitem(ENGINES, "plain", spec)
    pool, ranks = start("cuda", waits=False, colocate=True)
    assert ranks.call("policy", "weight_bytes", "auto") == 1000
    (tmp_path / "go").touch()
    pool.wait_ready()
    ranks.call("policy", "compute")  # the engine sleeps
    pool.start(version=1, is_initial=True)
    assert answers(pool, 1) == [[0, 7, 0]]


def test_engines_stay_asleep_if_the_ranks_leave_them_too_little_room(start, tmp_path):
    """Whether they would generate or take weights. They have not failed, and generate once there is room."""
    pool, ranks = start("cuda", colocate=True, num_engines=1)
    pool.start(version=1, is_initial=True)
    (tmp_path / "keeps").write_text("50")
    for wake in (lambda: answers(pool, 1), lambda: pool.sync_weights(2)):
        with pytest.raises(UserError, match="an engine needs 60 beside 50"):
            wake()
    (tmp_path / "keeps").write_text("40")
    pool.sync_weights(2)
    assert answers(pool, 1) == [[0, 7, 0]]


def test_engines_of_a_shared_gpu_stay_awake_between_requests(start):
    pool, ranks = start("cuda", colocate=True)
    pool.start(version=1, is_initial=True)
    with pool.awake():
        for _ in range(2):
            assert tokens_of(pool.loop.run(pool.complete_together([Request([0], 7, SAMPLED)]))) == [[0, 7, 0]]
        with pytest.raises(WorkerError, match="no memory"):
            ranks.call("policy", "compute")  # the engine was not put to sleep in between
    ranks.call("policy", "compute")


def test_an_engine_that_fails_at_its_end_does_not_fail_the_run(start, tmp_path):
    pool, _ = start()
    pool.start(version=1, is_initial=True)
    (tmp_path / "fails at its end").touch()
    pool.shutdown()


# --------------------------------------------------------------------------------------------------------
# Weights


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast", "adapter"])
def test_engines_answer_with_the_weights_of_the_last_sync(start, tmp_path, transport):
    setting = {"lora": True} if transport == "adapter" else {"weight_sync": transport}
    pool, ranks = start(num_engines=2, **setting)
    pool.start(version=1, is_initial=True)
    assert answers(pool) == [[0, 7, 0], [1, 7, 0]]
    ranks.call("policy", "train")
    assert answers(pool) == [[0, 7, 0], [1, 7, 0]]
    pool.sync_weights(2)
    assert answers(pool) == [[0, 7, 1], [1, 7, 1]]
    assert not (tmp_path / "weights").exists(), "the shared copy of the weights is still there"
    assert {c.weight_versions for c in pool.generate([Request([1], 1, SAMPLED)])} == {(2, 2)}


def test_engines_on_the_gpus_of_the_ranks_get_weights_there(start, monkeypatch):
    monkeypatch.setitem(ENGINES, "plain", dataclasses.replace(plain_engine.SPEC, transports=("shared_memory", "ipc")))
    pool, ranks = start("cuda", colocate=True)
    pool.start(version=1, is_initial=True)
    ranks.call("policy", "train")
    pool.sync_weights(2)
    assert answers(pool, 1) == [[0, 7, 1]]
    assert pool.synced_bytes == 1000


def test_the_ranks_on_the_gpus_of_engines_send(start, monkeypatch):
    monkeypatch.setitem(ENGINES, "plain", dataclasses.replace(plain_engine.SPEC, transports=("shared_memory", "ipc")))
    pool, _ = start("cuda", colocate=True, num_workers=3)
    pool.start(version=1, is_initial=True)
    assert pool._transport.transfer.senders == (0,)


def test_a_receiver_that_writes_files_knows_how_much_comes(start):
    pool, _ = start(weight_sync="broadcast")
    pool.start(version=1, is_initial=True)
    assert pool._transport.transfer.total_bytes == 1000


def test_engines_of_a_resumed_run_get_its_weights_at_the_start(start):
    pool, ranks = start()
    ranks.call("policy", "train")
    pool.start(version=5, is_initial=False)
    assert answers(pool, 1) == [[0, 7, 1]]


def test_completions_of_other_weights_are_refused(start, monkeypatch):
    path = plain_engine.SPEC.path.replace("PlainEngine", "ForgetfulEngine")
    monkeypatch.setitem(ENGINES, "plain", dataclasses.replace(plain_engine.SPEC, path=path))
    pool, _ = start()
    pool.start(version=4, is_initial=True)
    with pytest.raises(AssertionError, match=r"a completion of weights \(0, 0\), expected from 4 to 4"):
        answers(pool)


def test_requests_under_way_survive_a_sync_that_does_not_drop_them(start, monkeypatch):
    """Completions carry all versions that their engine had since it got the request."""
    monkeypatch.setitem(ENGINES, "plain", streaming())
    pool, ranks = start("cuda", num_engines=2, max_num_seqs=3, weight_sync="shared_memory")
    pool.start(version=1, is_initial=True)
    ranks.call("policy", "train")
    requests = [Request([i, 0], i, SAMPLED) for i in range(200)]  # so many that they are under way for long enough
    requests[11] = Request([plain_engine.WAITS, 4], 11, SAMPLED)
    waiting = begin(pool, requests)
    wait_for(lambda: len(list(Path(pool._ends.model_path).glob("answered *"))) >= 2)
    pool.sync_weights(2, "keep")
    completions = waiting.result()
    weights = {one.weight_versions: int(one.token_ids[-1]) for one in completions}
    assert weights.items() <= {(1, 1): 0, (2, 2): 1, (1, 2): 1}.items() and len(weights) > 1


def test_engines_take_weights_before_a_long_request_is_complete(start, monkeypatch):
    """Its tokens name the versions that sampled them. One that nobody waits for any more is dropped at the end."""
    monkeypatch.setitem(ENGINES, "plain", token_engine.ENGINE)
    pool, ranks = start("cuda", num_engines=2, max_num_seqs=3, weight_sync="shared_memory", keeps_weights=True)
    pool.start(version=1, is_initial=True)
    lengths = [dataclasses.replace(SAMPLED, max_tokens=most) for most in (200, 100_000)]
    short, endless = (begin(pool, [Request([number], one.max_tokens - 1, one)]) for number, one in enumerate(lengths))
    wait_for(lambda: short.done() or len(pool._engines._busy) == 2)
    for version in range(2, 5):
        pool.sync_weights(version, "keep")
    (completion,) = short.result()
    pool.sync_weights(4)
    with pytest.raises(RequestsDropped):
        endless.result()
    versions, counts = zip(*completion.version_spans, strict=True)
    assert sorted({*versions}) == list(versions) and sum(counts) == 200
    assert completion.weight_versions == (versions[0], versions[-1]) and versions[0] < versions[-1] == 4
    pool.sync_weights(5)


def test_a_failed_sender_is_heard_while_engines_still_wait(start):
    pool, ranks = start(weight_sync="broadcast")
    pool.start(version=1, is_initial=True)
    for _ in range(2):
        ranks.call("policy", "train")
    with pytest.raises(ValueError, match="cannot be sent"):
        pool.sync_weights(2)


@pytest.mark.parametrize("engines", [1, 2])
def test_a_server_that_does_not_take_what_the_ranks_have_sent_is_lost_alone(start, tmp_path, monkeypatch, engines):
    spec = dataclasses.replace(plain_engine.SPEC, path=f"{plain_engine.__name__}:FaultyEngine")
    monkeypatch.setitem(ENGINES, "plain", spec)
    pool, ranks = start(weight_sync="broadcast", num_engines=engines)  # trainer.max_restarts=0
    pool.start(version=1, is_initial=True)
    ranks.call("policy", "train")
    fault(tmp_path, "server synced")
    pool.sync_weights(2)
    assert answers(pool) == [[0, 7, 1], [1, 7, 1]]


@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_a_way_of_the_weights_that_does_not_work_is_named_before_the_first_step(start, monkeypatch, transport):
    """It is tried again once, as after a failure of the network. Then the run ends."""
    monkeypatch.setitem(ENGINES, "plain", dataclasses.replace(plain_engine.SPEC, transports=("broadcast", "ipc")))
    sharing = {"device": "cuda", "colocate": True} if transport == "ipc" else {}
    pool, ranks = start(weight_sync=transport, max_restarts=3, **sharing)
    for _ in range(2):
        ranks.call("policy", "train")
    sentence = f"rollout.weight_sync={transport}: the first weights did not reach the engines .ValueError: cannot be"
    with pytest.raises(WorkerError, match=f"^{sentence}") as raised:
        pool.start(version=1, is_initial=True)
    assert can_recover(raised.value)
    with pytest.raises(NonRetryableError, match=sentence):
        pool.start(version=1, is_initial=True)


def test_shared_gpus_that_no_weights_can_reach_are_refused_before_engines_start(start):
    with pytest.raises(UserError, match="rollout.weight_sync=broadcast: NCCL"):
        start("cuda", colocate=True, weight_sync="broadcast", engine="missing")


# --------------------------------------------------------------------------------------------------------
# Shared GPUs


def test_engines_and_ranks_take_turns_with_the_memory_of_a_shared_gpu(start):
    """The file of the GPU's memory refuses more than there is."""
    pool, ranks = start("cuda", colocate=True)
    ranks.call("policy", "compute")
    pool.start(version=1, is_initial=False)
    for version in (2, 3):
        ranks.call("policy", "compute")  # with 90 percent of the memory
        assert answers(pool, 1) == [[0, 7, version - 2]]
        ranks.call("policy", "train")
        pool.sync_weights(version)
    ranks.call("policy", "compute")


@pytest.mark.parametrize(("device", "colocate"), [("cuda", False), ("cpu", True), ("cpu", False)])
def test_engines_with_memory_of_their_own_stay_awake(start, device, colocate):
    pool, ranks = start(device, colocate=colocate, weight_sync="shared_memory")
    pool.start(version=1, is_initial=False)
    ranks.call("policy", "train")
    assert answers(pool, 1) == [[0, 7, 0]]  # they refuse to sleep
    pool.sync_weights(2)
    assert answers(pool, 1) == [[0, 7, 1]]


@pytest.fixture
def shared(start, monkeypatch, incidents) -> tuple[EnginePool, PlainRanks]:
    """Two engines on the GPUs of two ranks, both at the weights of version 1."""
    spec = dataclasses.replace(streaming("FaultyStreamingEngine"), transports=("shared_memory", "ipc"))
    monkeypatch.setitem(ENGINES, "plain", spec)
    monkeypatch.setattr(time_limits, "RESTART_FIRST_DELAY_S", 0.0)
    pool, ranks = start("cuda", colocate=True, num_workers=2, num_engines=2, max_restarts=5, max_num_seqs=64)
    ranks.policy.call("compute")
    pool.start(version=1, is_initial=False)
    return pool, ranks


def test_a_new_engine_on_a_shared_gpu_starts_and_sleeps_before_the_ranks_compute_again(shared, incidents):
    """The rank needs the memory that the engine takes while it starts."""
    pool, ranks = shared
    fault(incidents, "kill 3")
    requests = [Request([i, 0], i, SAMPLED) for i in range(8)]
    assert tokens_of(pool.generate(requests)) == [[i, 0, i, 0] for i in range(8)]
    ranks.policy.call("compute")
    ranks.policy.call("call", "policy", "train")
    pool.sync_weights(2)
    assert len({one.logprobs[0] for one in pool.generate(requests)}) == 2
    assert [one.action for one in read_incidents(str(incidents))] == ["replaced the engine"]


def test_an_engine_that_dies_while_the_ranks_compute_waits_until_they_leave_the_gpu(shared, incidents):
    pool, ranks = shared
    ranks.policy.call("compute")
    pool._engines.group.end(0)
    pool.sync_weights(2)
    ranks.policy.call("compute")
    assert pool._engines.lifecycle.within(State.DEAD) == [0]
    assert answers(pool) == [[0, 7, 0], [1, 7, 0]]
    ranks.policy.call("compute")
    pool.sync_weights(3)
    assert pool._engines.lifecycle.serving == [0, 1]
    assert [one.cause for one in read_incidents(str(incidents))] == ["killed process"]


@pytest.mark.parametrize("moment", ["generate", "sync", "restart"])
def test_the_last_engines_on_shared_gpus_come_back_while_the_ranks_make_room(shared, incidents, moment):
    pool, ranks = shared
    ranks.policy.call("compute")
    if moment == "generate":
        fault(incidents, "kill 3", "kill 4")
    else:
        for engine in (0, 1):
            pool._engines.group.end(engine)
        pool.sync_weights(1) if moment == "sync" else pool.start(1, is_initial=False)
    requests = [Request([i, 0], i, SAMPLED) for i in range(8)]
    assert tokens_of(pool.generate(requests)) == [[i, 0, i, 0] for i in range(8)]
    ranks.policy.call("compute")
    pool.sync_weights(2)
    assert pool._engines.lifecycle.serving == [0, 1]


def test_an_interrupted_rollout_leaves_no_engine_that_starts(shared, incidents):
    """Ranks that start again would meet it on their GPU."""
    pool, ranks = shared
    fault(incidents, "kill 0", "wait start")
    with pytest.raises(KeyboardInterrupt):
        with pool.awake():
            pool.loop.run(pool.complete_together([Request([i, 0], i, SAMPLED) for i in range(8)]))
            while not pool._engines.lifecycle.within(State.STARTING):
                pool._engines.poll()
            raise KeyboardInterrupt
    assert len(pool._engines.lifecycle.within(State.DEAD)) == 1
    pool._engines.check()  # the other one has gone to sleep
    ranks.policy.call("compute")


def test_engines_follow_ranks_that_start_again_on_fewer_gpus(shared):
    """A node was lost with ranks and engines. The engine that is left has the GPU of no rank."""
    pool, ranks = shared
    cluster = pool._cluster
    factory = functools.partial(PlainRank, str(pool._ends.model_path))
    cluster.release(ranks.policy)
    ranks.policy = cluster.launch_ranks("rank", factory, {}, count=1)
    assert ranks.policy.placements()[0]["gpus"] == ["2"]
    ranks.policy.call("compute")
    pool.start(2, is_initial=False)
    assert pool._transport.transfer.senders == (0,)
    assert answers(pool) == [[0, 7, 0], [1, 7, 0]]
    ranks.policy.call("compute")
    pool.sync_weights(3)
    assert pool._engines.lifecycle.serving == [0] and pool._engines.unplaced == {1}
    cluster.release(ranks.policy)
    ranks.policy = cluster.launch_ranks("rank", factory, {}, count=4)
    pool.start(4, is_initial=False)
    assert answers(pool) == [[0, 7, 0], [1, 7, 0]]
    pool.sync_weights(5)
    assert pool._engines.lifecycle.serving == [0, 1], "new nodes bring the engine back"
