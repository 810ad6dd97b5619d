"""A user's policy loss that draws random numbers: a resumed run must draw what the run would have drawn."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.algorithms.losses import Loss, clip


def noisy_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **options: Any) -> Loss:
    """The clipped surrogate of advantages with noise from each generator that user code may use."""
    noise = float(torch.rand(())) + random.random() + np.random.random()
    return clip(logprobs, old_logprobs, advantages * (1 + 0.1 * noise), mask, **options)
