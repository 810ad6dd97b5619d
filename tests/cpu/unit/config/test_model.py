"""Keys of `model.*`: the shape of the built-in model, and what must fit it."""

from __future__ import annotations

from tests.cpu.unit.config.contradictions import test_contradictions_are_refused_in_one_sentence  # noqa: F401
from tests.support.config import config_of

CONTRADICTIONS = [
    (["model.tiny.hidden_size=100"], "model.tiny.hidden_size=100: must be a multiple of 32"),
    (["sft.max_length=5000"], "sft.max_length=5000: exceeds 4096, the longest sequence of the built-in model"),
    (["rollout.max_response_tokens=4090"], "rollout.max_response_tokens=4090: with .*exceeds 4096"),
    (
        ["+model.chat_template_kwargs={enable-thinking:false}"],
        "model.chat_template_kwargs.*'enable-thinking' is no name",
    ),
]


def test_lengths_are_compared_with_the_built_in_model_alone():
    """The limit of a model at `model.path` is known when it is read."""
    config_of(["model.path=some/model", "sft.max_length=5000", "rollout.max_response_tokens=4090"])
