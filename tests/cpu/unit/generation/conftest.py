"""Engines of both kinds, each kind built once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.engines import RemoteEngine, start_vllm, vllm_launcher
from tests.support.generation import ROLLOUT
from trainer.cluster.fork_server import ForkServer
from trainer.cluster.process_cluster import ProcessCluster
from trainer.config import Config, TinyConfig
from trainer.generation.transformers_engine import TransformersEngine
from trainer.generation.weight_sync import SharedMemory
from trainer.models.tiny import build_tiny


@pytest.fixture(scope="session")
def model_paths(tmp_path_factory) -> dict[bool, str]:
    """Model directories by whether the output head is tied to the embedding."""
    paths = {tied: str(tmp_path_factory.mktemp("model")) for tied in (True, False)}
    for tied, path in paths.items():
        build_tiny(TinyConfig(tie_word_embeddings=tied, seed=5), path)
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


@pytest.fixture(params=["vllm", "transformers"])
def engine(request, model_paths):
    """An engine of each kind with the tied model's start weights, as version 0."""
    if request.param == "transformers":
        return TransformersEngine(model_paths[True], dtype="auto", seed=1, rollout=ROLLOUT, device="cpu")
    engine = request.getfixturevalue("vllm_engine")
    engine.sync_weights(SharedMemory(model_paths[True]), 0)
    return engine
