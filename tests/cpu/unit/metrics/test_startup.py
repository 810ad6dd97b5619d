"""The display of the start-up."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import logging, time
from trainer.metrics.timing import logged_stages
from trainer.process import time_limits
from trainer.process.log_setup import show_messages
from trainer.process.startup import stage
from trainer.metrics.progress import Progress
show_messages()
time_limits.LONG_STAGE_S = time_limits.POLL_INTERVAL_S = 0.05
with logged_stages():
    with stage("starting Ray"), stage("joining it"):
        time.sleep(0.5)
    with stage("a quick one"):
        pass
    logging.getLogger("trainer.x").info("a message")
    with Progress(3) as display:
        display.update(1, {"reward/mean": 0.5})
        time.sleep(0.5)
    with stage("drawing"):
        time.sleep(0.5)
"""


def test_a_long_stage_is_logged_in_one_line():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    shown = done.stdout.splitlines()
    assert [line for line in shown if not line.startswith("step")] == ["joining it …", "a message", "drawing …"]
