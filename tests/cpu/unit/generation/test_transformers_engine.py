"""The engine on transformers' `generate`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.architectures import ARCHITECTURES, VOCABULARY, random_model
from tests.support.generation import ROLLOUT, SAMPLED, assert_agrees, make_requests, tokens_of, with_sampling
from trainer.errors import UserError
from trainer.generation.transformers_engine import TransformersEngine
from trainer.generation.weight_sync import SharedMemory
from trainer.models.tiny import TinyShape, build_tiny


def test_weights_that_lack_a_tensor_are_refused(model_paths, tmp_path):
    engine = TransformersEngine(model_paths[False], dtype="auto", seed=1, rollout=ROLLOUT, device="cpu")
    save_file({"lm_head.weight": torch.zeros(320, TinyShape().hidden_size)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no new values for 2. weights, model.embed_tokens.weight among them"):
        engine.sync_weights(SharedMemory(str(tmp_path)), 1)


def test_a_model_whose_files_lack_a_weight_is_refused(tmp_path):
    """transformers would give it random values, and only log that."""
    build_tiny(TinyShape(num_layers=1, seed=5), str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"^{tmp_path}: its files lack the weight model.norm.weight$"):
        TransformersEngine(str(tmp_path), dtype="auto", seed=1, rollout=ROLLOUT, device="cpu")


def test_weights_of_another_model_are_refused(model_paths, tmp_path):
    engine = TransformersEngine(model_paths[False], dtype="auto", seed=1, rollout=ROLLOUT, device="cpu")
    save_file({"lm_head.bias": torch.zeros(320)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="the engine's model has no weight lm_head.bias"):
        engine.sync_weights(SharedMemory(str(tmp_path)), 1)


@pytest.mark.parametrize("name, attention", [("gemma2", "eager"), ("gemma3", "sdpa"), ("qwen3", "sdpa")])
def test_attention_is_what_the_model_defines(tmp_path, name, attention):
    """transformers' default ignores a soft cap."""
    model = random_model(ARCHITECTURES[name], "eager").eval()
    model.save_pretrained(tmp_path)
    engine = TransformersEngine(str(tmp_path), dtype="auto", seed=1, rollout=ROLLOUT, device="cpu")
    assert engine._model.config._attn_implementation == attention
    requests = [
        dataclasses.replace(request, prompt_token_ids=[int(token) % VOCABULARY for token in request.prompt_token_ids])
        for request in with_sampling(make_requests(6), SAMPLED)
    ]
    assert_agrees(model, requests, engine.generate(requests), SAMPLED.temperature)


def test_rows_that_have_ended_are_not_computed_any_longer(model_paths, monkeypatch):
    engine = TransformersEngine(model_paths[True], dtype="auto", seed=1, rollout=ROLLOUT, device="cpu")
    requests = make_requests(16)
    free = dataclasses.replace(SAMPLED, max_tokens=40)
    whole = engine.generate(with_sampling(requests, free))
    stops = tuple(sorted({int(token) for one in whole[:6] for token in one.token_ids[3:5]}))
    ends = [next((i + 1 for i, token in enumerate(one.token_ids) if token in stops), 40) for one in whole]
    assert len(set(ends)) > 4 and max(ends) == 40, "the rows end at many places, and some do not"

    computed = 0
    forward = engine._model.forward

    def counted(*args, **kwargs):
        nonlocal computed
        computed += len(kwargs["input_ids"])
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine._model, "forward", counted)
    cut = engine.generate(with_sampling(requests, dataclasses.replace(free, stop_token_ids=stops)))
    assert tokens_of(cut) == [one.token_ids[:end].tolist() for one, end in zip(whole, ends, strict=True)]
    for a, b, end in zip(whole, cut, ends, strict=True):
        np.testing.assert_allclose(b.logprobs, a.logprobs[:end], atol=1e-5)
    assert computed <= 2 * sum(ends) < 40 * len(requests)
