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


class FaultyAdamW(torch.optim.AdamW):
    """AdamW in a rank that may be killed `before`, `within` or `after` a step. Within, half of the parameters moved."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._calls += 1
        parameters = self.param_groups[0]["params"]
        gradients = [parameter.grad for parameter in parameters]
        half = len(parameters) // 2
        self._may_fail("before")
        for chosen, place in ((range(half), "within"), (range(half, len(parameters)), "after")):
            for number, parameter in enumerate(parameters):
                parameter.grad = gradients[number] if number in chosen else None
            super().step()
            self._may_fail(place)

    def _may_fail(self, place: str) -> None:
        directory = os.environ.get("TEST_FAULTS")
        for file in sorted(Path(directory).glob(f"{place},{self._calls},{dist.get_rank()}")) if directory else ():
            file.unlink()
            _fail("kill")
