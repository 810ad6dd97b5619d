"""The faults that a soak draws from, and how each is done to a job that runs."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.soak.kinds import STEPS, Kind
from tests.soak.processes import with_role
from tests.soak.scene import Workspace
from tests.support import killed_jobs
from tests.support.jobs import send
from tests.support.nodes import Node
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.storage import JOURNAL, open_storage
from trainer.checkpoint.store import open_store
from trainer.sandbox.reaper import is_tracker

_END_S = 60
KILLED = -signal.SIGKILL
STOPPED = 75
PLACES = (*killed_jobs.PLACES, "upload:copied", "upload:published", "export:written")
"""The fail points of steps and saves at which a whole job is killed."""


@dataclass(frozen=True)
class Disturbance:
    """One fault that was drawn for a round."""

    name: str
    after: int
    """Lines that `metrics.jsonl` must have before it."""
    wait: float
    """Share of the time of an uninterrupted job that passes before it, since the fault before or the start."""
    seed: int
    """Of what else is drawn: the process, the way, the duration."""


Act = Callable[[Workspace, int, random.Random], str | None]
"""(workspace, job, numbers) -> what was done; None: there is nothing to do it to yet."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    act: Act
    statuses: tuple[int, ...] = ()
    """Exit statuses other than 0 with which the job may end after it. The same command must then continue the job."""
    applies: Callable[[Kind], bool] = lambda kind: True
    weight: float = 1.0
    needs_disk: bool = False


def draw_faults(kind: Kind, numbers: random.Random, has_disk: bool) -> list[Disturbance]:
    """Draw the faults of one round."""
    names = [name for name, fault in FAULTS.items() if fault.applies(kind) and (has_disk or not fault.needs_disk)]
    chosen = numbers.choices(names, [FAULTS[name].weight for name in names], k=numbers.randint(2, 5))
    after = sorted(numbers.choice([0, numbers.randint(1, STEPS)]) for _ in chosen)
    pause = 0.05 if kind.on_nodes else 0.2  # most of its time passes before the first step
    return [
        Disturbance(name, lines, numbers.uniform(0, pause if lines else 0.5), numbers.getrandbits(32))
        for name, lines in zip(chosen, after, strict=True)
    ]


# ----------------------------------------------------------------------------------------------------------
# Processes


def _kill_job(workspace: Workspace, job: int, numbers: random.Random) -> str:
    processes = workspace.processes(job)
    send(processes, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # a forked job is not our child
        os.waitid(os.P_PID, job, os.WEXITED | os.WNOWAIT)  # psutil would take its exit status
        processes = [process for process in processes if process.pid != job]
    psutil.wait_procs(processes, _END_S)
    return f"{len(processes)} processes"


def _signal_one(role: str, number: signal.Signals) -> Act:
    def act(workspace: Workspace, job: int, numbers: random.Random) -> str | None:
        found = with_role(workspace.processes(job)[1:], role)
        if number == signal.SIGSTOP and role in ("reward", "environment"):
            found = found[1::2]  # without the reapers, which run no user code
        if not found:
            return None
        chosen = numbers.choice(found)
        send([chosen], number)
        return f"{role} {found.index(chosen)} of {len(found)}"

    return act


def _kill_driver(workspace: Workspace, job: int, numbers: random.Random) -> str | None:
    if (driver := workspace.driver(job)) is None:
        return None
    os.kill(driver, signal.SIGKILL)
    return "driver"


def _stop_driver(workspace: Workspace, job: int, numbers: random.Random) -> str | None:
    number, driver = numbers.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]), workspace.driver(job)
    if driver is None or workspace.kind.on_nodes and not _listens(driver):
        return None
    os.kill(driver, number)
    return number.name


