"""The stacks of processes that do not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from trainer.cluster.stacks import py_spy_stacks

STANDS = """
import time
from trainer.cluster.stacks import allow_stacks

def stands():
    print("here", flush=True)
    time.sleep(600)

allow_stacks()
stands()
"""


def test_the_stacks_of_a_stopped_process_are_read_from_outside():
    """py-spy is none of its parents."""
    with subprocess.Popen([sys.executable, "-c", STANDS], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "here\n"
            os.kill(process.pid, signal.SIGSTOP)
            gone, stopped = py_spy_stacks([2**22 + 1, process.pid])
        finally:
            process.kill()
    assert gone.startswith("The process does not answer, and py-spy failed")
    assert "stands (<string>:" in stopped
