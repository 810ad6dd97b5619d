"""The step in the name of a checkpoint."""

from __future__ import annotations

import pytest

from trainer.checkpoint.names import step_in


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("global_step_0", 0),
        ("global_step_12", 12),
        ("global_step_012", None),
        ("global_step_1\n", None),
        ("global_step_", None),
        ("global_step_-1", None),
        (".aside-global_step_1-ab", None),
    ],
)
def test_the_step_comes_from_the_name(name, step):
    assert step_in(f"/runs/{name}") == step and step_in(f"/runs/{name}/") == step
