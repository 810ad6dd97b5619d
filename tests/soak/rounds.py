"""One round: a job, disturbed and restarted with the same command until it is done."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.soak.faults import FAULTS, Disturbance, draw_fail_point, draw_faults
from tests.soak.kinds import LIMITS, Kind, draw_kind
from tests.soak.outcomes import Outcome, difference, outcome_of
from tests.soak.scene import Scene, Workspace
from tests.support.forks import fork_server
from tests.support.jobs import environment, send

_POLL_INTERVAL_S = 0.02
_MORE_STARTS = 4
"""A job may be started this many times more than it has faults."""
IDENTICAL, DIFFERENT, STUCK, WRONG_STATUS, LEFT = (
    "identical",
    "different",
    "stuck",
    "wrong exit status",
    "left processes",
)


class RoundFailed(Exception):
    """A round ended in another way than it must."""

    def __init__(self, outcome: str, text: str):
        super().__init__(text)
        self.outcome = outcome


@dataclasses.dataclass
class Report:
    """What happened in a round: a line of the file of results."""

    round: int
    seed: int
    kind: str
    outcome: str = IDENTICAL
    difference: str = ""
    faults: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    starts: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    began: str = dataclasses.field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    def line(self) -> str:
        return json.dumps(dataclasses.asdict(self))


@dataclasses.dataclass
class Uninterrupted:
    """The outcome of an uninterrupted job of a kind, and its duration."""

    outcome: Outcome
    seconds: float


class Rounds:
    """Runs rounds. Uninterrupted jobs are run when their kind is drawn first, and kept."""

    def __init__(self, scene: Scene, seed: int, kinds: list[str]):
        self._scene = scene
        self._seed = seed
        self._kinds = kinds
        self._uninterrupted: dict[str, Uninterrupted] = {}

    def draw(self, number: int) -> tuple[Kind, list[Disturbance]]:
        """Draw the kind of job and the faults of a round. They depend on the seed and the number alone."""
        numbers = random.Random(f"{self._seed} {number}")
        kind = draw_kind(numbers, self._kinds)
        return kind, draw_faults(kind, numbers, self._scene.has_disk)

    def uninterrupted(self, kind: Kind) -> Uninterrupted:
        """Return what an uninterrupted job of this kind makes."""
        if kind.name not in self._uninterrupted:
            self._scene.empty_store()
            with Workspace(self._scene, kind, self._scene.directory / f"uninterrupted-{kind.name}") as workspace:
                started = time.monotonic()
                attempt = _Attempt(workspace, [], 3600.0)
                status = attempt.run(Report(0, self._seed, kind.name), 1.0)
                seconds = time.monotonic() - started
            assert status == 0, workspace.log.read_text()[-5000:]
            self._uninterrupted[kind.name] = Uninterrupted(outcome_of(kind, workspace.run, workspace.root), seconds)
        return self._uninterrupted[kind.name]

    def run(self, number: int) -> tuple[Report, Path]:
        """Run a round; returns what happened, and the directory of its job."""
        kind, faults = self.draw(number)
        expected = self.uninterrupted(kind)
        report, started = Report(number, self._seed, kind.name), time.monotonic()
        self._scene.empty_store()
        workspace = Workspace(self._scene, kind, self._scene.disk / f"round-{number}")
        try:
            with workspace:
                self._run_to_the_end(workspace, faults, report, expected.seconds)
                self._run_to_the_end(workspace, [], report, expected.seconds)  # nothing is left to do but to clean up
            try:
                found = outcome_of(kind, workspace.run, workspace.root)
            except Exception as error:
                raise RoundFailed(DIFFERENT, f"{type(error).__name__}: {error}") from error
            if text := difference(found, expected.outcome):
                raise RoundFailed(DIFFERENT, text)
        except RoundFailed as failure:
            report.outcome, report.difference = failure.outcome, str(failure)
        report.seconds = round(time.monotonic() - started, 1)
        return report, workspace.directory

    def _run_to_the_end(self, workspace: Workspace, faults: list[Disturbance], report: Report, seconds: float) -> None:
        left = list(faults)
        deadline_s = 30 * seconds + 240
        for _ in range(len(faults) + _MORE_STARTS):
            attempt = _Attempt(workspace, left, deadline_s)
            begun, already = time.monotonic(), len(report.faults)
            status = attempt.run(report, seconds)
            report.starts.append({"status": status, "seconds": round(time.monotonic() - begun, 1)})
            done = report.faults[already:]
            for fault in done:
                fault["recovered"] = "in the run"
            if status == 0:
                return
            allowed = {status for fault in done for status in FAULTS[fault["name"]].statuses}
            if status not in allowed:
                text = f"the job ended with {status} after {[fault['name'] for fault in done]}"
                raise RoundFailed(WRONG_STATUS, f"{text}: {_last_lines(workspace.log)}")
            cause = [fault for fault in done if status in FAULTS[fault["name"]].statuses][-1]
            cause["recovered"] = "restart"
        raise RoundFailed(STUCK, f"the job is not done after {len(faults) + _MORE_STARTS} starts")


class _Attempt:
    """One start of a job.

    Args:
        faults: those that are still to come. What is done to the job is taken from it.
        deadline_s: longest time that the job may take.
    """

    def __init__(self, workspace: Workspace, faults: list[Disturbance], deadline_s: float):
        self._workspace = workspace
        self._faults = faults
        self._deadline_s = deadline_s

    def run(self, report: Report, seconds: float) -> int:
        """Run the job until it ends; returns its exit status.

        Raises:
            RoundFailed: it does not end, or leaves processes behind.
        """
        reached, env = self._fail_point(report)
        self._job = self._start(env)
        started = last = time.monotonic()
        due = last + self._wait(seconds)
        try:
            while self._job.poll() is None:
                now = time.monotonic()
                self._workspace.disturb_fleet()
                if now - started > self._deadline_s:
                    self._show_stuck()
                    raise RoundFailed(STUCK, f"the job did not end within {self._deadline_s:.0f} s")
                if self._faults and self._is_due(now > due, reached) and self._disturb(report, now - started, reached):
                    reached, due = None, time.monotonic() + self._wait(seconds)
                time.sleep(_POLL_INTERVAL_S)
        except AssertionError as error:
            raise RoundFailed(LEFT, str(error)) from error
        except BaseException:
            send(self._workspace.processes(self._job.pid), 9)
            raise
        cluster = self._workspace.cluster
        # If the driver's node is lost, ranks and engines end only when Ray notices. The next start must bear that.
        if cluster and cluster.has_driver and (left := cluster.left()):
            raise RoundFailed(LEFT, f"ranks or engines of a job that has ended: {left}")
        return self._job.returncode

    def _is_due(self, has_waited: bool, reached: Path | None) -> bool:
        if reached:
            return reached.exists()
        return has_waited and self._workspace.lines() >= self._faults[0].after

    def _wait(self, seconds: float) -> float:
        return self._faults[0].wait * seconds if self._faults else 0.0

    def _fail_point(self, report: Report) -> tuple[Path | None, dict[str, str]]:
        """If the next fault is a kill in a phase, return the file that says when to kill, and the job's environment."""
        self._point = draw_fail_point(self._faults[0], self._workspace.kind) if self._faults else None
        if self._point is None:
            return None, {}
        reached = self._workspace.directory / f"reached-{len(report.starts)}"
        return reached, {"TRAINER_FAILPOINT": f"{self._point},{reached}"}

    def _disturb(self, report: Report, at_s: float, reached: Path | None) -> bool:
        """Do the next fault, if there is something to do it to; returns whether it was done."""
        fault = self._faults[0]
        waits = draw_fail_point(fault, self._workspace.kind) is not None
        name = "kill of the job" if waits and not reached else fault.name
        try:
            done = FAULTS[name].act(self._workspace, self._job.pid, random.Random(fault.seed))
        except ProcessLookupError:  # the job has just ended
            return False
        if done is None:
            return False
        detail = self._point if reached else done
        report.faults.append({"name": name, "detail": detail, "start": len(report.starts), "at_s": round(at_s, 1)})
        self._faults.pop(0)
        return True

    def _start(self, env: dict[str, str]) -> Any:
        workspace, kind = self._workspace, self._workspace.kind
        env = {**environment(), **workspace.scene.environment, **env}
        env["TRAINER_TIME_LIMITS"] = f"{LIMITS} {kind.limits}"
        with workspace.log.open("a") as log:
            if kind.with_ray:
                command = [sys.executable, "-m", "trainer", kind.job, *workspace.overrides]
                command = workspace.cluster.driver.command(*command) if workspace.cluster else command
                return subprocess.Popen(
                    command, cwd=workspace.directory, env=env, stdout=log, stderr=log, start_new_session=True
                )
            return fork_server().start(
                "tests.soak.processes:run",
                *(kind.job, *workspace.overrides),
                cwd=workspace.directory,
                env=env,
                stdout=log,
                patience_s=60,
            )

    def _show_stuck(self) -> None:
        """Write what the processes of the job do to its log."""
        with self._workspace.log.open("a") as log:
            for process in self._workspace.processes(self._job.pid):
                log.write(f"\nSTUCK {process.pid} {process.status()} {' '.join(process.cmdline())[-200:]}\n")
                log.flush()
                if shutil.which("py-spy"):
                    subprocess.run(["py-spy", "dump", "--nonblocking", "--pid", str(process.pid)], stdout=log)


def _last_lines(log: Path) -> str:
    return " | ".join(log.read_text().strip().splitlines()[-3:])
