"""FLOPs of training, and the peak of devices."""

from __future__ import annotations

_PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "B200": 2250e12,
}
"""By a part of the device's name. A longer name comes before a shorter one that it contains."""


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU by its data sheet; None for a CPU and for GPUs that are not listed."""
    return next((flops for name, flops in _PEAK_FLOPS.items() if name in device_name), None)


def model_flops(tokens: float, parameters: int, trained: int, epochs: float, forward_passes: float) -> float:
    """FLOPs of a step: `forward_passes` for log-probs before the update, and `epochs` passes of the update.

    A forward pass takes 2 FLOP a parameter and token. An update takes one more forward pass and, as much again each,
    the gradients of activations and, for trained parameters alone, of weights (Kaplan et al., 2020).
    """
    return tokens * (2 * forward_passes * parameters + epochs * (4 * parameters + 2 * trained))
