"""Clocks that jump, or that differ between processes."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.checkpoints import manager, save
from trainer.checkpoint.__main__ import main
from trainer.checkpoint.lock import RunLock
from trainer.errors import UserError

HOLDS = """
import sys, time
from trainer.checkpoint.lock import RunLock
with RunLock(sys.argv[1], 3) as lock:
    lock.acquire()
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(("hours", "age"), [(-50, "2 d"), (-3, "3 h"), (1, "in the future"), (10**5, "in the future")])
def test_the_age_of_a_checkpoint_that_another_clock_has_dated(hours, age, tmp_path, capsys):
    saved_at = (datetime.now(UTC) + timedelta(hours=hours)).isoformat(timespec="seconds")
    save(manager(tmp_path), 1, ranks=1, saved_at=saved_at)
    assert main(["ls", str(tmp_path)]) == 0
    assert f" {age} " in capsys.readouterr().out


def test_an_owner_with_another_clock_since_boot_is_not_taken_for_dead(tmp_path):
    """In a time namespace, every process seems to have started at another time."""
    command = ["unshare", "--time", "--boottime", "100000", "--fork", "--kill-child", sys.executable, "-c", HOLDS]
    holder = subprocess.Popen([*command, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        if holder.stdout.readline() != "held\n":
            pytest.skip(f"no time namespace here: {holder.stderr.read().strip()}")
        with pytest.raises(UserError, match="in use by process"):
            RunLock(str(tmp_path), 30).acquire()
    finally:
        holder.kill()
        holder.wait()
