"""Save and restore the states of a process's random generators."""

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
    """Seed this process's generators, for user code."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def capture_rng(with_gpu: bool = True) -> dict[str, Tensor]:
    """Return the states of this process's generators as byte tensors, so that loading them unpickles nothing.

    Args:
        with_gpu: include the generator of the current GPU, if there is one. A process that only drives others leaves it
            out, or CUDA would start in it.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    others = {
        "numpy": [name, keys.tolist(), position, has_gauss, gauss],
        "python": [version, list(internal), gauss_next],
    }
    text = np.frombuffer(json.dumps(others).ljust(_TEXT_BYTES).encode(), dtype=np.uint8)
    assert len(text) == _TEXT_BYTES, len(text)
    state = {"torch": torch.get_rng_state(), "others": torch.from_numpy(text.copy())}
    if with_gpu and torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Tensor]) -> None:
    """Restore the states of the generators that `capture_rng` returned.

    Raises:
        UserError: the states are damaged.
    """
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
        raise UserError(f"the checkpoint's states of the random generators are damaged ({error})") from error


def rng_as_text(state: dict[str, Tensor]) -> dict[str, str]:
    """Return the states of `capture_rng` as text for JSON."""
    return {name: base64.b64encode(tensor.numpy()).decode() for name, tensor in state.items()}


def rng_from_text(texts: dict[str, str]) -> dict[str, Tensor]:
    """Return the states whose text `rng_as_text` returned.

    Raises:
        UserError: the text is damaged.
    """
    try:
        data = {name: bytearray(base64.b64decode(text)) for name, text in texts.items()}
        return {name: torch.frombuffer(content, dtype=torch.uint8) for name, content in data.items()}
    except ValueError as error:
        raise UserError(f"the checkpoint's states of the random generators are damaged ({error})") from error
