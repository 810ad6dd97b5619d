"""A Slurm cluster on this machine: the real scheduler, with state, keys and ports of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.support.jobs import environment, kill_all
from tests.support.lacking import lacking
from tests.support.nodes import Node
from tests.support.ports import reserved_port
from trainer.cluster.supervisor import signal_on_death_of_parent

SCRIPT = Path(__file__).resolve().parents[2] / "examples/slurm/train.sbatch"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
_START_S = 60.0
CPUS, MEMORY_MB = 2, 1000
"""Of each node, as Slurm counts them. It holds no job to them."""
_CONFIG = """
ClusterName=tests
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=6
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmdParameters=config_overrides
SlurmdTimeout=5
MessageTimeout=4
TCPTimeout=1
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=1
TaskPlugin=task/none
PartitionName=all Nodes=ALL Default=YES
"""
"""A job that was requeued waits for `cred_expire` seconds. A silent node is lost after `SlurmdTimeout`."""


class Slurm(contextlib.ExitStack):
    """A Slurm cluster for as long as the block runs. Everything that it has started ends with it.

    Args:
        names: names of the nodes, if they are all this machine.
        nodes: the nodes, if they are machines of their own. The first one runs the controller, too.
    """

    def __init__(self, names: Sequence[str] = (), nodes: Sequence[Node] = ()):
        super().__init__()
        self._nodes = {node.name: node for node in nodes}
        self.names = [*names, *self._nodes]
        self._daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> Slurm:
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
        if missing:
            lacking(
                "SLURM",
                f"{', '.join(missing)} not installed (Debian's packages slurmctld, slurmd, slurm-client and munge)",
            )
        self.directory = Path(tempfile.mkdtemp(prefix="slurm"))  # a socket needs a short path
        self.directory.chmod(0o755)
        self.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.callback(self._end)
        self._env = {**environment(), "SLURM_CONF": str(self.directory / "slurm.conf")}
        self._env["PATH"] = f"{Path(sys.executable).parent}:{path}"
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def submit(self, *arguments: str, options: Sequence[str] = ()) -> str:
        """Submit the script of the examples from the directory of the job; return the job's id."""
        job = self.run("sbatch", "--parsable", f"--output={self.directory}/log", *options, str(SCRIPT), *arguments)
        return job.strip()

    def run(self, *command: str) -> str:
        """Run a command of Slurm; return its output."""
        done = subprocess.run(self._on(self.names[0], command), env=self._env, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    @property
    def log(self) -> str:
        """The output of the job so far."""
        path = self.directory / "log"
        return path.read_text() if path.exists() else ""

    def state(self, job: str, key: str = "JobState") -> str:
        """Return a value of the job that Slurm knows, such as JobState."""
        return re.search(rf"\b{key}=(\S*)", self.run("scontrol", "show", "job", job))[1]

    def wait_for(self, text: str, after: int = 0) -> int:
        """Wait until the job has written a text that matches, after a place in its output; return the place after it.

        The time limit of the test ends a wait for something that never happens.
        """
        while not (found := re.compile(text, re.DOTALL).search(self.log, after)):
            time.sleep(0.1)
        return found.end()

    def wait_for_state(self, job: str, *states: str) -> str:
        """Wait until the job is in one of these states; return it."""
        while (state := self.state(job)) not in states:
            time.sleep(0.2)
        return state

    def lose(self, name: str) -> None:
        """Kill everything of a node, as if its power failed."""
        if name in self._nodes:
            self._nodes[name].lose()
            return
        daemon = self._daemons[name]
        jobs = [one for one in self._processes() if one.environ().get("SLURMD_NODENAME") == name]
        # Those that would report the end of a job come first.
        kill_all([psutil.Process(daemon.pid), *self._steps(jobs), *jobs])
        daemon.wait()

    @staticmethod
    def _steps(jobs: Sequence[psutil.Process]) -> set[psutil.Process]:
        """Slurm's own processes of these jobs. They overwrite their environment."""
        found = set()
        for one in jobs:
            with contextlib.suppress(psutil.NoSuchProcess):
                if (parent := one.parent()) is not None and parent.name() == "slurmstepd":
                    found.add(parent)
        return found

    def _start(self) -> None:
        (self.directory / "state").mkdir()
        key = self.directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        with contextlib.ExitStack() as stack:
            controller, *ports = (stack.enter_context(reserved_port()) for _ in range(1 + len(self.names)))
            host, own = os.uname().nodename, self._nodes.get(self.names[0])
            text = _CONFIG.format(
                user=psutil.Process().username(),
                directory=self.directory,
                host=own.name if own else host,
                address=own.address if own else "127.0.0.1",
                port=controller,
            )
            for name, port in zip(self.names, ports, strict=True):
                node = self._nodes.get(name)
                place = f"{name} NodeAddr={node.address}" if node else f"{host} NodeAddr=127.0.0.1"
                text += f"NodeName={name} NodeHostname={place} Port={port} CPUs={CPUS} RealMemory={MEMORY_MB}\n"
            Path(self._env["SLURM_CONF"]).write_text(text)
            files = {"key-file": key.name, "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
            options = [f"--{option}={self.directory}/{name}" for option, name in files.items()]
            self._daemon("munged", "munged", "--foreground", *options)
            self._daemon("slurmctld", "slurmctld", "-D", "-c")
            for name in self.names:
                (self.directory / name).mkdir()
                self._daemon(name, "slurmd", "-D", "-N", name)
            limit = time.monotonic() + _START_S
            while not self._is_ready():
                ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
                if ended or time.monotonic() > limit:
                    logs = "".join((self.directory / f"{name}.log").read_text() for name in ended or self._daemons)
                    lacking(
                        "SLURM", f"Slurm does not start here: {', '.join(ended) or 'its nodes are not ready'}\n{logs}"
                    )
                time.sleep(0.1)

    def _is_ready(self) -> bool:
        command = self._on(self.names[0], ["sinfo", "--noheader", "--Node", "--format=%T"])
        said = subprocess.run(command, env=self._env, capture_output=True, text=True)
        return said.stdout.split() == ["idle"] * len(self.names)

    def _daemon(self, name: str, *command: str) -> None:
        with open(self.directory / f"{name}.log", "w") as log:
            self._daemons[name] = subprocess.Popen(
                self._on(name, command),
                env=self._env,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: signal_on_death_of_parent(signal.SIGKILL),
            )

    def _on(self, name: str, command: Sequence[str]) -> list[str]:
        node = self._nodes.get(name) or self._nodes.get(self.names[0])
        return node.command(*command) if node else list(command)

    def _processes(self) -> list[psutil.Process]:
        """The daemons, and all that they have started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has just ended, or belongs to somebody else
                if process.environ().get("SLURM_CONF") == self._env["SLURM_CONF"]:
                    found.append(process)
        return found

    def _end(self) -> None:
        while left := self._processes():
            kill_all([*self._steps(left), *left])
            psutil.wait_procs(left, timeout=1)
        for daemon in self._daemons.values():
            daemon.wait()
