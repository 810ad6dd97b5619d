"""Differences of weights, beside what plain numpy finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.support.weights import make_weights
from trainer.models.weight_deltas import (
    STRIDE,
    WeightsDigest,
    _sum_on_device,
    apply_change,
    bits_of,
    difference,
    digest_of,
    whole,
)

SPECIAL = {2: [0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFFF, 0x7F80], 4: [0, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFFFFFFF]}
"""Bits of 0, -0, several NaN, infinity, as bfloat16 and float32. Some are equal as numbers, or to nothing at all."""


@st.composite
def versions(draw) -> tuple[np.ndarray, np.ndarray]:
    itemsize = draw(st.sampled_from([2, 4]))
    kind, length = (
        f"u{itemsize}",
        draw(st.sampled_from([0, 1, 2, STRIDE - 1, STRIDE, STRIDE + 1, 999, 70_000, 300_000])),
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = random.integers(0, np.iinfo(kind).max, length, kind, endpoint=True)
    base[random.random(length) < 0.1] = random.choice(SPECIAL[itemsize])
    changed = random.random(length) < draw(st.sampled_from([0, 1e-4, 0.03, 0.4, 1]))
    new = base.copy()
    new[changed] = random.choice(np.array(SPECIAL[itemsize], kind), int(changed.sum()))
    return base, new


@given(versions())
@settings(deadline=None, max_examples=60)
def test_a_difference_turns_one_version_into_the_other(given):
    base, new = given
    before, change = base.copy(), difference(base, new)
    assert np.array_equal(base, before) and change.nbytes <= new.nbytes
    places = np.flatnonzero(base != new)
    if change.count >= 0:
        sent = np.cumsum(change.distances, dtype=np.int64)
        assert set(places) <= set(sent) and set(sent) <= {*places, *range(0, len(new), STRIDE)}
    else:
        assert (len(places) + len(new) / STRIDE + 1) * (1 + new.itemsize) >= new.nbytes
    apply_change(base, change, digest_of(new))
    assert np.array_equal(base, new)


def test_numbers_are_set_and_not_added():
    base, new = (np.full(999, value, np.uint16) for value in (3, 3))
    new[500] = 9
    change = difference(base, new)
    for _ in range(2):
        apply_change(base, change, digest_of(new))
    assert np.array_equal(base, new)


def test_a_block_of_another_version_is_refused():
    base, other, new = (np.zeros(999, np.uint16) for _ in range(3))
    new[5], other[6] = 1, 1
    with pytest.raises(ValueError, match="have the digest [0-9a-f]{16}, and those of the rank [0-9a-f]{16}"):
        apply_change(other, difference(base, new), digest_of(new))
    apply_change(other, whole(new), digest_of(new))
    assert np.array_equal(other, new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 2)])
def test_bits_are_those_of_the_tensor(dtype, shape):
    tensor = (100 * torch.randn(shape)).to(dtype)
    bits = bits_of(tensor)
    assert bits.nbytes == tensor.nbytes and bits.shape == (tensor.numel(),) and bits.itemsize == tensor.itemsize
    assert bits.tobytes() == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_a_digest_is_that_of_the_files_whoever_reads_which_part(tmp_path):
    weights = {name: tensor for name, tensor in make_weights(1).items() if "int64" not in name}
    files = dict(list(weights.items())[:5]), dict(list(weights.items())[5:])
    for number, tensors in enumerate(files):
        save_file(tensors, tmp_path / f"{number}.safetensors", metadata={"format": "pt"})
    digests = [WeightsDigest() for _ in range(4)]
    assert len(dict(digests[0].of(iter(weights.items())))) == len(weights)
    digests[1].add_files(str(tmp_path))
    for part in range(3):
        digests[2].add_files(str(tmp_path), part, 3)
    assert str(digests[0]) == str(digests[1]) == str(digests[2])

    assert _sum_on_device(weights["large.float32"]) != _sum_on_device(weights["large.float32"].flip(0))
    large, small = weights["large.float32"], weights["vector.float32"]
    changed = large.clone()
    changed[3, 7] = changed[3, 7].nextafter(torch.tensor(torch.inf))
    others = [
        {**weights, "large.float32": changed},
        {**weights, "large.float32": large.reshape(500, 70)},
        {**weights, "vector.float32": small.flip(0)},
        {name: tensor for name, tensor in weights.items() if name != "scalar.float32"},
        {**weights, "scalar.float32": weights["last.float32"][0], "more": weights["scalar.float32"]},
    ]
    for other in others:
        digest = WeightsDigest()
        dict(digest.of(iter(other.items())))
        assert str(digest) != str(digests[0])
