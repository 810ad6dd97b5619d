"""The inference engines that `rollout.engine` can name, and what each can do.

Whatever depends on the engine asks this table, so that a new engine is one more entry here and one module.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    engine_args: bool = False
    """It takes `rollout.engine_args`."""


ENGINES: dict[str, EngineSpec] = {
    "vllm": EngineSpec(
        path="trainer.generation.vllm_engine:VLLMEngine",
        transports=("shared_memory", "broadcast"),
        max_lora_rank=512,
        tensor_parallel=True,
        engine_args=True,
    ),
    "transformers": EngineSpec(path="trainer.generation.transformers_engine:TransformersEngine"),
}


def engines_with(feature: str) -> str:
    """Names of the engines that have a feature of `EngineSpec`, for messages."""
    return " or ".join(name for name, spec in ENGINES.items() if getattr(spec, feature))