def _listens(pid: int) -> bool:
    """Return whether a process handles SIGTERM. A job does not while Python starts."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> signal.SIGTERM - 1 & 1)


def _stop_group(workspace: Workspace, job: int, numbers: random.Random) -> str:
    number = numbers.choice([signal.SIGTERM, signal.SIGUSR1])
    os.killpg(job, number)
    return number.name


def _freeze_job(workspace: Workspace, job: int, numbers: random.Random) -> str:
    processes, seconds = workspace.processes(job), numbers.uniform(1, 15)
    send(processes, signal.SIGSTOP)
    time.sleep(seconds)
    send(processes, signal.SIGCONT)
    return f"{seconds:.0f} s"


# ----------------------------------------------------------------------------------------------------------
# Files and machines


def _fill_disk(workspace: Workspace, job: int, numbers: random.Random) -> str:
    left, seconds = numbers.choice([0, 0, 10_000, 200_000]), numbers.uniform(1, 8)
    with workspace.scene.full_disk(left):
        time.sleep(seconds)
    return f"{left} bytes left for {seconds:.0f} s"


def _damage(workspace: Workspace, job: int, numbers: random.Random) -> str | None:
    """Kill the job and damage its newest checkpoint, if it has another one that is good."""
    store = open_store(str(workspace.local or workspace.root))
    if len(store.steps()) < 2:
        return None
    _kill_job(workspace, job, numbers)
    good = [step for step in store.steps() if _is_good(store.path(step))]
    if len(good) < 2:
        return "killed alone: no two good checkpoints"
    if workspace.local or "disk" in workspace.kind.storages:
        folder = Path(store.path(good[-1]))
        file = numbers.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))
        data, text = _damaged(file.read_bytes(), numbers)
        file.write_bytes(data)
        return f"{text} {file.relative_to(folder)}"
    above = open_storage(store.path(good[-1]))
    name = numbers.choice(sorted(name for name, size in above.list().items() if size))
    data, text = _damaged(above.get(name), numbers)
    above.put(name, data)
    return f"{text} {name.rpartition('/')[2]}"


def _damaged(content: bytes, numbers: random.Random) -> tuple[bytes, str]:
    """Return damaged content, and what was done to it."""
    if numbers.random() < 0.5:
        return content[: numbers.randrange(len(content))], "truncated"
    data, at = bytearray(content), numbers.randrange(len(content))
    data[at] ^= 1 << numbers.randrange(8)
    return bytes(data), "flipped a bit of"


def _is_good(path: str) -> bool:
    try:
        manifests.verify(path, "hash")
    except (ValueError, OSError):
        return False
    return True


def _tear_lines(workspace: Workspace, job: int, numbers: random.Random) -> str | None:
    """Kill the job and leave a part of a line at the end of files to which it appends."""
    file = workspace.run / "metrics.jsonl"
    if not file.exists() or not file.read_bytes():
        return None
    _kill_job(workspace, job, numbers)
    torn = []
    for name in ("metrics.jsonl", "incidents.jsonl", "starts.jsonl"):
        path = workspace.run / name
        if path.exists() and (lines := path.read_bytes().splitlines()) and (not torn or numbers.random() < 0.5):
            with open(path, "ab") as end:
                end.write(lines[-1][: numbers.randrange(1, len(lines[-1]))])
            torn.append(name)
    return ", ".join(torn)


def _damage_journal(workspace: Workspace, job: int, numbers: random.Random) -> str | None:
    """Kill the job, and damage or delete some of its records and of its lists of the groups of a step, or all."""
    directory = workspace.run / JOURNAL
    if not any([*directory.glob("*.arrow"), *directory.glob("*.turns")]):
        return None
    _kill_job(workspace, job, numbers)
    files = sorted(file for file in directory.iterdir() if file.suffix in (".arrow", ".turns"))
    if numbers.random() < 0.2:
        shutil.rmtree(directory)
        return f"deleted {len(files)} files"
    done = []
    for file in numbers.sample(files, numbers.randint(1, len(files))) if files else []:
        if numbers.random() < 0.3:
            file.unlink()
            done.append("deleted one")
        else:
            data, text = _damaged(file.read_bytes(), numbers)
            file.write_bytes(data)
            done.append(f"{text} one")
    return f"{', '.join(done)} of {len(files)} files"


def _lose_machine(workspace: Workspace, job: int, numbers: random.Random) -> str:
    """Kill the job, and delete all that it had on the disk."""
    _kill_job(workspace, job, numbers)
    for path in (workspace.run, workspace.local):
        if path is not None and path.exists():
            shutil.rmtree(path)
    return "run directory and local checkpoints deleted"


def _disturb_store(workspace: Workspace, job: int, numbers: random.Random) -> str:
    share, seconds = numbers.choice([0.1, 0.3, 0.6]), numbers.uniform(1, 10)
    with workspace.scene.faulty_store(numbers, share):
        time.sleep(seconds)
    return f"{share:.0%} of the requests for {seconds:.0f} s"


def _cut_link(workspace: Workspace, job: int, numbers: random.Random) -> str:
    seconds = numbers.uniform(1, 8)
    with workspace.scene.cut_store():
        time.sleep(seconds)
    return f"{seconds:.0f} s"


# ----------------------------------------------------------------------------------------------------------
# The inference server, which is no process of the job


def _kill_server(workspace: Workspace, job: int, numbers: random.Random) -> str | None:
    """Kill the server, which comes back after some seconds, or one of the processes of its engine."""
    server, _ = workspace.server
    family = server.family()
    if numbers.random() < 0.5 and len(family) > 1:
        send([numbers.choice(family[1:])], signal.SIGKILL)
        return "one of its processes"
    seconds = numbers.uniform(0, 5)
    server.kill()
    psutil.wait_procs(family, _END_S)
    time.sleep(seconds)
    server.start()
    return f"started again after {seconds:.0f} s"


def _stop_server(workspace: Workspace, job: int, numbers: random.Random) -> str:
    family, seconds = workspace.server[0].family(), numbers.uniform(1, 20)
    send(family, signal.SIGSTOP)
    time.sleep(seconds)
    send(family, signal.SIGCONT)
    return f"{seconds:.0f} s"


def _hang_engine(workspace: Workspace, job: int, numbers: random.Random) -> str | None:
    """Stop a process of the server's engine for good. The server has to notice it, and to start the engine again."""
    server, _ = workspace.server
    with contextlib.suppress(httpx.TransportError, psutil.Error):  # the server, or its engine, is away
        if server.status()["state"] == "ready":
            found = [process for process in server.engine()[1:] if not is_tracker(process)]
            chosen = numbers.choice(found)
            send([chosen], signal.SIGSTOP)
            return f"process {found.index(chosen)} of {len(found)}"
    return None


