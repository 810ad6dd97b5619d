"""The tables of docs/scale.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale import CASES, HEADS, plan_of, row_of
from trainer.plan.activations import COMPILED_KEEPS

PAGE = (Path(__file__).parents[4] / "docs/scale.md").read_text()


@pytest.mark.parametrize("name", CASES)
def test_the_rows_are_those_of_the_plans(name):
    plan = plan_of(name)
    for table in HEADS:
        assert f"\n{row_of(table, name, plan)}\n" in PAGE, "`python -m benchmarks.scale` makes the tables"


def test_every_case_has_its_rows():
    for name in CASES:
        model, gpus = name.split("-")
        assert PAGE.count(f"\n| {model} on {int(gpus):,} GPU") == len(HEADS)


def test_the_page_says_what_compiled_blocks_keep():
    shares = [f"{100 * COMPILED_KEEPS[mode]:.0f} %" for mode in ("none", "selective")]
    text = " ".join(PAGE.split())
    assert f"A compiled block counts with {shares[0]} of the activations" in text
    assert f"with {shares[1]} if `fsdp.activation_checkpointing` is `selective`" in text
