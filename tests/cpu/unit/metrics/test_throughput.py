"""Utilisation of GPUs, from figures of data sheets."""

from __future__ import annotations

from trainer.metrics.throughput import model_flops, peak_flops


def test_known_gpus_have_a_peak_and_others_none():
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("cpu") is None and peak_flops("NVIDIA GeForce GTX 1080") is None


def test_operations_of_a_step_by_hand():
    """Ten tokens, three parameters: 60 for old log-probs; an update of all takes 180, of one frozen with two 140."""
    assert model_flops(tokens=10, parameters=3, trained=3, epochs=0) == 60
    assert model_flops(tokens=10, parameters=3, trained=3, epochs=2) == 60 + 2 * 180
    assert model_flops(tokens=10, parameters=3, trained=1, epochs=1) == 60 + 140
