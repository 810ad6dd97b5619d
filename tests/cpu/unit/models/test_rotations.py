"""The longest sequence of a run decides the positions of a model, and no batch does."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig, Phi3Config, PretrainedConfig

from tests.support.architectures import SHAPE, random_model
from tests.support.tables import table
from trainer.errors import UserError
from trainer.models.files import check_position_table, fit_rotations

LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0], "short_mscale": 1.0, "long_mscale": 1.5,
}  # fmt: skip


def long_rotations() -> PretrainedConfig:
    return Phi3Config(**SHAPE, original_max_position_embeddings=16, rope_parameters=copy.deepcopy(LONG))


def dynamic(positions: int) -> PretrainedConfig:
    rotations = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return LlamaConfig(**SHAPE | {"max_position_embeddings": positions}, rope_parameters=rotations)


@torch.no_grad()
@table("longest", [16, 17])
def test_a_sequence_has_one_log_prob_beside_any_other(longest):
    """With the factors of the longest sequence of the run, whether the batch has it or not."""
    plain, config = random_model(long_rotations(), "eager").eval(), long_rotations()
    fit_rotations(config, longest, "model.path")
    model = random_model(config, "eager").eval()
    ids = torch.arange(2, 2 + longest)[None] % 48
    alone, whole = model(ids[:, :9]).logits, model(ids).logits
    torch.testing.assert_close(alone, whole[:, :9], atol=1e-4, rtol=0)
    changes = longest > 16
    assert torch.equal(plain(ids[:, :9]).logits, alone) != changes
    torch.testing.assert_close(plain(ids).logits, whole, atol=1e-4, rtol=0)
    rotations = config.rope_parameters
    assert (rotations["short_factor"] == rotations["long_factor"]) == changes
    assert rotations["short_mscale"] == (1.5 if changes else 1.0)


def test_rotations_of_each_type_of_layers_are_fitted():
    config = long_rotations()
    config.rope_parameters = {"full_attention": copy.deepcopy(LONG), "sliding_attention": {"rope_type": "default"}}
    fit_rotations(config, 17, "model.path")
    assert config.rope_parameters["full_attention"]["short_factor"] == LONG["long_factor"]


def test_dynamic_rotations_are_refused_only_where_they_depend_on_the_batch():
    fit_rotations(dynamic(32), 32, "model.path=m")
    sentence = r"^model.path=m: its rotations are dynamic, .* beyond 32 tokens .* sequences of up to 33; lower rollout"
    with pytest.raises(UserError, match=sentence):
        fit_rotations(dynamic(32), 33, "model.path=m")


@table("config", [
        GPT2Config(vocab_size=48, n_embd=32, n_layer=1, n_head=2, n_positions=20),
        OPTConfig(vocab_size=48, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2,
                  max_position_embeddings=20, word_embed_proj_dim=32),
    ])  # fmt: skip
def test_a_table_of_positions_ends_before_the_longest_sequence(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    check_position_table(model, 20, "model.path=m")
    with pytest.raises(UserError, match=r"^model.path=m: has a table of 20 positions, and .* up to 21 tokens; lower"):
        check_position_table(model, 21, "model.path=m")
    with torch.device("meta"):
        without = AutoModelForCausalLM.from_config(dynamic(20))
    check_position_table(without, 21, "model.path=m")
