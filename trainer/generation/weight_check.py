"""Checks offered weights against a model before any of them is loaded: a load that fails half-way ruins an engine."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from trainer.errors import one_line
from trainer.models.weight_names import file_tensors, file_units

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
