"""Shapes of models that come with the project."""

from __future__ import annotations

import pytest

from trainer.plan.known import known_file, known_models


@pytest.mark.parametrize(
    "path", ["Qwen/Qwen3-8B", "qwen3-8b", "Qwen/Qwen3-8B-Base", "meta-llama/Llama-3.3-70B-Instruct", "org/Qwen3-8B/"]
)
def test_a_model_is_known_by_the_end_of_its_id(path):
    assert known_file(path) is not None


@pytest.mark.parametrize("name", ["Llama-3.1-70B", "Meta-Llama-3.1-70B-Instruct", "Meta-Llama-3-70B"])
def test_a_model_of_the_same_shape_is_known(name):
    assert known_file(f"meta-llama/{name}") == known_file("meta-llama/Llama-3.3-70B")


@pytest.mark.parametrize("path", ["Qwen/Qwen3-9B", "", "Qwen3", "/models/mine"])
def test_other_models_are_not(path):
    assert known_file(path) is None


def test_there_are_shapes_from_half_a_billion_to_seventy():
    assert {"qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-32b", "llama-3.3-70b"} <= set(known_models())
