"""The ranks as the loop sees them: one object per job, whichever processes the roles live in."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.cluster.resources import rank_environment
from trainer.cluster.worker_groups import CallFutures, Cluster, WorkerGroup
from trainer.config import Config
from trainer.metrics.timing import peak_flops
from trainer.models.files import resolve_model_path
from trainer.parallel.axes import axis_sizes
from trainer.parallel.batching import Batch
from trainer.parallel.load_balancing import Limits, divide
from trainer.process.startup import importing

LOG = logging.getLogger(__name__)


def _build_rank(cfg: Config, rank: int, world_size: int, device: str) -> Any:
    with importing():  # where it is used: the driver is up seconds earlier without FSDP and the model classes
        from trainer.workers.rank import Rank

    return Rank(cfg, rank, world_size, device)


class StoredBatch:
    """A batch whose shares are stored for the ranks. Roles whose micro-batches have the same limits have one copy.

    Args:
        mini_batches: the rows of each. None: the batch is computed as a whole.
        keeps_groups: no micro-batch has a part of a group.
    """

    def __init__(
        self,
        cluster: Cluster,
        batch: Batch,
        mini_batches: Sequence[np.ndarray] | None = None,
        keeps_groups: bool = False,
    ):
        self.shape: tuple[int, int] = batch["input_ids"].shape
        self._cluster = cluster
        self._batch = batch
        self._mini_batches = [np.arange(self.shape[0])] if mini_batches is None else mini_batches
        self._keeps_groups = keeps_groups
        self._stored: dict[tuple[Limits, int], list[Any]] = {}

    def shares(self, indices: Sequence[int], limits: Limits) -> list[Any]:
        """Return a reference to the share of each rank. Ranks of the same index in `indices` get the same share."""
        key = limits, max(indices) + 1
        if key not in self._stored:
            shares = divide(self._batch, self._mini_batches, *key, self._keeps_groups)
            self._stored[key] = [self._cluster.put(share) for share in shares]
        return [self._stored[key][index] for index in indices]


class TrainWorkers:
    """Policy, critic and reference over their rank actors, each of which hosts all roles."""

    def __init__(self, cfg: Config, cluster: Cluster):
        self.cfg = cfg
        self.cluster = cluster
        self.roles = {spec.name: spec for spec in cfg.roles}
        self.saved_roles = [spec.name for spec in cfg.roles if spec.saved]
        self._group: WorkerGroup | None = None
        self._known_limits: dict[str, tuple[list[int], Limits]] = {}
        self.accepted: list[str] = []
        """What models compute otherwise than their own classes, accepted by `model.check=accept`."""
        self.launch()

    def launch(self) -> None:
        """Begin to start the processes. What `begin` returns waits for them."""
        self._known_limits.clear()
        env = rank_environment(self.cluster.device, os.environ, self.cfg.trainer.deterministic)
        count = self.cluster.count_ranks()
        name = "rank" if len(self.roles) > 1 else "policy rank"
        self._group = self.cluster.launch_ranks(name, functools.partial(_build_rank, self.cfg), env, count)

    @property
    def policy(self) -> WorkerGroup:
        """The ranks, each of which hosts the policy and all other roles."""
        assert self._group is not None
        return self._group

    @property
    def count(self) -> int:
        return len(self.policy)

    @property
    def description(self) -> dict[str, Any]:
        """What the manifest of a checkpoint says of the ranks that wrote it."""
        t = self.cfg.trainer
        axes = axis_sizes(t, self.count)
        accepted = {"accepted": self.accepted} if self.accepted else {}
        return {"roles": self.saved_roles, "ranks": self.count, "replicas": t.dp_replicate, "axes": axes, **accepted}

    def begin(self, model_path: str, restores: bool = False) -> Callable[[], None]:
        """Begin to form the process groups and to load the initial weights; what this returns waits for both.
        `restores`: `load` follows for each saved role (see `Rank.build`)."""
        connected = self.policy.start("connect", self.cluster.rendezvous_address(self.policy))
        paths = {name: spec.path and resolve_model_path(spec.path, spec.path_key) for name, spec in self.roles.items()}
        specs = [dataclasses.replace(spec, path=paths[name]) for name, spec in self.roles.items()]
        built = self.policy.start("build", specs, model_path, restores)

        def wait() -> None:
            connected.result()
            found = built.result()[0]
            if not restores:  # else what the first ranks have found stands
                self.accepted = _accepted(found)
            for role, spec in self.roles.items():
                if spec.optimizer is not None and spec.optimizer.name != "adamw":
                    for name, parameters in json.loads(self.call_one(role, "sharding"))["optimizers"].items():
                        LOG.info("%s: %s trains %s", role, name, ", ".join(parameters))

        return wait

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call `method` of the worker of `role` on all its ranks; returns the answer of rank 0."""
        return self.policy.call("call", role, method, *args, **kwargs)[0]

    def call_one(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call `method`, which is no collective, on rank 0 alone."""
        return self.policy.call_one(0, "call", role, method, *args, **kwargs)

    def start(self, role: str, method: str, *args: Any, **kwargs: Any) -> CallFutures:
        """Begin `method` on all ranks of `role`; `result()` waits for it."""
        return self.policy.start("call", role, method, *args, **kwargs)

    def compute(self, role: str, output: str, batch: StoredBatch) -> np.ndarray:
        """Return the `output` `(B, T)` of a role for a batch: `logprobs`, `values` or `is_likeliest`."""
        return _assemble(self._call_shares(role, output, batch), batch.shape)

    def evaluate(self, batch: StoredBatch, totals: Any, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the objective's loss and metrics of the policy over a batch (see `TrainedWorker.evaluate`)."""
        return self._call_shares("policy", "evaluate", batch, totals, numbers)[0]

    def update(
        self, role: str, batch: StoredBatch, step: int, totals: Sequence[Any], numbers: Mapping[str, float]
    ) -> tuple[dict[str, float], np.ndarray | None, np.ndarray | None, int]:
        """Make all optimizer steps of a role on a batch (see `TrainedWorker.update`).

        Returns:
            the metrics; the old log-probs `(B, T)` that the ranks computed, 0 in rows that had some (None: they
            computed none); if the rollouts of the step are kept, the entropy of the tokens `(B, T)`, 0 in rows that
            were not trained on (None: not computed); and the number of tokens that the ranks computed.
        """
        updates = self._call_shares(role, "update", batch, step, totals, numbers)
        shape = batch.shape
        parts = [(update.rows, update.logprobs) for update in updates]
        logprobs = _assemble(parts, shape) if any(len(rows) for rows, _ in parts) else None
        entropies = [update.entropy for update in updates if update.entropy is not None and len(update.entropy[0])]
        entropy = _assemble(entropies, shape) if entropies else None
        return updates[0].metrics, logprobs, entropy, sum(update.tokens for update in updates)

    def _call_shares(self, role: str, method: str, batch: StoredBatch, *args: Any) -> list[Any]:
        """Call `method` of a role on all its ranks, each with its share of a batch; return their answers."""
        shares = batch.shares(*self._limits(role))
        return self.policy.call_each("call", [(role, method, share, *args) for share in shares])

    def _limits(self, role: str) -> tuple[list[int], Limits]:
        if role not in self._known_limits:
            answers = self.policy.call("call", role, "limits")
            self._known_limits[role] = [index for index, _ in answers], answers[0][1]
        return self._known_limits[role]

    def check_shared(self, dtype: str) -> None:
        """Raise a `UserError` if `share_weights` will have too little shared memory."""
        self.call_one("policy", "check_shared", dtype, self.cluster.object_store_bytes)

    def share_weights(self, dtype: str) -> tuple[str, int]:
        """Write the policy's weights to a new directory in rank 0's shared memory.

        Returns:
            the path of the directory, and the total of the `WeightsDigest` of the weights.
        """
        directory = self.call_one("policy", "open_shared", dtype, self.cluster.object_store_bytes)
        parts = self.policy.call("call", "policy", "write_shared", directory, dtype)
        return directory, sum(parts)

    def drop_shared(self) -> None:
        self.call_one("policy", "close_shared")

    def begin_save(self, files: Any) -> Callable[[], list[dict]]:
        """Begin to write the roles that have a state of their own through `files` (`ShardedFiles`). What this returns,
        called on any thread, waits for it and returns the files of all ranks."""
        self.policy.call("begin_save", self.saved_roles, files)
        pending = self.policy.start_background("finish_save")
        return lambda: [entry for entries in pending.result() for entry in entries]

    def ask(self, numbers: Collection[int] | None, value: Any, method: str, *args: Any) -> dict[int, Any]:
        """Call `method` of a copy of `value` in these rank processes (None: in all), while they do other things; return
        the answers by the number of the process. Any thread may ask. Raises OSError: the ranks have ended."""
        if self._group is None:
            raise OSError("the ranks have ended")
        workers = [i for i in range(len(self._group)) if numbers is None or i in numbers]
        calls = self._group.start_background("ask", value, method, *args, workers=workers)
        return dict(zip(workers, calls.result(), strict=True))

    def load(self, role: str, files: Any, kinds: Collection[str], steps_added: int = 0) -> None:
        """Restore the state of `role`, and move its learning rate schedule on by `steps_added` optimizer steps."""
        moved = {"steps_added": steps_added} if steps_added else {}  # a reference has no schedule
        self.call(role, "load", files, kinds, **moved)

    def release_memory(self, needed: int = 0, colocated: Sequence[int] = ()) -> None:
        """Let every rank give unused GPU memory back (see `Rank.release_memory`)."""
        self.policy.call("release_memory", needed, tuple(colocated))

    def pop_stall_seconds(self) -> float:
        """Seconds that the slowest rank has waited for a save since this was last asked."""
        return max(self.policy.call("pop_stall_seconds"))

    def peak_flops(self) -> float | None:
        """FLOP/s of the policy's ranks together, by the data sheet of their GPU. None: there is none."""
        known = peak_flops(self.policy.call_one(0, "device_name"))
        return None if known is None else known * self.count

    @functools.cached_property
    def num_parameters(self) -> tuple[int, int]:
        """Parameters of the policy, and how many of them are trained."""
        return self.call_one("policy", "num_parameters")

    @functools.cached_property
    def relative_sizes(self) -> dict[str, float]:
        """The number of parameters of each role, divided by that of the policy. It is 1 if the role has no path."""
        others = {role: self.call_one(role, "num_parameters")[0] for role, spec in self.roles.items() if spec.path}
        return dict.fromkeys(self.roles, 1.0) | {role: size / self.num_parameters[0] for role, size in others.items()}

    def size(self) -> str:
        total, trained = self.num_parameters
        adapters = f" ({trained:,} of them adapters)" if trained < total else ""
        return f"{total:,} parameters{adapters}, {self.count} rank(s)"

    def release(self) -> None:
        """End the processes, and release their CPUs and GPUs. `launch` starts new ones."""
        group, self._group = self._group, None
        if group is not None:
            self.cluster.release(group)


def _assemble(parts: list[tuple[np.ndarray, np.ndarray]], shape: tuple[int, int]) -> np.ndarray:
    out = np.zeros(shape, dtype=np.float32)
    for rows, values in parts:
        out[rows, : values.shape[1]] = values
    return out


def _accepted(found: Mapping[str, tuple[str | None, list[str]]]) -> list[str]:
    """Say what the ranks have found of their models (see `Rank.build`), and return what the config accepts."""
    for model, (_, not_compared) in found.items():
        if not_compared:
            LOG.info("%s: not compared with its own class: %s", model, ", ".join(not_compared))
    accepted = [f"{model}: {problem}" for model, (problem, _) in found.items() if problem]
    for sentence in accepted:
        LOG.warning("%s; model.check=accept trains it nevertheless", sentence)
    return accepted
