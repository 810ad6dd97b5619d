"""How many tokens a model reads, and episodes that are longer."""

from __future__ import annotations

import pytest
from transformers import BloomConfig, Gemma3TextConfig, PretrainedConfig, Qwen3Config

from tests.support.architectures import SHAPE
from tests.support.runs import configured
from tests.support.tables import table
from trainer.config import EnvironmentConfig
from trainer.errors import UserError
from trainer.models.checks import check_longest_sequence, positions_of

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


@table(
    "config, positions",
    [
        (Qwen3Config(max_position_embeddings=64), 64),
        (Qwen3Config(max_position_embeddings=64, rope_parameters=YARN), None),
        (
            Gemma3TextConfig(
                max_position_embeddings=64,
                rope_parameters={
                    "sliding_attention": PLAIN,
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                },
            ),
            None,
        ),
        (BloomConfig(), None),
    ],
)
def test_the_positions_of_a_model(config: PretrainedConfig, positions):
    assert positions_of(config) == positions


def test_a_sequence_may_have_as_many_tokens_as_the_model_reads(tmp_path):
    path = str(tmp_path / "model")
    Qwen3Config(**SHAPE | {"max_position_embeddings": 64}).save_pretrained(path)
    cfg = configured(tmp_path / "run", {"model.path": path})
    cfg.rollout.max_prompt_tokens, cfg.rollout.max_response_tokens = 40, 25
    sentence = (
        r"^rollout.max_response_tokens=25: model.path=.* reads at most 64 tokens \(max_position_embeddings\), prompt "
        r"\(rollout.max_prompt_tokens=40\) and reply together; lower it$"
    )
    with pytest.raises(UserError, match=sentence):
        check_longest_sequence(cfg, path)
    cfg.rollout.max_response_tokens = 24
    check_longest_sequence(cfg, path)
    cfg.environment = EnvironmentConfig(name="a:B", max_tokens=64)
    check_longest_sequence(cfg, path)
    cfg.environment.max_tokens = 65
    sentence = (
        r"^environment.max_tokens=65: model.path=.* reads at most 64 tokens \(max_position_embeddings\); lower it$"
    )
    with pytest.raises(UserError, match=sentence):
        check_longest_sequence(cfg, path)
