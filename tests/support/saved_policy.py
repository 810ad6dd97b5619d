"""A checkpoint of a policy that is in memory, as exports without ranks read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata


class SavedPolicy:
    """A checkpoint, as `export` reads it, with these weights and this config.json."""

    path = "run/checkpoints/global_step_3"
    entries = ("policy/huggingface/config.json",)

    def __init__(self, weights: Mapping[str, Tensor], config: dict[str, Any]):
        self._tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
        self._config = config

    def read(self, path: str) -> bytes:
        return json.dumps(self._config).encode()

    def json(self, path: str, shape: dict) -> dict[str, Any]:
        return self._config if path.endswith("huggingface/config.json") else {}

    def shapes(self, role: str) -> dict[str, Any]:
        return {
            name: TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.size(), [])
            for name, tensor in self._tensors.items()
        }

    def tensors(self, role: str, names: list[str]) -> dict[str, Tensor]:
        return {name: self._tensors[name] for name in names}
