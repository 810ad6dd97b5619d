"""A critic: the value of each state, the names of its weights. `test_attention.py` compares architectures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.architectures import ARCHITECTURES, VOCABULARY, random_model
from tests.support.tables import table
from trainer.models.attention import set_attention
from trainer.models.loading import CriticModel
from trainer.parallel.packing import Packing

LENGTHS = [4, 1, 6]


@pytest.fixture(scope="module")
def model():
    model = random_model(ARCHITECTURES["qwen3"], "sdpa")
    set_attention(model)
    return model


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(2, VOCABULARY, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))


def critic_of(model, is_score: bool = False) -> CriticModel:
    critic = CriticModel(model.base_model, model.base_model_prefix, is_score)
    critic.value_head.weight.data = torch.linspace(-1, 1, critic.config.hidden_size)[None]
    return critic


@torch.no_grad()
@table("is_score", [False, True])
def test_a_value_is_that_before_its_token_and_a_score_that_after_it(model, ids, is_score):
    critic = critic_of(model, is_score)
    found = critic(ids, Packing(LENGTHS, "cpu"))
    assert found.shape == (3, 6) and found.dtype == torch.float32
    start = 0
    for row, length in enumerate(LENGTHS):
        hidden = random_model(ARCHITECTURES["qwen3"], "eager").base_model(ids[:, start : start + length])
        states = critic.value_head(hidden.last_hidden_state)[0, :, 0]
        expected = states if is_score else torch.cat([torch.zeros(1), states[:-1]])
        torch.testing.assert_close(found[row, :length], expected, atol=1e-5, rtol=1e-5)
        assert not found[row, length:].any(), "padding has no value"
        start += length


def test_weights_have_the_names_of_the_language_model_s_files(model):
    """So that a critic can be filled from them; only the head is its own."""
    critic = critic_of(model)
    theirs = {name for name, _ in model.named_parameters() if name != "lm_head.weight"}
    assert {name for name, _ in critic.named_parameters()} == theirs | {"value_head.weight"}
    assert critic.config is model.config
    assert critic.value_head.bias is None and critic.value_head.weight.shape == (1, 32)
