"""Random generators of a process, and kernels whose results repeat."""

from __future__ import annotations

import base64
import json
import random

import numpy as np
import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.files.documents import parse_json

_TEXT_BYTES = 32768  # every state has this size, because DCP loads into existing tensors


def seed_rng(seed: int) -> None:
    """Seed the random generators of this process, which user code may use."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def capture_rng(with_gpu: bool = True) -> dict[str, Tensor]:
    """Return the states of this process's random generators as byte tensors, which can be loaded without pickle. That
    of the GPU is optional, because it would start CUDA in a process that uses no GPU."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    others = {"numpy": [name, keys.tolist(), position, has_gauss, gauss], "python": random.getstate()}
    text = np.frombuffer(json.dumps(others).ljust(_TEXT_BYTES).encode(), dtype=np.uint8)
    assert len(text) == _TEXT_BYTES, len(text)
    state = {"torch": torch.get_rng_state(), "others": torch.from_numpy(text.copy())}
    if with_gpu and torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Tensor]) -> None:
    """Restore the states that `capture_rng` returned. Raises UserError: they are corrupt."""
    try:
        torch.set_rng_state(state["torch"].cpu())
        others = parse_json(bytes(state["others"].cpu().numpy()))
        name, keys, position, has_gauss, gauss = others["numpy"]
        np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, gauss))
        version, internal, gauss_next = others["python"]
        random.setstate((version, tuple(internal), gauss_next))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(f"the checkpoint's states of the random generators are corrupt ({error})") from error


def rng_as_text(state: dict[str, Tensor]) -> dict[str, str]:
    return {name: base64.b64encode(tensor.numpy()).decode() for name, tensor in state.items()}


def rng_from_text(texts: dict[str, str]) -> dict[str, Tensor]:
    """Return the states that `rng_as_text` has converted to text. Raises UserError: the text is corrupt."""
    try:
        data = {name: bytearray(base64.b64decode(text)) for name, text in texts.items()}
        return {name: torch.frombuffer(content, dtype=torch.uint8) for name, content in data.items()}
    except ValueError as error:
        raise UserError(f"the checkpoint's states of the random generators are corrupt ({error})") from error


def use_deterministic_kernels(warn_only: bool = False) -> None:
    """Make this process use kernels whose results repeat. An operator without such a kernel raises, or warns. cuBLAS
    also needs `CUBLAS_WORKSPACE_CONFIG`, which must be set before CUDA starts (see `trainer.config.engines`)."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # By default torch fills each new tensor. That takes time, and no tensor is read before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False
