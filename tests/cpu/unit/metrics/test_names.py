"""The names of metrics, and what importing them costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trainer.config import LoggerConfig, conf_dir
from trainer.metrics import names

ROOT = Path(__file__).parents[4]


def test_the_docs_are_fresh():
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == names.with_reference(page), "run `make docs`"
    assert all(f"\n| `{name}` | " in page for name in names.METRICS)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("val/pass@4", True),
        ("val/pass@16", True),
        ("val/pass@k", False),
        ("val/pass@0", False),
        ("val/pass@<k>", False),
        ("reward/mean", True),
        ("reward/length/mean", True),
        ("reward//mean", False),
        ("reward/<name>/std", False),
        ("Xreward/mean", False),
    ],
)
def test_names_with_a_part_that_the_run_chooses_are_known(name, known):
    assert names.is_metric(name) == known


def test_every_phase_is_a_metric():
    assert all(f"time/{phase}" in names.METRICS for phase in names.PHASES)


def test_importing_metrics_imports_nothing_heavy():
    code = """
import sys
from trainer.metrics import names, progress, timing, tracker
from trainer.reports import compare, diagnose, drawing, report
print(sorted({"torch", "ray", "vllm", "wandb", "matplotlib", "tensorboard", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("group", ["default", "wandb", "mlflow", "trackio"])
def test_the_logger_groups_fit_the_schema(group):
    loaded = OmegaConf.load(os.path.join(conf_dir(), "logger", f"{group}.yaml"))
    logger = OmegaConf.merge(OmegaConf.structured(LoggerConfig), loaded)
    assert logger.services == ([] if group == "default" else [group])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("policy/kl", "KL to the"), ("val/pass@4", "Validation prompts for"), ("reward/length/mean", "Mean of one term")],
)
def test_a_metric_is_what_the_table_says(name, expected):
    assert names.declared_as(name).meaning.startswith(expected)


def test_what_only_grows_is_a_counter():
    assert names.declared_as("mine/own") is None and not names.is_counter("mine/own")
    assert [name for name in names.METRICS if names.is_counter(name)] == [
        "data/<name>/prompts", "progress/prompts", "progress/samples", "progress/tokens"
    ]  # fmt: skip
    assert names.is_counter("data/math/prompts") and not names.is_counter("progress/epoch")
