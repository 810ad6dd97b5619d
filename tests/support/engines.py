"""Engines of vLLM in processes of their own, as a job has them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.support.generation import ROLLOUT
from trainer.cluster.fork_server import ForkServer
from trainer.cluster.process_cluster import ProcessCluster
from trainer.cluster.worker_groups import WorkerGroup
from trainer.config import RolloutConfig
from trainer.config.engines import ENGINES
from trainer.generation.vllm_engine import VLLMEngine

ENVIRONMENT = ENGINES["vllm"].environment_on("cpu")
_MODULES = (
    "trainer.workers.rank",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "tests.support.vllm_registry",
)


def vllm_launcher() -> ForkServer:
    """Start processes that have imported vLLM, in an engine's environment: an engine is there two seconds later.

    The tests' own process never imports it: there it would join a process group and change how torch sets its threads.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        return ForkServer(_MODULES)


def start_vllm(
    cluster: ProcessCluster, path: str, rollout: RolloutConfig = ROLLOUT, seed: int = 1, **options: Any
) -> RemoteEngine:
    """Begin to start an engine with the model at `path`."""
    factory = functools.partial(AskedEngine, path, dtype="auto", seed=seed, rollout=rollout, device="cpu", **options)
    return RemoteEngine(cluster.launch_engines(factory, [()], ENVIRONMENT))


class AskedEngine(VLLMEngine):
    """Also says whether it serves the adapter in a directory."""

    def serves(self, directory: str) -> bool:
        return all(self._llm.collective_rpc("serves_adapter", args=(1, directory)))


class RemoteEngine:
    """The only engine of `group`; its methods wait for their results."""

    def __init__(self, group: WorkerGroup):
        self._group = group

    def __getattr__(self, method: str) -> Any:
        return functools.partial(self._group.call_one, 0, method)
