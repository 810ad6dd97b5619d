"""The lock of a run directory that several nodes share. Their processes do not see each other; one clock is wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from tests.support.clocks import wrong_clock
from tests.support.nodes import Node, Nodes

HOLD = """
import sys
from trainer.checkpoint.lock import RunLock
from trainer.errors import UserError
lock = RunLock(sys.argv[1], lease_s=3.0)
try:
    print(lock.acquire(), flush=True)
    for line in sys.stdin:
        lock.check()
        print("mine", flush=True)
except UserError as error:
    print("refused:", error, flush=True)
"""


class Owner:
    """A process on a node that wants the lock, and asks whether it still has it at every line that it is sent."""

    def __init__(self, node: Node, directory: Path, clock: Mapping[str, str] = MappingProxyType({})):
        self.process = subprocess.Popen(
            node.command(sys.executable, "-c", HOLD, str(directory)),
            env={**os.environ, **clock},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> str:
        return self.process.stdout.readline().strip()

    def still(self) -> str:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        waiting = psutil.Process(self.process.pid)  # `nsenter`, which stops with its child
        for process in [*waiting.children(recursive=True), waiting]:
            process.send_signal(number)


@pytest.mark.timeout(900)
def test_the_lock_holds_across_nodes_whose_clocks_differ(tmp_path, tmp_path_factory):
    """To a clock that is ahead, a heartbeat is old; to one that is behind, it has not come yet."""
    ahead = wrong_clock(tmp_path_factory.mktemp("clock"), 3600)
    behind = ahead | {"CLOCK_OFFSET_S": "-3600"}
    with Nodes() as nodes:
        first, second = nodes.add(), nodes.add()
        for clock, offset_s in ((ahead, 3600), (behind, -3600)):
            read = [sys.executable, "-S", "-c", "import time; print(time.time())"]
            shown = subprocess.run(read, env={**os.environ, **clock}, capture_output=True, text=True, check=True).stdout
            assert float(shown) == pytest.approx(time.time() + offset_s, abs=60)
        owner = Owner(first, tmp_path)
        assert owner.answer() == "None"
        assert "in use by process" in Owner(second, tmp_path, ahead).answer()

        owner.signal(signal.SIGSTOP)  # it cannot know that it takes part in nothing any more
        successor = Owner(second, tmp_path, behind)
        assert "no heartbeat for 3 s" in successor.answer()
        owner.signal(signal.SIGCONT)
        assert owner.still().startswith("refused:") and successor.still() == "mine"

        second.lose()
        last = Owner(first, tmp_path)
        assert f"on {second.name}" in last.answer() and last.still() == "mine"
