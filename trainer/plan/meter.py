"""The memory of tensors over time, without an allocator: it also counts fake tensors, which have no memory."""

from __future__ import annotations

import re
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COMPUTES = re.compile(r"attention|::empty|::new_empty|exchange")
"""Operators that move no bytes, or whose time is not that of the bytes that they move."""
_PRODUCTS = re.compile(r"mm$|mm_$")
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
        kwargs = kwargs or {}
        given = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        before = {_number(tensor) for tensor in given}
        result = function(*args, **kwargs)
        returned = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        for tensor in returned:
            if (number := _number(tensor)) not in self._known | before:
                self._count(tensor.untyped_storage(), number)
        name = function._schema.name
        is_view = not function._schema.is_mutable and all(_number(tensor) in before for tensor in returned)
        if not is_view and not _COMPUTES.search(name):
            is_product = bool(_PRODUCTS.search(name))
            self.moved += sum(tensor.nbytes if is_product else _moved(tensor) for tensor in (*given, *returned))
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


def _moved(tensor: Tensor) -> int:
    return tensor.numel() * max(_COMPUTED_SIZE, tensor.itemsize) if tensor.is_floating_point() else tensor.nbytes


def _number(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
