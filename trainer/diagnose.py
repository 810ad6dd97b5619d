"""`trainer diagnose RUN_DIR`: what happened to a run, what is known to be good, and the next command.

It needs no torch, no Ray and no GPU, and changes nothing, so it may be used on a login node while the job runs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from typing import Any

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint import record
from trainer.checkpoint.lock import holder
from trainer.checkpoint.manifest import DamagedError
from trainer.checkpoint.store import open_store
from trainer.config.trainer import PROCESSES
from trainer.documents import is_count, parse_object
from trainer.errors import UserError
from trainer.incidents import INFRASTRUCTURE, JOB, Incident, read_incidents
from trainer.metrics.tracker import METRICS_FILE, read_metrics
from trainer.output import escape, guard_output, show
from trainer.places import inside
from trainer.run.aftermath import compare_since
from trainer.run.starts import LOG_NAME, STARTS_FILE

_SHOWN = 10
_MEMBERS = ("rank", "engine")
_SUSPECT = 2  # incidents of a node after which it counts as bad
_RESUME = "trainer.resume_mode="
_MODULES = {"trainer.main": "train", "trainer.sft": "sft"}
_START = {"command": [str], "directory": str, "config": {"trainer": {"total_steps": is_count, "ckpt_path": str}}}


def main(argv: list[str] | None = None) -> int:
    """Print what is known about a run; returns 0, or 2 if the directory holds no run."""
    guard_output()
    parser = argparse.ArgumentParser(prog="trainer diagnose", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run")
    run_dir = parser.parse_args(argv).run_dir
    try:
        lines = diagnose(run_dir)
    except (UserError, OSError) as error:
        show(f"error: {error}", error=True)
        return 2
    show("\n".join(escape(line, lines=False) for line in lines))
    return 0


def diagnose(run_dir: str) -> list[str]:
    """Return lines for people.

    Raises:
        UserError: there is no run in `run_dir`, or its metrics are damaged.
    """
    start = _last_start(run_dir)
    if start is None:
        raise UserError(f"{run_dir}: holds no run ({STARTS_FILE} is missing or damaged)")
    rows, incidents = read_metrics(os.path.join(run_dir, METRICS_FILE)), read_incidents(run_dir)
    step = rows[-1]["step"] if rows else 0
    total = _total_steps(start)
    good, checkpoints = _checkpoints(run_dir, start)
    running, gone = holder(run_dir)
    last_words = _last_words(run_dir)
    lines = [f"run        {run_dir}: step {step} of {total} is logged", *_ending(running, gone, last_words)]
    lines += ["incidents  none" if not incidents else f"incidents  {_counts(incidents)}"]
    lines += [f"           {_line(one)}" for one in incidents[-_SHOWN:]]
    lines += ["known good", *(f"           {line}" for line in checkpoints)]
    if incidents and (since := compare_since(rows, incidents[-1].step)):
        lines += [f"since      {since[0]}", *(f"           {line}" for line in since[1:])]
    suspects = bad_nodes(incidents)
    if suspects:
        lines += ["bad nodes  " + ", ".join(f"{node} ({reason})" for node, reason in suspects.items())]
    finished = good == total and not running
    lines += ["next       " + _advice(start, running, finished, incidents, last_words)]
    return lines


def bad_nodes(incidents: list[Incident]) -> dict[str, str]:
    """Return the nodes that should be drained, each with the reason: a GPU error, or several failures.

    A node that is lost takes a rank and an engine with it, which counts once.
    """
    blamed = [one for one in incidents if one.kind == INFRASTRUCTURE and one.node]
    counts = Counter((one.node, one.role) for one in blamed if one.role.endswith(_MEMBERS))
    reasons = {node: f"{count} incidents" for (node, _), count in counts.items() if count >= _SUSPECT}
    return reasons | {one.node: one.cause for one in blamed if one.cause.startswith("GPU error")}


def _last_start(run_dir: str) -> dict[str, Any] | None:
    try:
        with open(os.path.join(run_dir, STARTS_FILE), "rb") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            return parse_object(line, _START)
        except ValueError:
            continue
    return None


def _total_steps(start: dict[str, Any]) -> int:
    sft = start["config"].get("sft", {}).get("steps")
    supervised = _command(start)[:2] == ["trainer", "sft"]
    return sft if supervised and is_count(sft) else start["config"]["trainer"]["total_steps"]


def _command(start: dict[str, Any]) -> list[str]:
    """Return the command of a start as a user gives it; as it was recorded if it was not on the command line."""
    words = start["command"]
    for i, word in enumerate(words):
        if word in _MODULES:
            return ["trainer", _MODULES[word], *words[i + 1 :]]
        if os.path.basename(word) == "trainer" and words[i + 1 : i + 2] in [[name] for name in _MODULES.values()]:
            return ["trainer", *words[i + 1 :]]
    return words


def _checkpoints(run_dir: str, start: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the step of the newest valid checkpoint (0: none), and lines about the newest ones."""
    place = record.read(run_dir) or inside(start["directory"], start["config"]["trainer"]["ckpt_path"])
    newest, lines = _newest(place)
    local = start["config"]["trainer"].get("ckpt_local_dir")
    if isinstance(local, str):
        local = inside(start["directory"], local)
        nearest, near = _newest(local)
        if nearest > newest:
            newest, lines = nearest, [*near[:-1], f"{near[-1]}; not uploaded", *lines]
        elif not os.path.isdir(local):
            lines.append(f"checkpoints that were not uploaded may be in {local} on {start.get('host')}")
    return newest, lines or [f"no checkpoint in {place}: the run would start again from its start weights"]


