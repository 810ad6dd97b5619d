"""`trainer diagnose RUN_DIR`: what happened to a run, what is known to be good, and the next command.

It needs no torch, no Ray and no GPU, and changes nothing, so it may be used on a login node while the job runs.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
from collections import Counter, deque
from datetime import datetime
from functools import partial
from typing import Any

from trainer.checkpoint import last_commit
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.lock import holder
from trainer.checkpoint.manifest import CheckpointError, CorruptCheckpointError
from trainer.checkpoint.store import open_store
from trainer.config.trainer import PROCESSES
from trainer.errors import UserError
from trainer.files.uris import inside, is_url
from trainer.metrics.advice import current_advice
from trainer.metrics.tracker import METRICS_FILE, MetricsLines
from trainer.process.failures import INFRASTRUCTURE, JOB, Incident, read_incidents
from trainer.process.log_setup import ToolParser, escape, run_tool, show
from trainer.process.signals import CONTINUES
from trainer.run.next_command import next_command
from trainer.run.run_metadata import HOLDS_A_RUN, LOG_NAME, STARTS_FILE, last_start, task_of

_SHOWN = 10
_MEMBERS = ("rank", "engine")
_SUSPECT = 2  # incidents of a node after which it counts as bad


def main(argv: list[str] | None = None) -> int:
    """Print what is known about a run; returns 0, or 2 if the directory holds no run."""
    parser = ToolParser(prog="trainer diagnose", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run")
    lines_of = partial(map, partial(escape, lines=False))
    return run_tool(parser, lambda args: show("\n".join(lines_of(diagnose(args.run_dir)))), argv)


def diagnose(run_dir: str) -> list[str]:
    """Return lines for people. Raises UserError: there is no run in `run_dir`, or its metrics are damaged."""
    if is_url(run_dir):
        raise UserError(f"{run_dir}: is a URL; name the run's directory, or give the URL to `trainer checkpoint ls`")
    if not os.path.isdir(run_dir):
        what = "is a file" if os.path.exists(run_dir) else "no such directory"
        raise UserError(f"{run_dir}: {what}; name the directory of a run, which has a {STARTS_FILE}")
    start = last_start(run_dir)
    if start is None:
        if inside := sorted(glob.glob(os.path.join(glob.escape(run_dir), "*", STARTS_FILE))):
            one = os.path.dirname(inside[0])
            raise UserError(f"{run_dir}: holds {len(inside)} runs and is none; name one of them, such as {one}")
        raise UserError(f"{run_dir}: holds no run ({STARTS_FILE} is missing or damaged)")
    rows, incidents = MetricsLines(os.path.join(run_dir, METRICS_FILE)), read_incidents(run_dir)
    step = rows.steps[-1] if rows else 0
    task = task_of(start)
    total = task.total_steps
    good, checkpoints = _checkpoints(run_dir, start)
    running, gone = holder(run_dir)
    last_words = _last_words(run_dir)
    lines = [f"run        {run_dir}: step {step} of {total} is logged", *_ending(running, gone, last_words)]
    kinds, cost = Counter(incident.kind for incident in incidents), sum(incident.cost_s for incident in incidents)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    lines += [f"incidents  {counts}; they cost {cost:.0f} s" if incidents else "incidents  none"]
    lines += [f"           {_line(incident)}" for incident in incidents[-_SHOWN:]]
    lines += ["known good", *(f"           {line}" for line in checkpoints)]
    is_refused = good == 0 and any(": DAMAGED" in line for line in checkpoints)
    suspects = bad_nodes(incidents)
    if suspects:
        lines += ["bad nodes  " + ", ".join(f"{node} ({reason})" for node, reason in suspects.items())]
    if running:
        advice = "nothing: wait for it, or stop it with a signal (SIGTERM: it saves and exits with 75)"
    elif good == total:
        advice = "nothing: the last step is saved"
    elif is_refused:
        advice = (
            "a restart is refused: no checkpoint is valid; repair one, resume with the version that wrote it, or start "
            "over with another trainer.run_name"
        )
    else:
        advice = _advice(start, incidents, last_words)
    current = current_advice(rows, start["config"])
    notes = [f"advice     {note} (more: docs/troubleshooting.md)" for note in current]
    return [*lines, *notes, f"next       {advice}"]


def bad_nodes(incidents: list[Incident]) -> dict[str, str]:
    """Return the nodes that should be drained, each with the reason: a GPU error, or several failures. A node that is
    lost takes a rank and an engine with it, which counts once."""
    blamed = [incident for incident in incidents if incident.kind == INFRASTRUCTURE and incident.node]
    counts = Counter((incident.node, incident.role) for incident in blamed if incident.role.endswith(_MEMBERS))
    reasons = {node: f"{count} incidents" for (node, _), count in counts.items() if count >= _SUSPECT}
    return reasons | {incident.node: incident.cause for incident in blamed if incident.cause.startswith("GPU error")}


def _checkpoints(run_dir: str, start: dict[str, Any]) -> tuple[int, list[str]]:
    root = last_commit.read(run_dir) or inside(start["directory"], start["config"]["trainer"]["ckpt_path"])
    newest, lines = _newest(root)
    local = start["config"]["trainer"].get("ckpt_cache_dir")
    if isinstance(local, str):
        local = inside(start["directory"], local)
        nearest, near = _newest(local)
        if nearest > newest:
            newest, lines = nearest, [*near[:-1], f"{near[-1]}; not uploaded", *lines]
        elif not os.path.isdir(local):
            lines.append(f"checkpoints that were not uploaded may be in {local} on {start.get('host')}")
    return newest, lines or [f"no checkpoint in {root}: the run would start again from its initial weights"]


def _newest(root: str) -> tuple[int, list[str]]:
    """Return the newest step in `root` whose files have their sizes (0: none), and lines about it and newer ones."""
    store = open_store(root)
    lines: list[str] = []
    for step in reversed(store.steps()):
        path = store.path(step)
        try:
            checkpoint = manifests.verify(path, "size")
        except CheckpointError as error:
            if isinstance(error.__cause__, PermissionError):
                raise error.__cause__ from None
            if step in store.steps():  # a running job may have deleted it meanwhile
                finding = "DAMAGED" if isinstance(error, CorruptCheckpointError) else "NOT READ"
                lines.append(f"{path}: {finding} ({str(error).removeprefix(f'{path}: ')})")
            continue
        check = f"sizes agree; `trainer checkpoint verify {shlex.quote(path)}` reads every byte"
        return step, [*lines, f"{path}, saved at {checkpoint.manifest['saved_at']} ({check})"]
    return 0, lines


def _ending(running: str | None, gone: str | None, last_words: str) -> list[str]:
    if running:
        return [f"now        it is running: {running}"]
    if gone and not last_words.endswith(CONTINUES):  # else its watch has killed it, and logged why
        return [
            f"ended      without a last message: {gone} was killed, perhaps because memory ran out, or its machine "
            "went down",
            f"last line  {last_words}",
        ]
    return [f"ended      {last_words}"]


def _last_words(run_dir: str) -> str:
    """Return the last line of the log about the end of the run, without its time: not one about the report, or of a
    later start that was refused because there is a run."""
    try:
        with open(os.path.join(run_dir, LOG_NAME), errors="replace") as file:
            tail = deque(file, 1000)  # the last words are among these lines
    except FileNotFoundError:
        return "nothing was logged"
    refused = False
    for line in (line.rstrip("\n").split(" ", 2)[-1] for line in reversed(tail) if line.strip()):
        if line.startswith("error: ") and f": {HOLDS_A_RUN}; " in line:
            refused = True
        elif not line.startswith("report: ") and not (refused and line.endswith(" …")):
            return line
    return "nothing was logged"


def _line(incident: Incident) -> str:
    where = f" on {incident.node}" if incident.node else ""
    return (
        f"{incident.time[:19]}  step {incident.step}  {incident.name}{where}: {incident.cause} ({incident.kind}); "
        f"{incident.action}; {incident.text}"
    )


def _advice(start: dict[str, Any], incidents: list[Incident], last_words: str) -> str:
    since = [incident for incident in incidents if not _is_older(incident.time, start.get("time"))]
    at_fault = not since or since[-1].kind == JOB and since[-1].action == "ended the run"  # none: it was refused
    again = "change what the sentence above names, then: " if at_fault and last_words.startswith("error") else ""
    changes: dict[str, str | None] = {}
    if _is_older(start["config"]["trainer"].get("deadline"), datetime.now().isoformat()):
        changes["trainer.deadline"] = None
    address = start["config"]["trainer"].get("ray_address")
    if address not in (None, PROCESSES) and (nodes := bad_nodes(incidents)):
        drained = sorted({*nodes, *start["config"]["trainer"].get("excluded_nodes", [])})
        changes["trainer.excluded_nodes"] = f"[{','.join(drained)}]"
    return again + next_command(start, changes)


def _is_older(when: Any, than: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # null, or damaged
        return datetime.fromisoformat(when).timestamp() < datetime.fromisoformat(than).timestamp()
    return False
