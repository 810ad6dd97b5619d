"""One rank: a process that holds the shards of some or all roles. It does not need Ray."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch

from trainer.config import LM, SCORE, VALUE, Config, RoleSpec
from trainer.errors import RESTART_HINT, UserError, WorkerError
from trainer.files.shared_memory import clear_abandoned
from trainer.models.files import resolve_model_path
from trainer.models.loading import load_model
from trainer.models.model_check import check_model
from trainer.objectives.base import Objective, make_objective
from trainer.parallel.axes import axis_sizes
from trainer.parallel.mesh import Layout, init_process_group, listen
from trainer.parallel.profiling import TorchProfiler
from trainer.parallel.rng import seed_rng, use_deterministic_kernels
from trainer.parallel.shard import reshard
from trainer.process import time_limits
from trainer.seeding import derive_seed
from trainer.workers.async_saver import AsyncSaver
from trainer.workers.base import SHARDING_FILE, CriticWorker, ModelWorker, TrainedWorker
from trainer.workers.host_memory import HostMemory
from trainer.workers.policy import FrozenWorker, PolicyWorker

_TRAINED: dict[str, type[TrainedWorker]] = {LM: PolicyWorker, VALUE: CriticWorker, SCORE: CriticWorker}
_WITH_OPTIMIZER = ("update", "load")  # methods of workers that need the states of the optimizers
_NEXT_OFFLOAD = {"none": "optimizer", "optimizer": "all"}


class Rank:
    """The workers of one rank, one for each of its roles. The driver calls each method on all ranks at the same time.
    Every method of this class and of the workers is a collective, unless its docstring says "Not a collective"."""

    def __init__(self, cfg: Config, rank: int, world_size: int, device: str):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")) if device == "cpu" else 4)
        if cfg.trainer.deterministic:
            use_deterministic_kernels()
        self.cfg = cfg
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.roles: dict[str, ModelWorker] = {}
        self._empty: set[str] = set()  # roles whose weights `load` has yet to bring
        self.layout: Layout  # since `connect`
        self.saver: AsyncSaver
        self.objective: Objective  # since `build`
        self._host_memory: dict[str, HostMemory] = {}
        self._has_updated = False  # NCCL, kernels and their workspaces have taken their memory
        self._engine_has_fit = False  # beside this rank at its full size
        self._profiler = TorchProfiler(device)

    def find_address(self, host: str) -> str:
        """Reserve a free port of this rank for a store; returns `host:port`. Not a collective."""
        return listen(host)

    def connect(self, address: str, local_rank: int = 0) -> None:
        """Join the process group, whose store is at `address`, and seed this rank's generators, for user code. Ranks
        with the same rows draw the same numbers, because they compute the same loss."""
        if self.device == "cuda":
            torch.cuda.set_device(local_rank)
        init_process_group(self.rank, self.world_size, address, self.device, time_limits.COLLECTIVE_S)
        t = self.cfg.trainer
        self.layout = Layout(self.device, axis_sizes(t, self.world_size))
        self.saver = AsyncSaver(self.device)
        clear_abandoned()  # leftovers of killed runs in this machine's shared memory
        seed_rng(derive_seed(t.seed, "rank", self.layout.dp_rank))

    def build(
        self, roles: Sequence[RoleSpec], model_path: str, restores: bool = False
    ) -> dict[str, tuple[str | None, list[str]]]:
        """Load the initial weights of `roles`, by default those in `model_path`, and compare each model with its own
        class.

        Args:
            restores: `load` follows for each saved role, so those whose checkpoint has all weights get none here.

        Returns:
            by the key and the path of each model: what differs (see `Verdict.problem`), and what was not compared.
        """
        path = resolve_model_path(model_path)
        self.objective = make_objective(self.cfg)
        found: dict[str, tuple[str | None, list[str]]] = {}
        compared: set[str] = set()
        for spec in roles:
            of_role = resolve_model_path(spec.path, spec.path_key) if spec.path else path
            fill = not (restores and spec.saved) or spec.has_adapters
            if spec.is_policy_base:  # the policy without its adapters
                module = self.roles["policy"].module
            else:
                module = load_model(self.cfg, of_role, self.layout, spec, fill)
            self._empty |= set() if fill else {spec.name}
            if fill and of_role not in compared:  # other roles with the same weights have the same backbone
                verdict = check_model(self.cfg, module, of_role, self.layout, spec)
                compared.add(of_role)
                found[f"{spec.path_key}={of_role}"] = verdict.problem, verdict.not_compared
            given = spec, module, self.layout, self.objective, partial(self._before_change, spec.name)
            policy = self.roles["policy"].module if "policy" in self.roles else None
            worker = _TRAINED[spec.head](*given) if spec.trained else FrozenWorker(*given, policy=policy)
            self.roles[spec.name] = worker
            if spec.read_by:
                self.roles[spec.read_by].read(worker)
        return found

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        self._empty -= {role} if method == "load" else set()
        assert role not in self._empty or method in ("sharding", "num_parameters"), f"the {role} has no weights yet"
        needed = {self._holder(role)} | ({"policy"} if method == "sync_from_policy" else set())
        if method == "update":
            needed |= {name for name, worker in self.roles.items() if worker.spec.read_by == role}
        if method in _WITH_OPTIMIZER:  # they take the most memory
            self._offload(set(self.roles) - needed)
        self._onload(needed, optimizer=method in _WITH_OPTIMIZER)
        self._has_updated |= method == "update"
        return getattr(self.roles[role], method)(*args, **kwargs)

    def start_profile(self, directory: str, name: str) -> None:
        """Profile this rank until `stop_profile`, to files of this name and number. Not a collective."""
        self._profiler.start(directory, f"{name}_{self.rank}")

    def stop_profile(self) -> None:
        self._profiler.stop()

    def begin_save(self, roles: list[str], files: Any) -> None:
        """Take a snapshot of the state of `roles`, and write it through `files` on a thread."""
        self._onload([role for role in roles if not self._is_away(role)], optimizer=True)
        workers = {role: self.roles[role] for role in roles}
        self.saver.begin(
            {role: worker.state() for role, worker in workers.items()},
            {role: {SHARDING_FILE: worker.sharding()} for role, worker in workers.items()},
            files,
        )

    def finish_save(self) -> list[dict]:
        """Wait for the save to end; returns the files that this rank wrote. Other methods may run meanwhile."""
        return self.saver.finish()

    def ask(self, value: Any, method: str, *args: Any) -> Any:
        """Call `method` of `value` in this process. Not a collective. Other methods may run meanwhile."""
        return getattr(value, method)(*args)

    def pop_stall_seconds(self) -> float:
        """Return the seconds that optimizer steps have waited for a save since the last call."""
        return self.saver.pop_stall_seconds()

    def release_memory(self, needed: int = 0, colocated: Sequence[int] = ()) -> None:
        """Free GPU memory for engines: move what `trainer.offload` says, and return torch's cached memory. Methods that
        need it bring it back. Not a collective.

        Args:
            needed: bytes that an engine will take of the GPU of each rank in `colocated`. 0: do not check.

        Raises:
            UserError: there will not be so much room beside this rank.
            WorkerError: there is not, but there has been.
        """
        for worker in self.roles.values():
            reshard(worker.module)
        self._offload(self.roles)
        torch.cuda.empty_cache()
        if needed and self.rank in colocated:
            self._check_engine(needed, *torch.cuda.mem_get_info())

    def offloaded_bytes(self, roles: Collection[str], optimizer: bool = True) -> int:
        """Return the bytes of these roles, or without their optimizers', in host memory. Not a collective."""
        return sum(self._host_memory[role].offloaded_bytes(optimizer) for role in roles if role in self._host_memory)

    def _check_engine(self, needed: int, free: int, total: int) -> None:
        trained = [worker for worker in self.roles.values() if isinstance(worker, TrainedWorker)]
        stays = self.cfg.trainer.offload == "none"
        growth = sum(worker.optimizers.growth(self.device) for worker in trained) if stays else 0
        problem = engine_problem(needed, growth, free, total, self.cfg)
        if problem is None:
            self._engine_has_fit |= growth == 0 and self._has_updated
        elif self._engine_has_fit:  # then another program has taken the room
            raise WorkerError(problem, RESTART_HINT, "gpu_memory_in_use")
        else:
            raise UserError(problem)

    def _holder(self, role: str) -> str:
        """Return the role that has the tensors which `role` computes with."""
        return "policy" if self.roles[role].spec.is_policy_base else role

    def _offload(self, roles: Collection[str]) -> None:
        if self.cfg.trainer.offload == "none" or not roles:
            return
        self.saver.wait_until_staged()
        for role in roles:
            worker = self.roles[role]
            if self._holder(role) != role:
                continue
            if role not in self._host_memory:
                # A save holds all that is trained. Frozen weights beside it need memory of their own.
                memory = self.saver.more_memory() if worker.has_frozen_weights else self.saver.memory(role)
                self._host_memory[role] = memory
            weights = worker.weight_tensors() if self.cfg.trainer.offload == "all" else []
            states = worker.optimizers.tensors(self.device) if isinstance(worker, TrainedWorker) else []
            while True:
                try:
                    self._host_memory[role].offload(weights, states)
                    break
                except OSError as error:
                    if self.saver.wait_until_written():  # the memory of its copies is free now
                        continue
                    raise UserError(
                        f"trainer.offload={self.cfg.trainer.offload}: {error}; use a machine with more host memory, or "
                        "offload less"
                    ) from error

    def _is_away(self, role: str) -> bool:
        """Whether host memory has a copy of all that a save of `role` writes, but counters and generators."""
        worker, memory = self.roles[role], self._host_memory.get(role)
        is_whole = not isinstance(worker, TrainedWorker) or worker.optimizers.growth(self.device) == 0
        all_of_it = self.cfg.trainer.offload == "all" and not worker.has_frozen_weights and is_whole
        return all_of_it and memory is not None and memory.offloaded_bytes() > 0

    def _before_change(self, role: str) -> None:
        self.saver.wait_until_staged()
        self.saver.memory(role).forget()
        if role in self._host_memory:
            self._host_memory[role].forget()

    def _onload(self, roles: Collection[str], optimizer: bool) -> None:
        needed = self.offloaded_bytes(roles, optimizer)
        if not needed:
            return
        if self.device == "cuda":
            cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            problem = rank_problem(needed, torch.cuda.mem_get_info()[0] + cached, self.cfg)
            if problem is not None:
                raise WorkerError(problem, RESTART_HINT, "gpu_memory_in_use")
        for role in roles:
            if role in self._host_memory:
                self._host_memory[role].onload(optimizer)

    def device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device == "cuda" else self.device


