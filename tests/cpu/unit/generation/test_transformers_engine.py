"""The engine on transformers' `generate`."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from tests.support.generation import ROLLOUT
from trainer.config import TinyConfig
from trainer.generation.transformers_engine import TransformersEngine
from trainer.generation.weight_sync import SharedMemory


def test_weights_that_lack_a_tensor_are_refused(model_paths, tmp_path):
    engine = TransformersEngine(model_paths[False], dtype="auto", seed=1, rollout=ROLLOUT, device="cpu")
    save_file({"lm_head.weight": torch.zeros(320, TinyConfig().hidden_size)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no new values for 2. weights, model.embed_tokens.weight among them"):
        engine.sync_weights(SharedMemory(str(tmp_path)), 1)


def test_weights_of_another_model_are_refused(model_paths, tmp_path):
    engine = TransformersEngine(model_paths[False], dtype="auto", seed=1, rollout=ROLLOUT, device="cpu")
    save_file({"lm_head.bias": torch.zeros(320)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="the engine's model has no weight lm_head.bias"):
        engine.sync_weights(SharedMemory(str(tmp_path)), 1)
