"""What changed in a tensor since an earlier version, exact to the bit.

A difference has the places and the new values of the elements whose bits differ. They overwrite the old ones, so
nothing is rounded, and NaN and -0 are like other values. With bfloat16 and small learning rates, an optimizer step
changes a few percent of the elements, spread over all tensors.
"""

from __future__ import annotations

import glob
import json
import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

STRIDE = 255
"""Every element at a multiple of it is sent, changed or not. So the distance between two places fits in one byte."""
_CHUNK = 256 * STRIDE  # elements that are compared at a time: they stay in the processor's cache


class Change(NamedTuple):
    count: int
    """Number of elements that are sent. -1: the whole block, because a difference would not be smaller."""
    distances: np.ndarray
    """`(count,)` uint8, from the place of the element before. Empty if the whole block is sent."""
    values: np.ndarray
    """`(count,)`, or `(n,)` if the whole block is sent; unsigned integers with the bits of the elements."""

    @property
    def nbytes(self) -> int:
        return self.distances.nbytes + self.values.nbytes


def bits_of(tensor: Tensor) -> np.ndarray:
    """Return the bits of a tensor on the CPU as unsigned integers `(n,)` of the size of its elements. Not a copy. After
    `Tensor.numpy`, `trainer.offload` could not free the tensor's memory."""
    flat = tensor.detach().contiguous().view(-1)
    return np.from_dlpack(flat.view(torch.uint8)).view(f"u{tensor.itemsize}")


class WeightsDigest:
    """A digest of named tensors: which they are, their shapes and their bits.

    It is a sum (modulo 2^64) of one number for each tensor. So it does not depend on the order of the tensors, and
    processes that have some of them each can add theirs up. It finds what went wrong, not what somebody has forged.
    """

    def __init__(self, total: int = 0):
        self.total = total

    def __str__(self) -> str:
        """Return it in hexadecimal."""
        return f"{self.total % 2**64:016x}"

    def add(self, name: str, shape: Any, bits: Any) -> None:
        """Add a tensor, by its bits in host memory, or by a sum of its bits (`int`)."""
        seed = xxhash.xxh3_64_intdigest(f"{name} {list(shape)}".encode())
        content = struct.pack("<q", bits) if isinstance(bits, int) else bits
        self.total += xxhash.xxh3_64_intdigest(content, seed)

    def of(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as they come, and add them. Two ends get one digest for tensors on one kind of device."""
        for name, tensor in weights:
            self.add(name, tensor.shape, _sum_on_device(tensor) if tensor.is_cuda else bits_of(tensor))
            yield name, tensor

    def add_files(self, directory: str, part: int = 0, parts: int = 1) -> None:
        """Add every `parts`-th tensor of the safetensors files in a directory, from the one numbered `part`."""
        number = 0
        for path in sorted(glob.glob(os.path.join(directory, "*.safetensors"))):
            content = np.memmap(path, np.uint8, "r")
            start = 8 + int.from_bytes(content[:8].tobytes(), "little")
            for name, entry in json.loads(content[8:start].tobytes()).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    if number % parts == part:
                        self.add(name, entry["shape"], content[start + begin : start + end])
                    number += 1


_GPU_CHUNK = 1 << 24  # bytes that are summed at a time


def _sum_on_device(tensor: Tensor) -> int:
    """Return a sum of a tensor's bits (modulo 2^64, signed), each weighted by its place, without leaving the GPU."""
    flat, total = tensor.detach().contiguous().view(-1).view(torch.uint8), 0
    for start in range(0, len(flat), _GPU_CHUNK):
        bits = flat[start : start + _GPU_CHUNK]
        bits = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
        places = torch.arange(start, start + len(bits), device=bits.device).mul_(2654435761).bitwise_or_(1)
        total += int(((bits ^ (bits >> 29)) * places).sum())
    return (total + 2**63) % 2**64 - 2**63


def digest_of(bits: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(bits)


def whole(new: np.ndarray) -> Change:
    return Change(-1, np.empty(0, np.uint8), new)


def difference(base: np.ndarray, new: np.ndarray) -> Change:
    """Return the smallest change that turns `base` into `new`, both `(n,)` unsigned integers of one type."""
    distances, values, last = [], [], 0
    for start in range(0, len(new), _CHUNK):
        chunk = new[start : start + _CHUNK]
        is_sent = base[start : start + _CHUNK] != chunk
        is_sent[::STRIDE] = True
        places = np.flatnonzero(is_sent)
        distances.append(np.diff(places, prepend=last - start).astype(np.uint8))
        values.append(chunk[places])
        last = start + int(places[-1])
    count = sum(map(len, values))
    if count * (1 + new.itemsize) >= new.nbytes:
        return whole(new)
    return Change(count, np.concatenate(distances), np.concatenate(values))


def apply_change(block: np.ndarray, change: Change, digest: str) -> None:
    """Overwrite the elements of `block` `(n,)`, in place. The result must have `digest`. Raises ValueError: it has
    another one: the block was not the base of the change, or was damaged. It is neither version now."""
    last = 0
    for start in range(0, change.count, _CHUNK):
        places = np.cumsum(change.distances[start : start + _CHUNK], dtype=np.int64)
        places += last
        block[places] = change.values[start : start + _CHUNK]
        last = int(places[-1])
    if change.count < 0 and change.values is not block:
        block[:] = change.values
    if (found := digest_of(block)) != digest:
        raise ValueError(f"the changed weights have the digest {found}, and those of the rank {digest}")
