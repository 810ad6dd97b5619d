"""Ray for one job."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from trainer.cluster.runtime import still_running


def test_the_end_of_processes_is_waited_for_and_a_zombie_has_ended():
    """What a job does once Ray is down: nobody here reaps the first two."""
    children = [
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"]) for seconds in (0, 0.5, 600)
    ]
    try:
        started = time.monotonic()
        late = still_running([psutil.Process(child.pid) for child in children], timeout_s=5)
        assert [process.pid for process in late] == [children[2].pid] and time.monotonic() - started >= 5
        late[0].kill()
        assert still_running(late, timeout_s=60) == []
    finally:
        for child in children:
            child.kill()
            child.wait()
