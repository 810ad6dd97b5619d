"""Compares the architectures of two models beyond the shapes of their weights, such as the base of their rotations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer.config.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_WITHOUT_EFFECT = {
    *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict", "problem_type"),
    *("id2label", "label2id", "output_attentions", "output_hidden_states", "chunk_size_feed_forward"),
}
"""Values that decide nothing of what a model computes from given weights."""
_WITHOUT_EFFECT_PARTS = ("_token_id", "dropout", "initializer", "loss_coef")


def describe_model(model: ModelConfig, path: str, longest: int) -> dict[str, Any]:
    """Return `describe_architecture` of the model at `path`, for sequences of up to `longest` tokens."""
    from trainer.models.files import fit_rotations, load_config

    config = load_config(model, path)
    fit_rotations(config, longest, f"model.path={path}")
    return describe_architecture(config)


def describe_architecture(config: PretrainedConfig) -> dict[str, Any]:
    """Return the values that decide what a model computes from its weights, by name (`rope_parameters.rope_theta`)."""
    return dict(_flat(json.loads(config.to_json_string(use_diff=False))))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if name in _WITHOUT_EFFECT or name.startswith("_") or any(part in name for part in _WITHOUT_EFFECT_PARTS):
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def find_difference(served: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Return how the model of a job differs from the one that a server serves; None: it does not.

    Versions of transformers differ in the names that they know, so only names that both have are compared.
    """
    for name in sorted(served.keys() & wanted.keys()):
        if served[name] != wanted[name]:
            return f"serves another model: {name} is {served[name]!r} there, and {wanted[name]!r} in this job"
    return None
