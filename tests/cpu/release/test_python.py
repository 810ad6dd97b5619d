"""Whole runs from Python: the example notebook as a script without a guard, killed and run again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import (
    SMALL,
    comparable,
    environment,
    left_in_shared_memory,
    left_running,
    metrics,
    shared_memory,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
NOTEBOOK = Path(__file__).parents[3] / "examples/notebook.ipynb"

MODEL = ["model.cache_dir=null", *(word for word in SMALL if word.startswith(("sft.", "data.")))]
"""The built-in model of the other tests."""
BEFORE = """
import signal
HANDLED = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
handlers = [signal.getsignal(number) for number in HANDLED]
"""
# Follows the cells of the notebook: an uninterrupted run in the same process, with the preset's loss in other words.
AFTER = """
import logging, os, sys

assert handlers == [signal.getsignal(number) for number in HANDLED]
from trainer.algorithms.losses import clip
whole = train(
    [*overrides, "trainer.run_dir=outputs/whole"],
    reward=ends_agree,
    policy_loss=lambda *tensors, aggregation="seq_mean_token_mean", totals: clip(
        *tensors, aggregation=aggregation, totals=totals
    ),
)
assert whole.run_dir != result.run_dir and whole.best == result.best
ours, theirs = (load_checkpoint(run.run_dir).policy_state_dict() for run in (result, whole))
assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)
assert all((model.state_dict()[name].float() == weight).all() for name, weight in ours.items())
assert checkpoint.step == checkpoint.state["step"] == 3
assert checkpoint.path == result.checkpoints[-1] and result.report == os.path.join(result.run_dir, "report.png")
assert "ray" not in sys.modules and "hydra" not in sys.modules
assert not logging.getLogger("trainer").handlers
print("both agree after", whole.metrics["step"].max(), "steps")
"""


def cells() -> str:
    notebook = json.loads(NOTEBOOK.read_text())
    return "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")


def test_a_killed_script_continues_its_run_exactly_and_leaves_its_process_as_it_was(tmp_path, marker):
    """The run saves after each step. The script is killed after the first of three."""
    memory = shared_memory()
    added = [*MODEL, "trainer.ckpt_interval=1", "trainer.total_steps=3"]
    overrides = f"overrides += {added}\nresult = train("
    script = BEFORE + cells().replace("result = train(", overrides) + AFTER
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "script.py"]
    run = tmp_path / "outputs/notebook"
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
        wait_until(lambda: (run / "checkpoints/global_step_1").exists() or process.poll() is not None)
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: left_running(marker) == [])
    assert not (run / "checkpoints/global_step_3").exists(), (tmp_path / "log").read_text()
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from" in done.stdout and done.stdout.endswith("both agree after 3 steps\n")
    assert comparable(metrics(run)) == comparable(metrics(tmp_path / "outputs/whole"))
    assert metrics(run)[-1]["reward/mean"] > 0, "the reward of the script was not used"
    assert left_running(marker) == []
    wait_until(lambda: left_in_shared_memory(memory) == set())


def test_the_outputs_of_the_notebook_are_there_and_name_no_machine():
    text = NOTEBOOK.read_text()
    outputs = [cell["outputs"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert all(outputs[1:]) and "finished step 2 of 2" in text
    assert "/tmp/" not in text and "/home/" not in text and "/root/" not in text and "/work/" not in text
