"""Weights of another model are found before any of them is loaded."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.generation.weight_sync import refused_weights, weights_of


def model(tied: bool = True, width: int = 16) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=32, hidden_size=width, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def offered(tmp_path, change=lambda tensors: None, **options) -> str:
    tensors = {name: tensor.clone() for name, tensor in model(**options).named_parameters()}
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return str(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_the_model_are_taken_with_the_tied_head_once(tmp_path, tied):
    with torch.device("meta"):
        expected = weights_of(model(tied), torch.float32)
    assert refused_weights(offered(tmp_path, tied=tied), expected) is None


def test_other_weights_are_refused_by_name(tmp_path):
    expected = weights_of(model(), torch.float32)

    def refusal(change=lambda tensors: None, **options) -> str:
        return refused_weights(offered(tmp_path, change, **options), expected)

    assert "no weight lm_head.weight" not in str(refusal())
    shapes = "model.embed_tokens.weight has the shape [32, 16] there, and [32, 8] in this job"
    assert refusal(width=8) == f"serves another model: {shapes}"
    assert "this job has no weight model.norm.weight" in refusal(lambda t: t.pop("model.norm.weight"))
    assert "it has no weight extra" in refusal(lambda t: t.update(extra=torch.zeros(1)))
    extra = {"model.norm.weight": torch.zeros(16)}
    save_file(extra, tmp_path / "more.safetensors")
    assert refusal() == "gets model.norm.weight twice from this job"
    (tmp_path / "more.safetensors").write_bytes(b"cut")
    assert refusal().startswith("cannot read the weights of this job (more.safetensors: ")
    (tmp_path / "more.safetensors").unlink()
    half = refusal(lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items()}))
    assert half == "computes in float32 and gets weights in bfloat16; set rollout.dtype of both to one"
