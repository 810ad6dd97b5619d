"""The display: what was logged, the running phase, and messages above them."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import wait_until
from tests.support.metrics import step_metrics
from trainer.config import TASKS, Metric, TaskSpec
from trainer.metrics.progress import Progress, seconds_left
from trainer.metrics.timing import Timer

ROOT = Path(__file__).parents[4]


def test_a_log_file_gets_one_aligned_line_a_step(capsys):
    with Progress(12, completed=1, history=[{"step": 0, "val/accuracy": 0.3}, {"step": 1}]) as progress:
        for step in range(2, 13):
            progress.update(step, step_metrics(step))
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"step  2/12  reward  0\.520  length  12\.2  kl 1\.5e-04  grad 0\.420  tok/s  6,400  s/step  2\.0  "
        r"val 0\.700 best 0\.700  left \d:\d\d",
        lines[0],
    )
    assert "val 0.600 best 0.700" in lines[2]
    assert lines[-1].endswith("left 0:00")
    assert len(lines) == 11 and len({len(line) for line in lines}) == 1


def test_the_best_validation_of_earlier_processes_counts(capsys):
    with Progress(12, completed=4, history=[{"step": 2, "val/accuracy": 0.9}, {"step": 4}]) as progress:
        progress.update(5, {"val/accuracy": 0.6})
    assert "val 0.600 best 0.900" in capsys.readouterr().out


def test_start_weights_may_be_the_best(capsys):
    with Progress(12, history=[{"step": 0, "val/accuracy": 0.9}, {"step": 1}]) as progress:
        progress.update(2, {"val/accuracy": 0.5})
        progress.update(3, {"val/accuracy": 0.95})
        progress.update(4, {"val/accuracy": 0.4})
    second, third, fourth = capsys.readouterr().out.splitlines()
    assert "val 0.500 best 0.900" in second and "val 0.950 best 0.950" in third and "val 0.400 best 0.950" in fourth


def test_a_supervised_run_shows_its_loss(capsys):
    with Progress(3, shown=TASKS["sft"].shown) as progress:
        progress.update(1, {"sft/loss": 1.25})
        progress.update(2, {"sft/loss": 1.0, "val/loss": 1.5})
        progress.update(3, {"sft/loss": 0.5, "val/loss": 2.0})
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/3  loss  1.250  left")
    assert "val loss 1.500 best 1.500" in second and "val loss 2.000 best 1.500" in third


def test_a_task_of_the_user_shows_its_loss_and_its_best_metric(capsys):
    accuracy = {"policy/accuracy": Metric("Pairs.", "share", "max")}
    with Progress(1, shown=TaskSpec(str, best="policy/accuracy", metrics=accuracy).shown) as progress:
        progress.update(1, {"policy/accuracy": 0.75, "policy/loss": 0.5, "policy/grad_norm": 1.0})
    assert capsys.readouterr().out.startswith("step 1/1  loss  0.500  accuracy  0.750  grad 1.000")
    assert TASKS["rl"].shown == ()


def test_pass_at_k_is_shown_with_its_k(capsys):
    with Progress(3, history=[{"step": 0, "val/accuracy": 0.1, "val/pass@2": 0.2}]) as progress:
        progress.update(1, {"val/accuracy": 0.3, "val/pass@4": 0.5})
    assert "val 0.300 best 0.300 pass@4 0.500" in capsys.readouterr().out


@pytest.mark.parametrize("beside", [True, False])
def test_named_validation_sets_are_shown(capsys, beside):
    with Progress(3) as progress:
        default = {"val/accuracy": 0.3} if beside else {}
        progress.update(1, {**default, "val/math/accuracy": 0.5, "val/math/pass@2": 0.6, "val/code/accuracy": 0.25})
    expected = "val 0.300 best 0.300 math 0.500 code 0.250" if beside else "val math 0.500 code 0.250"
    assert expected in capsys.readouterr().out


def test_a_long_step_tells_its_phase_now_and_then(monkeypatch, caplog):
    monkeypatch.setattr("trainer.process.time_limits.QUIET_S", 0.05)
    timer = Timer()
    with caplog.at_level(logging.INFO), Progress(12, completed=1, timer=timer) as progress, timer("rollout"):
        wait_until(lambda: len(caplog.messages) >= 2)
        progress.update(2, step_metrics(2))
        wait_until(lambda: any(text.startswith("step 3/12: ") for text in caplog.messages))
    assert caplog.messages[0].startswith("step 2/12: rollout for 0:0")


ON_A_TERMINAL = """
import logging, select, sys, threading
from tests.support.metrics import step_metrics
from trainer.metrics.progress import Progress
from trainer.metrics.timing import Timer
from trainer.process.log_setup import show_messages
show_messages()
LOG = logging.getLogger("trainer.some.module")
threads = set(threading.enumerate())
timer = Timer()
try:
    with Progress(60, timer=timer) as progress:
        for step in (1, 2):
            progress.update(step, step_metrics(step))
        with timer("step"), timer("rollout"):
            LOG.info("saved [bold]global_step_2[/bold]")
            LOG.warning("no room for %s", "a " * 100 + "long text")
            select.select([sys.stdin], [], [], 60)
        raise RuntimeError("boom")
except RuntimeError as error:
    for thread in set(threading.enumerate()) - threads:
        thread.join(30)
    LOG.info("raised %s, threads left: %d", error, threading.active_count() - len(threads))
"""


def test_on_a_terminal_it_is_live_and_leaves_cleanly_when_the_run_fails():
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "110", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL], cwd=ROOT, stdout=theirs, stderr=theirs, stdin=theirs, env=environment
    )
    os.close(theirs)
    output, text, seen = b"", "", False
    while True:
        try:
            output += os.read(ours, 65536)
        except OSError:  # how a pty says that the other side is gone
            break
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode(errors="replace"))
        if not seen and re.search(r"left +rollout 0:01", text):  # the clock of the running phase moves
            seen = True
            os.write(ours, b"\n")
    os.close(ours)
    assert process.wait() == 0, text
    for expected in (
        "━━━",
        "2/60",
        "0.520",
        "validation",
        "0.700 best 0.700",
        "tok/s",
        "6,400",
        "rollout 50%  update 25%",
        "saved [bold]global_step_2[/bold]",
        f"WARNING: no room for {'a ' * 100}long text",
        "raised boom, threads left: 0",
    ):
        assert expected in text, text
    assert output.rindex(b"\x1b[?25h") > output.rindex(b"\x1b[?25l"), "the cursor is still hidden"
    assert seen, "the clock of the running phase does not move"
    assert "2/60" in text[: text.index("saved")] and "2/60" in text[text.index("long text") :], "not above the display"


def test_the_time_left_is_that_of_the_last_steps_and_goes_down_within_a_step():
    ends = [100.0, 102.0, 110.0]  # a step of 2 s and one of 8 s
    assert seconds_left(ends, steps=3, now=110.0) == 15.0
    assert seconds_left(ends, steps=3, now=114.0) == 11.0
    assert seconds_left(ends, steps=3, now=500.0) == 0.0
    assert seconds_left(ends, steps=0, now=110.0) == 0.0
    assert seconds_left(ends[:1], steps=3, now=110.0) is None