def _cut_server(workspace: Workspace, job: int, numbers: random.Random) -> str:
    seconds = numbers.uniform(0, 8)
    with workspace.server[1].cut():
        time.sleep(seconds)
    return f"{seconds:.0f} s"


# ----------------------------------------------------------------------------------------------------------
# Nodes. A new one joins for each that is lost: the numbers of a job with fewer ranks would be rounded in other ways.


def _lose_node(workspace: Workspace, job: int, numbers: random.Random) -> str | None:
    if not (hosts := workspace.cluster.hosts()):
        return None
    lost, seconds = numbers.choice(hosts), numbers.uniform(0, 15)
    workspace.cluster.lose(lost)
    time.sleep(seconds)
    return f"{lost.name}; {workspace.cluster.add().name} joined after {seconds:.0f} s"


def _cut_driver_node(workspace: Workspace, job: int, numbers: random.Random) -> str:
    return _cut_off(workspace.cluster.driver, numbers)


def _cut_off(node: Node, numbers: random.Random) -> str:
    seconds = numbers.uniform(1, 12)
    node.cut()
    time.sleep(seconds)
    node.mend()
    return f"{node.name} for {seconds:.0f} s"


def _cut_node(workspace: Workspace, job: int, numbers: random.Random) -> str | None:
    if not (hosts := workspace.cluster.hosts()):
        return None
    done = _cut_off(numbers.choice(hosts), numbers)
    joined = workspace.cluster.add()  # the job leaves the other one out after another loss
    return f"{done}; then {joined.name} joined"


def _slow_down_node(workspace: Workspace, job: int, numbers: random.Random) -> str | None:
    if not (hosts := workspace.cluster.hosts()):
        return None
    slow, mbit = numbers.choice(hosts), numbers.randint(1, 50)
    slow.slow_down(mbit)
    return f"{slow.name} has {mbit} Mbit/s"


def _lose_driver_node(workspace: Workspace, job: int, numbers: random.Random) -> str:
    lost = workspace.cluster.driver
    workspace.cluster.lose(lost)  # the next start is on another one
    return lost.name


def _has(role: str) -> Callable[[Kind], bool]:
    return lambda kind: role in kind.roles


