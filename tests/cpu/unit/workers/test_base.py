"""The learning rate of every optimizer step: warm-up, then constant or cosine."""

from __future__ import annotations

import pytest

from trainer.config import OptimizerConfig
from trainer.workers.base import learning_rate


@pytest.mark.parametrize(
    "settings, total_steps, expected",
    [
        ({}, 3, [2.0, 2.0, 2.0, 2.0]),
        ({"warmup_steps": 4}, 6, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]),
        ({"warmup_steps": 4, "min_lr_ratio": 0.5}, 2, [0.5, 1.0, 1.5, 2.0, 2.0]),
        # 1 + cos(0, 45, 90, 135 degrees); the floor is reached when the last step is done, and is never left.
        (
            {"scheduler": "cosine", "min_lr_ratio": 0.0},
            4,
            [2.0, 1.7071067811865475, 1.0, 0.2928932188134524, 0.0, 0.0, 0.0],
        ),
        ({"scheduler": "cosine", "min_lr_ratio": 0.1}, 2, [2.0, 1.1, 0.2, 0.2]),
        ({"scheduler": "cosine", "min_lr_ratio": 1.0}, 2, [2.0, 2.0, 2.0]),
        (
            {"scheduler": "cosine", "min_lr_ratio": 0.1, "warmup_steps": 2},
            6,
            [1.0, 2.0, 2.0, 1.7363961030678928, 1.1, 0.46360389693210724, 0.2, 0.2],
        ),
        ({"scheduler": "cosine", "warmup_steps": 3}, 3, [2 / 3, 4 / 3, 2.0, 2.0, 0.2]),
        ({"scheduler": "cosine", "warmup_steps": 3}, 1, [2 / 3, 4 / 3, 2.0, 2.0, 0.2]),
    ],
    ids=[
        "constant",
        "warm-up",
        "warm-up longer than the run",
        "cosine",
        "floor",
        "floor as high as the peak",
        "warm-up and cosine",
        "warm-up of the whole run",
        "cosine after a warm-up longer than the run",
    ],
)
def test_the_learning_rate_of_each_step(settings, total_steps, expected):
    config = OptimizerConfig(lr=2.0, **settings)
    rates = [learning_rate(config, step, total_steps) for step in range(len(expected))]
    assert rates == pytest.approx(expected, rel=1e-14, abs=1e-15)
