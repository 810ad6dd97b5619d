"""What the driver itself takes of a step on a large cluster: `python -m benchmarks.driver_scale [--ranks 1024 ...]`.

The driver is the real one: learner, worker groups and engine pool. Its ranks and engines are threads that
compute nothing and answer at once, with arrays of the real sizes, pickled as on the way between processes. So all time
is the driver's own. The network and Ray's scheduler are not in it.

Prints for each part of a step the seconds on the clock, and the CPU seconds of the driver's main thread.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import pickle
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from trainer.cluster.worker_groups import Timeouts, WorkerGroup
from trainer.config import Config, EngineSpec
from trainer.episodes import Episode, Sample
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.engine_pool import EnginePool
from trainer.learner.learner import Learner
from trainer.metrics.timing import Timer
from trainer.parallel.batching import Batch
from trainer.parallel.load_balancing import Limits, Share, divide
from trainer.process import time_limits
from trainer.workers.base import RankUpdate

SPEC = EngineSpec("benchmarks.driver_scale:FakeEngine", gpus=False)
_THREADS = 32


class FakeRank:
    """Answers like a rank."""

    def __init__(self, rank: int):
        self.rank = rank

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "limits":
            return self.rank, Limits(16384, 1e-5, True)
        if method not in ("logprobs", "values", "update"):
            return None
        share: Share = args[0].value
        width = share.batch["input_ids"].shape[1]
        if method == "update":
            metrics = {"loss": 0.0, "grad_norm": 1.0, "lr": 1e-6, "kl": 0.0, "clip_frac": 0.0, "entropy": 1.0}
            first = share.rows[[row for rows in share.mini_batches[0].micro_batches for row in rows]]
            return RankUpdate(metrics, first, np.zeros((len(first), width), np.float32), 1000)
        return share.rows, np.zeros((len(share.rows), width), np.float32)

    def begin_save(self, roles: list[str], files: Any) -> None:
        pass

    def finish_save(self) -> list[dict[str, Any]]:
        return [{"path": f"policy/__{self.rank}_0.distcp", "bytes": 10**9, "hash": f"{self.rank:032x}"}]


class FakeEngine:
    """Answers each request with a completion of `tokens` tokens."""

    def __init__(self, tokens: int):
        self.tokens = tokens

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        ids, logprobs = np.zeros(self.tokens, np.int32), np.zeros(self.tokens, np.float32)
        return [Completion(ids.copy(), logprobs.copy(), "stop", (1, 1)) for _ in requests]

    def set_version(self, version: int) -> None:
        pass


@dataclasses.dataclass
class Stored:
    """Stands for a value of the object store, which ranks read without the driver."""

    value: Any

    def __reduce__(self) -> Any:
        return Stored, (None,)


class Threads:
    """A `Backend` whose processes are objects of this process. A ticket is a future with a pickled answer."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(_THREADS)
        self.received = self.stored = 0

    def begin(self, process: Any, channel: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Future:
        if channel == "heartbeat":
            answer = {"pid": os.getpid(), "is_built": True, "host": "here", "node": "this", "gpus": []}
            done: Future = Future()
            done.set_result(pickle.dumps(answer))
            return done
        pickle.dumps((method, args, kwargs), pickle.HIGHEST_PROTOCOL)  # what the driver sends
        return self.pool.submit(self._answer, getattr(process, method), args, kwargs)

    def _answer(self, method: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bytes:
        return pickle.dumps(method(*args, **kwargs), pickle.HIGHEST_PROTOCOL)

    def wait(self, tickets: list[Future], timeout_s: float) -> list[Future]:
        return list(concurrent.futures.wait(tickets, timeout_s, concurrent.futures.FIRST_COMPLETED).done)

    def get(self, ticket: Future, name: str) -> Any:
        payload = ticket.result()
        self.received += len(payload)
        return pickle.loads(payload)

    def has_started(self, process: Any) -> bool:
        return True

    def kill(self, process: Any, process_id: tuple[int, str] | None) -> None:
        pass


class ThreadCluster:
    """A `Cluster` of such objects."""

    device = "cpu"
    object_store_bytes = 0

    def __init__(self, cfg: Config, tokens: int):
        self.cfg, self.tokens, self.backend = cfg, tokens, Threads()
        self.timeouts = Timeouts(time_limits.HEARTBEAT_S, time_limits.CALL_S)

    def count_ranks(self) -> int:
        return self.cfg.trainer.num_workers

    def launch_ranks(self, name: str, factory: Any, env: dict[str, str], count: int | None = None) -> WorkerGroup:
        total = count or self.count_ranks()
        return WorkerGroup(name, total, FakeRank, self.backend, self.timeouts)

    def launch_engines(
        self, factory: Any, args: Sequence[tuple], env: dict[str, str], find_gpus: Any = None
    ) -> WorkerGroup:
        return WorkerGroup("engine", len(args), lambda _: FakeEngine(self.tokens), self.backend, self.timeouts)

    def has_capacity(self, group: WorkerGroup) -> bool:
        return True

    def put(self, value: Any) -> Stored:
        self.backend.stored += len(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))  # the copy into the object store
        return Stored(value)

    def release(self, group: WorkerGroup) -> None:
        group.kill()


def config(ranks: int, engines: int, prompts: int, n: int, tokens: int) -> Config:
    cfg = Config()
    cfg.algorithm.kl_coef = 0.01
    cfg.trainer = dataclasses.replace(
        cfg.trainer, num_workers=ranks, train_batch_size=prompts, mini_batch_size=prompts // 2, run_dir="/nonexistent"
    )
    cfg.rollout = dataclasses.replace(
        cfg.rollout, engine="benchmarks.driver_scale:SPEC", num_engines=engines, n=n, max_response_tokens=tokens
    )
    return cfg


def episodes_of(prompts: int, n: int, tokens: int) -> list[Episode]:
    """Return episodes with prompts of a quarter of the tokens."""
    rng = np.random.default_rng(0)
    ids, mask = np.zeros(tokens, np.int32), np.ones(tokens, np.float32)
    mask[: tokens // 4] = 0
    sample = Sample(ids, mask, -mask, (1, 1))
    return [
        Episode(f"0:{group}:{number}", str(group), [sample], reward=float(rng.random()))
        for group in range(prompts)
        for number in range(n)
    ]


def plan_of(batch: Batch, ranks: int) -> list[Share]:
    """Return the shares of a batch that is scored."""
    batch = {name: batch[name] for name in ("input_ids", "mask", "lengths", "group_ids")}
    return divide(batch, [np.arange(len(batch["lengths"]))], Limits(16384, 1e-5, True), ranks)


@dataclasses.dataclass(frozen=True)
class Part:
    """What a part of a step took."""

    name: str
    clock_s: float
    cpu_s: float
    sent: int
    """Bytes in the object store, which the ranks read."""
    received: int
    """Bytes of the answers."""


def measure(ranks: int, engines: int, prompts: int, n: int, tokens: int) -> Iterator[Part]:
    """Do each part of a step once, and yield what it took."""
    response = tokens * 3 // 4
    cfg = config(ranks, engines, prompts, n, response)
    cluster = ThreadCluster(cfg, response)
    backend = cluster.backend
    results: list[Any] = []

    def timed(name: str, function: Callable[[], Any]) -> Part:
        received, stored, begin, cpu = backend.received, backend.stored, time.perf_counter(), time.thread_time()
        results.append(function())
        wall, used = time.perf_counter() - begin, time.thread_time() - cpu
        return Part(name, wall, used, backend.stored - stored, backend.received - received)

    yield timed("groups of workers", lambda: Learner(cfg, cluster, Timer()))  # type: ignore[arg-type]
    learner: Learner = results[-1]
    pool = EnginePool(cfg, cluster, learner.ranks, "model")  # type: ignore[arg-type]
    yield timed("a call of all ranks", lambda: learner.ranks.call("policy", "nothing"))
    yield timed("start of the engines", lambda: pool.start(1, is_initial=True))
    sampling = Sampling(1.0, 1.0, -1, response, (1,))
    prompt = np.zeros(tokens // 4, np.int32)
    requests = [Request(prompt, seed, sampling) for seed in range(prompts * n)]
    yield timed("requests to engines and back", lambda: pool.generate(requests))
    episodes = episodes_of(prompts, n, tokens)
    yield timed("scores of two roles, advantages", lambda: learner.make_experience(episodes, 1))
    experience = results[-1]
    yield timed("update", lambda: learner.update(experience, 1))
    yield timed("the plan and the shares of a batch alone", lambda: plan_of(experience.batch, ranks))
    yield timed("begin and end of a save", lambda: learner.ranks.begin_save(None)())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--engines", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence; three quarters are the completion")
    args = parser.parse_args()
    print(f"{args.ranks} ranks, {args.engines} engines, {args.prompts * args.n:,} sequences of {args.tokens} tokens\n")
    print("| part | clock | CPU of the driver | sent to the ranks | received |\n|---|---|---|---|---|", flush=True)
    for part in measure(args.ranks, args.engines, args.prompts, args.n, args.tokens):
        moved = f"{part.sent / 1e6:,.0f} MB | {part.received / 1e6:,.0f} MB"
        print(f"| {part.name} | {part.clock_s:.2f} s | {part.cpu_s:.2f} s | {moved} |", flush=True)
    print(f"\nlargest memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB")


if __name__ == "__main__":
    main()
