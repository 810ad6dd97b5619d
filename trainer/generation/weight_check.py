"""Checks that a job and an inference server have one model: its architecture, and offered weights before a load."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from trainer.config.model import ModelConfig
from trainer.errors import one_line
from trainer.models.weight_names import file_tensors, file_units

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


class Expected(NamedTuple):
    """What a tensor in the files of a model must be."""

    identity: int
    """Tied tensors have one."""
    shape: tuple[int, ...]
    dtype: torch.dtype


def weights_of(model: nn.Module, dtype: torch.dtype) -> dict[str, Expected]:
    """Return the tensors in the files of a Hugging Face model that computes in `dtype`, by name."""
    weights, found = model.state_dict(keep_vars=True), {}
    for unit in file_units(model, weights):
        for number, (name, tensor) in enumerate(file_tensors([unit], weights, dtype).items()):
            identity = hash((number, *(id(weights[one]) for one in unit.names)))
            found[name] = Expected(identity, tuple(tensor.shape), tensor.dtype)
    return found


def refused_weights(directory: str, expected: Mapping[str, Expected]) -> str | None:
    """Return why the safetensors files in `directory` are no weights for the model; None: they are.

    Args:
        expected: `weights_of` the model.
    """
    offered: set[str] = set()
    for path in sorted(glob.glob(os.path.join(directory, "*.safetensors"))):
        try:
            opened = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            return f"cannot read the weights of this job ({os.path.basename(path)}: {one_line(str(error))})"
        with opened as file:
            for name in file.keys():  # noqa: SIM118 - it has no iterator
                piece = file.get_slice(name)
                if name in offered:
                    return f"gets {name} twice from this job"
                if name not in expected:
                    return f"serves another model: it has no weight {name}"
                shape, own = tuple(piece.get_shape()), expected[name].shape
                if shape != own:
                    return (
                        f"serves another model: {name} has the shape {list(own)} there, and {list(shape)} in this job"
                    )
                kind = _DTYPES.get(piece.get_dtype())
                if kind is not None and kind != expected[name].dtype:
                    names = [str(one).removeprefix("torch.") for one in (expected[name].dtype, kind)]
                    return f"computes in {names[0]} and gets weights in {names[1]}; set rollout.dtype of both to one"
                offered.add(name)
    covered = {expected[name].identity for name in offered}
    missing = sorted(name for name, one in expected.items() if one.identity not in covered)
    return f"serves another model: this job has no weight {missing[0]}" if missing else None


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