def engine_problem(needed: int, growth: int, free: int, total: int, cfg: Config) -> str | None:
    """Return why an engine that takes `needed` bytes cannot wake up beside a rank that will take `growth` bytes
    meanwhile, in one sentence; None: it can. `free` and `total` are bytes of the GPU, as the driver counts them for all
    processes."""
    shortage = needed + growth - free
    if shortage <= 0:
        return None
    taken = f", of which the optimizer will take {_gb(growth)}" if growth else ""
    share, offload = cfg.rollout.gpu_memory_utilization, _NEXT_OFFLOAD.get(cfg.trainer.offload)
    lower = math.floor(100 * (share - shortage / total)) / 100
    remedies = [f"lower rollout.gpu_memory_utilization={share:g} to {lower:g} (vLLM)"] if lower > 0 else []
    remedies += [f"set trainer.offload={offload}"] if offload else []
    remedies += ["use more GPUs"]
    return (
        f"rollout.colocate=true: an engine needs {_gb(needed)} of a GPU to wake up, but of {_gb(total)} only "
        f"{_gb(free)} are free beside the rank{taken}; {', or '.join(remedies)}"
    )


def rank_problem(needed: int, free: int, cfg: Config) -> str | None:
    """Return why a rank cannot take back `needed` bytes of which `free` are free, in one sentence; None: it can."""
    if needed <= free:
        return None
    return (
        f"trainer.offload={cfg.trainer.offload}: a rank needs {_gb(needed)} of its GPU for what it has moved to host "
        f"memory, but only {_gb(free)} are free; end other programs on this GPU, or use more GPUs"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