def _newest(place: str) -> tuple[int, list[str]]:
    """Return the step of the newest valid checkpoint in a place (0: none), and lines about it and newer ones."""
    store = open_store(place)
    lines = []
    for step in reversed(store.steps()):
        path = store.path(step)
        try:
            checkpoint = manifests.verify(path, "size", whole=False)
        except DamagedError as error:
            lines.append(f"{path}: DAMAGED ({str(error).removeprefix(f'{path}: ')})")
            continue
        check = "sizes agree; `trainer checkpoint verify` reads all bytes"
        if checkpoint.nodes:
            check = f"on the disks of {', '.join(sorted(checkpoint.nodes))}"
        return step, [*lines, f"{path}, saved at {checkpoint.manifest['saved_at']} ({check})"]
    return 0, lines


def _ending(running: str | None, gone: str | None, last_words: str) -> list[str]:
    if running:
        return [f"now        it is running: {running}"]
    if gone:
        return [f"ended      without a word: {gone} was killed, or its machine went down", f"last line  {last_words}"]
    return [f"ended      {last_words}"]


def _last_words(run_dir: str) -> str:
    """Return the last line of the log that is not about the report, without its time."""
    try:
        with open(os.path.join(run_dir, LOG_NAME), errors="replace") as file:
            lines = [line.split(" ", 2)[-1] for line in file.read().splitlines() if line.strip()]
    except FileNotFoundError:
        return "nothing was logged"
    return next((line for line in reversed(lines) if not line.startswith("report: ")), "nothing was logged")


def _counts(incidents: list[Incident]) -> str:
    kinds = Counter(one.kind for one in incidents)
    cost = sum(one.cost_s for one in incidents)
    return f"{', '.join(f'{count} {kind}' for kind, count in kinds.items())}; they cost {cost:.0f} s"


def _line(one: Incident) -> str:
    where = f" on {one.node}" if one.node else ""
    return f"{one.time[:19]}  step {one.step}  {one.name}{where}: {one.cause} ({one.kind}); {one.action}; {one.text}"


def _advice(
    start: dict[str, Any],
    running: str | None,
    finished: bool,
    incidents: list[Incident],
    last_words: str,
) -> str:
    if running:
        return "nothing: wait for it, or stop it with a signal (SIGTERM: it saves and exits with 75)"
    if finished:
        return "nothing: the last step is saved"
    at_fault = incidents and incidents[-1].kind == JOB and incidents[-1].action == "ended the run"
    if at_fault and last_words.startswith("error"):
        again = "change what the sentence above names, then: "
    else:
        again = ""
    arguments = _command(start)
    if not any(argument.lstrip("+").startswith(_RESUME) for argument in arguments):
        arguments = [*arguments, f"{_RESUME}latest"]
    address = start["config"]["trainer"].get("ray_address")
    if address not in (None, PROCESSES) and (nodes := bad_nodes(incidents)):
        drained = sorted({*nodes, *start["config"]["trainer"].get("drained_nodes", [])})
        arguments = [*arguments, f"trainer.drained_nodes=[{','.join(drained)}]"]
    return f"{again}cd {shlex.quote(start['directory'])} && {shlex.join(arguments)}"


if __name__ == "__main__":
    sys.exit(main())
