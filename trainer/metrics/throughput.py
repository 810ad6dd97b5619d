"""FLOPs of training, and the peak FLOP/s of devices."""

from __future__ import annotations

_PEAK_FLOPS: dict[str, float | None] = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "B200": 2250e12,
    "RTX 4090 D": None,
    "RTX 4090 Laptop": None,
    "RTX 4090": 165e12,
}
"""By a substring of the device's name. A longer name precedes a shorter one that it contains. None: not known, and not
that of the shorter name. Sources: NVIDIA's data sheets of these GPUs and the white paper "NVIDIA Ada GPU Architecture",
with sums in float32. `trainer.plan.hardware` takes its peaks from here."""


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a GPU from its data sheet, or None for CPUs and GPUs that are not listed."""
    return next((flops for name, flops in _PEAK_FLOPS.items() if name in device_name), None)


def model_flops(tokens: float, parameters: int, trained: int, epochs: float, forward_passes: float) -> float:
    """Return the FLOPs of a step: `forward_passes` for log-probs before the update, and `epochs` passes of the update.

    A forward pass takes 2 FLOP per parameter and token. An update takes one more forward pass, as much again for the
    gradients of activations, and as much again for the gradients of trained weights (Kaplan et al., 2020).
    """
    return tokens * (2 * forward_passes * parameters + epochs * (4 * parameters + 2 * trained))
