"""What changed in a tensor since an earlier version, exact to the bit.

A difference has the places and the new values of the elements whose bits differ. They overwrite the old ones, so
nothing is rounded, and NaN and -0 are like other values. With bfloat16 and small learning rates, an optimizer step
changes a few percent of the elements, spread over all tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

STRIDE = 255
"""Every element at a multiple of it is sent, changed or not. So the distance between two places fits in one byte."""
_CHUNK = 256 * STRIDE  # elements that are compared at a time: they stay in the processor's cache


class Change(NamedTuple):
    """What turns one version of a block into another one."""

    count: int
    """Number of elements that are sent. -1: the whole block, because a difference would not be smaller."""
    distances: np.ndarray
    """`(count,)` uint8, from the place of the element before. Empty if the whole block is sent."""
    values: np.ndarray
    """`(count,)`, or `(n,)` if the whole block is sent; unsigned integers with the bits of the elements."""

    @property
    def nbytes(self) -> int:
        """Size of what is sent."""
        return self.distances.nbytes + self.values.nbytes


def bits_of(tensor: Tensor) -> np.ndarray:
    """Return the bits of a tensor on the CPU as unsigned integers `(n,)` of the size of its elements. Not a copy."""
    flat = tensor.detach().contiguous().view(-1)
    return np.from_dlpack(flat.view(torch.uint8)).view(f"u{tensor.itemsize}")


def digest_of(bits: np.ndarray) -> str:
    """Return xxh3 (64 bits) of a block in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(bits)


def whole(new: np.ndarray) -> Change:
    """Return the change that sends all of a block `(n,)`."""
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
    """Overwrite the elements of `block` `(n,)`, in place.

    Args:
        digest: `digest_of` the result.

    Raises:
        ValueError: the result is another one: the block was not the base of the change, or was damaged. It is neither
            of the two versions now.
    """
    last = 0
    for start in range(0, change.count, _CHUNK):
        places = np.cumsum(change.distances[start : start + _CHUNK], dtype=np.int64)
        places += last
        block[places] = change.values[start : start + _CHUNK]
        last = int(places[-1])
    if change.count < 0:
        block[:] = change.values
    if (found := digest_of(block)) != digest:
        raise ValueError(f"the changed weights have the digest {found}, and those of the rank {digest}")
