"""The memory of tensors over time, without an allocator: it also counts fake tensors, which have no memory."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_COMPUTES = re.compile(r"attention|::empty|::new_empty|exchange")
"""Operators that move no bytes, or whose time is not that of the bytes that they move."""
_PRODUCTS = re.compile(r"mm$|mm_$")
_DEVICE = torch.ops.prim.device.default
"""Asks a fake tensor for its device."""
_COMPUTED_SIZE = 4
"""Bytes of a number in which a CPU computes."""


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of all tensors that operators return in the block, while they live.

    A view shares the memory of its tensor, which counts once. Tensors from before the block do not count.

    Attributes:
        moved: bytes that operators have read and written, but for attention and views. A number in half precision
            counts as four bytes, because a CPU converts it to compute; but not in products of matrices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.moved = 0
        self._known: set[int] = set()

    def reset_peak(self) -> None:
        """Measure the peak from now on."""
        self.peak = self.now

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _DEVICE:  # two of three calls for fake tensors
            return function(*args)
        kwargs = kwargs or {}
        given = [*_tensors_in(args), *_tensors_in(kwargs)]
        before = {_number(tensor) for tensor in given}
        result = function(*args, **kwargs)
        returned = [(tensor, _number(tensor)) for tensor in _tensors_in(result)]
        for tensor, number in returned:
            if number not in before and number not in self._known:
                self._count(tensor.untyped_storage(), number)
        kind = _kind(function)
        is_view = not kind.writes and all(number in before for _, number in returned)
        if not is_view and not kind.computes:
            size = _bytes if kind.is_product else _moved
            self.moved += sum(map(size, given)) + sum(size(tensor) for tensor, _ in returned)
        return result

    def _count(self, storage: torch.UntypedStorage, number: int) -> None:
        size = storage.nbytes()
        self._known.add(number)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, number, size).atexit = False

    def _forget(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.now -= size


class _Kind(NamedTuple):
    """What counts of an operator."""

    writes: bool
    """It changes its arguments."""
    computes: bool
    """Its time is not that of the bytes that it moves."""
    is_product: bool


@functools.cache
def _kind(function: Any) -> _Kind:
    name = function._schema.name
    return _Kind(function._schema.is_mutable, bool(_COMPUTES.search(name)), bool(_PRODUCTS.search(name)))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or the results of an operator: it takes and returns no other containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def _bytes(tensor: Tensor) -> int:
    return tensor.nbytes


def _moved(tensor: Tensor) -> int:
    return tensor.numel() * max(_COMPUTED_SIZE, tensor.itemsize) if tensor.is_floating_point() else tensor.nbytes


def _number(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
