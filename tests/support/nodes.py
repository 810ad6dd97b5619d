"""Several machines made of one: each has a network address, a name, processes and shared memory of its own."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.support.jobs import environment
from trainer.cluster.supervisor import signal_on_death_of_parent

_NETWORK = "10.214.88"
_PORT = 6379
_INIT = "while :; do sleep 1; done"  # as the first process of a node, it reaps what daemons leave behind


class Node:
    """A machine: namespaces of the kernel for network, processes, mounts, host name and shared memory.

    Args:
        number: it decides the name and the address.
        directory: for the files of this node's Ray.
        switch: id of a process in the namespace of the switch.
    """

    def __init__(self, number: int, directory: Path, switch: int):
        self.name = f"node{number}"
        self.address = f"{_NETWORK}.{number}"
        self._link = f"link{number}"
        self.directory = directory
        self._switch = switch
        # As Debian does it: the name of the machine leads to an address that no other machine reaches.
        hosts = directory / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        script = (
            f"hostname {self.name} && mount -t tmpfs tmpfs /dev/shm && mount --bind {hosts} /etc/hosts && "
            f"ip link set lo up && echo up && {_INIT}"
        )
        self._holder = _hold(
            ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"], script
        )
        self._init = psutil.Process(self._holder.pid).children()[0].pid
        self._processes = os.readlink(f"/proc/{self._init}/ns/pid")
        self.plug_in(self.address)

    def plug_in(self, address: str) -> None:
        """Connect the node to the switch."""
        self.address = address
        _run(self._on_switch(f"ip link add {self._link} type veth peer name eth0 netns {self._init}"))
        _run(self._on_switch(f"ip link set {self._link} master switch"))
        _run(self._on_switch(f"ip link set {self._link} up"))
        _run(self._enter(f"ip address add {address}/24 dev eth0"))
        _run(self._enter("ip link set eth0 up"))

    def command(self, *command: str) -> list[str]:
        """A command line that runs `command` on this node."""
        return self._enter(shlex.join(command))

    def start_ray(self, head: Node | None = None, cpus: int = 1) -> None:
        """Start Ray's daemons on this node: a new cluster, or as a part of the cluster of `head`."""
        first = ["--head", f"--port={_PORT}", "--include-dashboard=false", "--no-monitor"]
        place = [f"--address={head.address}:{_PORT}"] if head else first
        started = subprocess.run(
            self.command(
                str(Path(sys.executable).with_name("ray")), "start", *place, f"--node-ip-address={self.address}",
                f"--temp-dir={self.directory}/ray", f"--num-cpus={cpus}", "--object-store-memory=100000000",
                "--disable-usage-stats", "--include-log-monitor=false",
            ),
            capture_output=True, text=True,
            env={**environment(), "PATH": os.environ["PATH"], "RAY_prestart_worker_first_driver": "0"},
        )  # fmt: skip
        assert started.returncode == 0, started.stdout + started.stderr

    @property
    def ray_address(self) -> str:
        return f"{self.address}:{_PORT}"

    def path(self, path: str) -> Path:
        """A path of this node, as this process reaches it."""
        return Path(f"/proc/{self._init}/root{path}")

    def processes(self) -> list[psutil.Process]:
        """All processes of this node but the first."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):  # it has just ended
                if process.pid != self._init and os.readlink(f"/proc/{process.pid}/ns/pid") == self._processes:
                    found.append(process)
        return found

    def cut(self) -> None:
        """Drop every packet, in both directions. No connection is closed."""
        _run(self._on_switch(f"ip link set {self._link} down"))

    def mend(self) -> None:
        """Undo `cut`."""
        _run(self._on_switch(f"ip link set {self._link} up"))

    def slow_down(self, mbit: int) -> None:
        """Throttle the link, in both directions. Packets wait up to half a second, and some are dropped."""
        rule = f"root tbf rate {mbit}mbit burst 16kb latency 500ms"
        _run(self._on_switch(f"tc qdisc replace dev {self._link} {rule}"))
        _run(self._enter(f"tc qdisc replace dev eth0 {rule}"))

    def lose(self) -> None:
        """Kill all processes on this node, as if its power failed."""
        if self._holder.returncode is not None:
            return  # another process may have the id of its first process by now
        # `nsenter` stops with the command that it runs, and a stopped one would not reap it.
        waiting = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it has just ended
                waiting.append(process.parent())
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._init, signal.SIGKILL)
        for process in filter(None, waiting):
            with contextlib.suppress(psutil.Error):
                process.resume()
        self._holder.wait()

    def _enter(self, command: str) -> list[str]:
        kinds = ["--net", "--mount", "--pid", "--uts", "--ipc"]
        return ["nsenter", f"--target={self._init}", *kinds, f"--wd={os.getcwd()}", *shlex.split(command)]

    def _on_switch(self, command: str) -> list[str]:
        return ["nsenter", f"--target={self._switch}", "--net", *shlex.split(command)]


class Nodes(contextlib.ExitStack):
    """A switch with nodes, for as long as the block runs. Everything on them ends with it."""

    def __init__(self) -> None:
        super().__init__()
        self._made = 0

    def __enter__(self) -> Nodes:
        self._directory = Path(tempfile.mkdtemp(prefix="nodes"))  # Ray's sockets need a short path
        self.callback(shutil.rmtree, self._directory, ignore_errors=True)
        try:
            switch = _hold(["unshare", "--net"], "ip link set lo up && echo up && exec sleep 86400")
            self.callback(_end, switch)
            self._switch = switch.pid
            for command in ("ip link add switch type bridge", "ip link set switch up"):
                _run(["nsenter", f"--target={self._switch}", "--net", *command.split()])
        except OSError as error:
            self.close()
            pytest.skip(f"no network namespaces here: {error}")
        return self

    def add(self) -> Node:
        """Start another node."""
        self._made += 1
        directory = self._directory / f"node{self._made}"
        directory.mkdir()
        node = Node(self._made, directory, self._switch)
        self.callback(node.lose)
        return node

    def cluster(self, size: int, cpus: Sequence[int] | None = None) -> list[Node]:
        """Start `size` nodes and one Ray cluster on them. The first node is its head."""
        head, *others = (self.add() for _ in range(size))
        counts = cpus or [1] * size
        head.start_ray(cpus=counts[0])
        with ThreadPoolExecutor(2) as threads:
            for started in [
                threads.submit(node.start_ray, head, n) for node, n in zip(others, counts[1:], strict=True)
            ]:
                started.result()
        return [head, *others]


def _hold(prefix: Sequence[str], script: str) -> subprocess.Popen:
    """Start a process that prints "up". It ends with this process, and its namespaces with it."""
    holder = subprocess.Popen(
        [*prefix, "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal_on_death_of_parent(signal.SIGKILL),
    )
    if holder.stdout.readline() != "up\n":
        raise OSError(holder.stderr.read().strip())
    return holder


def _end(holder: subprocess.Popen) -> None:
    holder.kill()
    holder.wait()


def _run(command: Sequence[str]) -> None:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where `ip` and `tc` are
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path})
    if done.returncode:
        raise OSError(f"{shlex.join(command)}: {done.stderr.strip()}")


class Asked:
    """A process on a node that watches other nodes."""

    def __init__(self, command: list[str]):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self) -> str:
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.reads()

    def reads(self) -> str:
        """Return the next line that is not Ray's."""
        return next(line.strip() for line in self._process.stdout if "(raylet)" not in line and line[0] != "\t")

    def end(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0
