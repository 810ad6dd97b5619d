"""A policy loss that fills a disk in one step and gives the room back in another, as other programs do."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainer.algorithms.losses import Loss, clip

_calls = itertools.count(1)


def fill(disk: Path) -> None:
    """Write a file to the disk until it is full."""
    with (disk / "ballast").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def free(disk: Path) -> None:
    """Delete that file."""
    (disk / "ballast").unlink(missing_ok=True)


def filling_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **options: Any) -> Loss:
    """The clipped surrogate.

    `TEST_DISK=N,M,PATH`: the disk is full from the N-th to the M-th call in a rank.
    """
    if dist.is_initialized() and (spec := os.environ.get("TEST_DISK")):
        first, last, path = spec.split(",", 2)
        call = next(_calls)
        if int(first) <= call < int(last):
            fill(Path(path))
        elif call == int(last):
            free(Path(path))
    return clip(logprobs, old_logprobs, advantages, mask, **options)
