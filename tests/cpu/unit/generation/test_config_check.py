"""Models whose weights have equal shapes can compute different things."""

from __future__ import annotations

import pytest
from transformers import Qwen3Config

from trainer.generation.server_protocol import describe_architecture
from trainer.inference.gateway import find_difference

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "head_dim": 8}


def config(**values) -> Qwen3Config:
    return Qwen3Config(**{**SIZES, **values})


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_parameters.rope_theta is 10000.0 there",
        ),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-06 there, and 1e-05 in this job"),
        ({"hidden_act": "gelu"}, "hidden_act is 'silu' there, and 'gelu' in this job"),
    ],
)
def test_what_a_model_computes_is_compared(values, sentence):
    served, wanted = describe_architecture(config()), describe_architecture(config(**values))
    found = find_difference(served, wanted)
    assert found is not None and found.startswith(f"serves another model: {sentence}")


def test_what_decides_nothing_is_not_compared():
    names = {"attention_dropout": 0.5, "eos_token_id": 3, "use_cache": False, "initializer_range": 0.5}
    other = config(**names, dtype="bfloat16", architectures=["A"], name_or_path="elsewhere")
    assert find_difference(describe_architecture(config()), describe_architecture(other)) is None
    assert find_difference({"a": 1, "b": 2}, {"a": 1, "c": 3}) is None