def _on(*storages: str) -> Callable[[Kind], bool]:
    return lambda kind: kind.storages >= set(storages)


def _served(kind: Kind) -> bool:
    return kind.is_served


def _on_nodes(kind: Kind) -> bool:
    return kind.on_nodes


def _elsewhere(kind: Kind) -> bool:
    return not kind.on_nodes


KILL_IN_SAVE = "kill of the job in a phase of a save"
KILL_IN_ROLLOUTS = "kill of the job in a phase of its rollouts"
FAULTS: dict[str, Fault] = {
    "kill of the job": Fault(_kill_job, (KILLED,)),
    KILL_IN_SAVE: Fault(_kill_job, (KILLED,), _elsewhere),  # ranks on nodes do not know the driver's fail point
    KILL_IN_ROLLOUTS: Fault(_kill_job, (KILLED,), lambda kind: bool(kind.phases), 2),
    "kill of the driver": Fault(_kill_driver, (KILLED,)),
    "kill of the launcher": Fault(_signal_one("launcher", signal.SIGKILL), (1,), lambda kind: not kind.with_ray, 0.5),
    "kill of a rank": Fault(_signal_one("rank", signal.SIGKILL), applies=_has("rank")),
    "kill of an engine": Fault(_signal_one("engine", signal.SIGKILL), applies=_has("engine")),
    "kill of a reward process": Fault(_signal_one("reward", signal.SIGKILL), applies=_has("reward")),
    "kill of an environment process": Fault(
        _signal_one("environment", signal.SIGKILL), applies=_has("environment"), weight=2
    ),
    "stop (hang) of a rank": Fault(_signal_one("rank", signal.SIGSTOP), applies=_has("rank")),
    "stop (hang) of an engine": Fault(_signal_one("engine", signal.SIGSTOP), applies=_has("engine")),
    "stop (hang) of a reward process": Fault(_signal_one("reward", signal.SIGSTOP), applies=_has("reward")),
    "stop (hang) of an environment process": Fault(
        _signal_one("environment", signal.SIGSTOP), applies=_has("environment")
    ),
    "freeze of the whole job": Fault(_freeze_job, weight=0.5),
    "stop request to the driver": Fault(_stop_driver, (STOPPED,)),
    "stop request to the process group": Fault(_stop_group, (STOPPED,), _elsewhere),
    "full disk": Fault(_fill_disk, (1, 2), needs_disk=True),
    "damaged newest checkpoint": Fault(_damage, (KILLED,)),
    "torn lines": Fault(_tear_lines, (KILLED,)),
    "damaged journal": Fault(_damage_journal, (KILLED,), _has("engine"), 1.5),
    "lost machine": Fault(_lose_machine, (KILLED,), _on("store")),
    "errors of the object store": Fault(_disturb_store, (1, 2), _on("store"), 2),
    "cut link to the object store": Fault(_cut_link, (1, 2), _on("store"), 2),
    "kill of the inference server": Fault(_kill_server, (), _served, 3),
    "stop (hang) of the inference server": Fault(_stop_server, (), _served, 3),
    "stop (hang) of the server's engine": Fault(_hang_engine, (), _served, 3),
    "cut link to the inference server": Fault(_cut_server, (), _served, 3),
    "lost node": Fault(_lose_node, (), _on_nodes, 3),
    "lost node of the driver": Fault(_lose_driver_node, (KILLED,), _on_nodes, 2),
    "cut link of a node": Fault(_cut_node, (), _on_nodes, 3),
    "cut link of the driver's node": Fault(_cut_driver_node, (STOPPED,), _on_nodes, 3),  # a call of Ray may wait
    "slow link of a node": Fault(_slow_down_node, (), _on_nodes, 2),
}


def draw_fail_point(fault: Disturbance, kind: Kind) -> str | None:
    """Draw the fail point of a fault, as `name,n`. None: the fault does not wait for one."""
    numbers = random.Random(fault.seed)
    if fault.name == KILL_IN_SAVE:
        return f"{numbers.choice(PLACES)},{numbers.randint(1, 3)}"
    if fault.name == KILL_IN_ROLLOUTS:
        return f"{numbers.choice(kind.phases)},{numbers.randint(1, 8)}"
    return None
