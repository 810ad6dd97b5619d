"""Ray for one job."""

from __future__ import annotations

import subprocess
import sys

import psutil

from trainer.cluster.runtime import still_running


def test_the_end_of_processes_is_waited_for_and_a_zombie_has_ended():
    """What a job does once Ray is down: nobody here reaps the first two."""
    children = [
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"]) for seconds in (0, 0.5, 600)
    ]
    try:
        processes = [psutil.Process(child.pid) for child in children]
        assert still_running(processes[:2], timeout_s=60) == []
        assert still_running(processes, timeout_s=0.1) == processes[2:]
        processes[2].kill()
        assert still_running(processes, timeout_s=60) == []
    finally:
        for child in children:
            child.kill()
            child.wait()
