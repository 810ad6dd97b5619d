"""Utilisation of devices, from figures of data sheets or a measured speed."""

from __future__ import annotations

from trainer.metrics.timing import model_flops, peak_flops


def test_known_gpus_have_a_peak_and_others_none():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H100 NVL") == peak_flops("NVIDIA H200 NVL") == 835e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA GeForce RTX 4090") == 165e12
    assert peak_flops("NVIDIA GeForce RTX 4090 D") is None
    assert peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert peak_flops("cpu") is None and peak_flops("NVIDIA GeForce GTX 1080") is None


def test_operations_of_a_step_by_hand():
    """Ten tokens, three parameters: a forward pass takes 60; an update of all takes 180, of one alone 140."""
    assert model_flops(tokens=10, parameters=3, trained=3, epochs=0, forward_passes=1) == 60
    assert model_flops(tokens=10, parameters=3, trained=3, epochs=2, forward_passes=0) == 2 * 180
    assert model_flops(tokens=10, parameters=3, trained=1, epochs=1, forward_passes=2) == 120 + 140
