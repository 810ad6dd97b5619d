"""The end of processes."""

from __future__ import annotations

import subprocess
import sys

import psutil

from trainer.cluster.supervisor import end_all, is_running


def test_a_zombie_has_ended():
    """In a container whose first process reaps no children, a process that has ended stays a zombie."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process = psutil.Process(child.pid)
    assert is_running(process)
    end_all([process])
    while process.status() != psutil.STATUS_ZOMBIE:
        pass
    assert not is_running(process)
    child.wait()
    assert not is_running(process)
