"""Engines of both kinds, each kind built once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import plain_engine
from tests.support.engines import RemoteEngine, start_vllm, vllm_launcher
from tests.support.generation import ROLLOUT
from tests.support.plain_engine import PlainRank, PlainRanks
from tests.support.plain_pool import StartPool
from trainer.cluster.fork_server import ForkServer
from trainer.cluster.process_cluster import ProcessCluster
from trainer.config import Config, LoraConfig, RolloutConfig
from trainer.config.engines import ENGINES, EngineSpec
from trainer.generation.engine_pool import EnginePool
from trainer.generation.transformers_engine import TransformersEngine
from trainer.generation.weight_sync import SharedMemory
from trainer.models.tiny import TinyShape, build_tiny
from trainer.process import time_limits
from trainer.process.failures import INCIDENTS


@pytest.fixture(scope="session")
def model_paths(tmp_path_factory) -> dict[bool, str]:
    """Model directories by whether the output head is tied to the embedding."""
    paths = {tied: str(tmp_path_factory.mktemp("model")) for tied in (True, False)}
    for tied, path in paths.items():
        build_tiny(TinyShape(tie_word_embeddings=tied, seed=5), path)
        # Random weights predict nearly the same everywhere; larger ones have an opinion to sample from.
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3)
        model.save_pretrained(path)
    return paths


@pytest.fixture(scope="session")
def launcher() -> Iterator[ForkServer]:
    with vllm_launcher() as launcher:
        yield launcher


@pytest.fixture
def cluster(launcher) -> Iterator[ProcessCluster]:
    """Starts engines of vLLM, one at a time, which end with the test."""
    with ProcessCluster(Config(), "cpu", launcher) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def vllm_engine(launcher, model_paths) -> Iterator[RemoteEngine]:
    with ProcessCluster(Config(), "cpu", launcher) as cluster:
        yield start_vllm(cluster, model_paths[True])


@pytest.fixture(params=[pytest.param("vllm", marks=pytest.mark.processes), "transformers"])
def engine(request, model_paths):
    """An engine of each kind with the tied model's initial weights, as version 0."""
    if request.param == "transformers":
        return TransformersEngine(model_paths[True], dtype="auto", seed=1, rollout=ROLLOUT, device="cpu")
    engine = request.getfixturevalue("vllm_engine")
    engine.sync_weights(SharedMemory(model_paths[True]), 0)
    return engine


@pytest.fixture(scope="session")
def plain_launcher() -> Iterator[ForkServer]:
    with ForkServer([plain_engine.__name__]) as launcher:
        yield launcher


@pytest.fixture
def start(plain_launcher, tmp_path, monkeypatch) -> Iterator[StartPool]:
    """Starts a pool of plain engines and the ranks of their policy."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setitem(ENGINES, "plain", plain_engine.SPEC)
    monkeypatch.setitem(ENGINES, "missing", EngineSpec("no_such_module:Engine", ("shared_memory", "broadcast")))
    with ExitStack() as clusters:

        def start(
            device: str = "cpu",
            lora: bool = False,
            max_restarts: int = 0,
            waits: bool = True,
            num_workers: int = 1,
            deterministic: bool = False,
            keeps_weights: bool = False,
            **rollout,
        ) -> tuple[EnginePool, PlainRanks]:
            cfg = Config(rollout=RolloutConfig(**{"engine": "plain", **rollout}))
            cfg.trainer.num_workers, cfg.trainer.deterministic = num_workers, deterministic
            cfg.trainer.max_restarts = max_restarts
            monkeypatch.setattr(time_limits, "HEARTBEAT_S", 3.0 if max_restarts else 300.0)
            if lora:
                cfg.trainer.policy.lora = dataclasses.replace(LoraConfig(), rank=4)
            cluster = clusters.enter_context(ProcessCluster(cfg, device, plain_launcher))
            ranks = PlainRanks(cluster.launch_ranks("rank", functools.partial(PlainRank, str(tmp_path)), {}))
            pool = EnginePool(cfg, cluster, ranks, str(tmp_path), keeps_weights)
            if waits:
                pool.wait_ready()
            return pool, ranks

        yield start


@pytest.fixture
def incidents(tmp_path) -> Iterator[Path]:
    """The directory of a run whose incidents are recorded."""
    INCIDENTS.open(str(tmp_path))
    yield tmp_path
    INCIDENTS.close()
