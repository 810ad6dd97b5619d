"""A policy loss that makes its rank fail, as the files in a directory say: each file stands for one fault.

A file is named `KIND,N,RANK`: at the N-th call of the loss in its process, the rank deletes the file and fails. With
`KIND,N,RANK,anything` a fault happens several times. Without the variable `TEST_FAULTS`, nothing fails.
"""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.noisy_loss import noisy_clip
from trainer.algorithms.losses import Loss

_calls = itertools.count(1)


def faulty_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **options: Any) -> Loss:
    """`noisy_clip`, in a rank that may die, hang, run out of memory, or raise."""
    if directory := os.environ.get("TEST_FAULTS"):
        call, rank = next(_calls), dist.get_rank()
        for file in sorted(Path(directory).iterdir()):
            kind, nth, at, *_ = file.name.split(",")
            if (int(nth), int(at)) == (call, rank):
                file.unlink()
                _fail(kind)
    return noisy_clip(logprobs, old_logprobs, advantages, mask, **options)


def _fail(kind: str) -> None:
    if kind == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if kind == "raise":
        raise ValueError("a bug")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
