"""Weights that no rank trains: engines load them from a model directory. In place of the ranks of a policy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.files.shared_memory import PrivateDirectory
from trainer.models.weight_files import weight_files

if TYPE_CHECKING:
    from trainer.cluster.worker_groups import CallFutures, WorkerGroup

_PREFIX = ".weights-"


class FixedWeights:
    """The weights in a directory, as `trainer.generation.transport.PolicyRanks`. They never change.

    An engine that starts with the weights of its model path needs nothing more. An inference server, which is older
    than the job, gets a copy of the weight files; an engine that serves adapters gets these.

    Args:
        path: a Hugging Face model directory, on a disk that all nodes see.
        scratch: directory for the copy, on a disk that all nodes see.
        adapter: peft's config and weights, for engines that serve them over the weights in `path`.
    """

    def __init__(self, path: str, scratch: str, adapter: tuple[str, bytes] | None = None):
        self._path = path
        self._scratch = scratch
        self.adapter = adapter
        self._copy: PrivateDirectory | None = None

    @property
    def policy(self) -> WorkerGroup:
        raise AssertionError("no ranks hold these weights")

    def call(self, role: str, method: str, *args: Any) -> Any:
        return self.call_one(role, method, *args)

    def call_one(self, role: str, method: str, *args: Any) -> Any:
        match method:
            case "adapter_config" if self.adapter is not None:
                return self.adapter[0]
            case "adapter_weights" if self.adapter is not None:
                return self.adapter[1]
            case "weight_bytes":
                return sum(map(os.path.getsize, self._files()))
        raise AssertionError(method)

    def start(self, role: str, method: str, *args: Any) -> CallFutures:
        raise AssertionError("no ranks can send these weights")

    def release_memory(self, needed: int = 0, colocated: Sequence[int] = ()) -> None:
        """Do nothing: there is nothing on a GPU."""

    def check_shared(self, dtype: str) -> None:
        """Engines of this job load the weights from their files."""

    def share_weights(self, dtype: str) -> str:
        """Write a copy of the weight files as `dtype`, one file at a time; return its directory.

        Args:
            dtype: `float32`, `bfloat16`, or `auto`: that of the files.

        Raises:
            UserError: the weights are in no safetensors files.
        """
        import torch
        from safetensors.torch import load_file, save_file

        files = self._files()
        if not files:
            raise UserError(
                f"model.path={self._path}: has no safetensors files, which inference servers load; save the model with "
                "safetensors, or choose rollout=vllm"
            )
        self.drop_shared()
        self._copy = PrivateDirectory(self._scratch, _PREFIX, 8)
        target = None if dtype == "auto" else getattr(torch, dtype)
        for file in files:
            tensors = {
                name: tensor.to(target) if target is not None and tensor.is_floating_point() else tensor
                for name, tensor in load_file(file).items()
            }
            save_file(tensors, os.path.join(self._copy.path, os.path.basename(file)), {"format": "pt"})
        return self._copy.path

    def drop_shared(self) -> None:
        """Delete the copy."""
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def _files(self) -> list[str]:
        return weight_files(self._path)
