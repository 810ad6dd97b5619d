"""Disturb small jobs in every way, and compare their results with those of uninterrupted ones.

Run it with `python -m tests.soak --hours 1`. Each round chooses a kind of job and several faults from a seed. The job
is restarted with the same command until it is done. Its metrics, rollouts, exported weights and last checkpoint must be
those of an uninterrupted job. Prints a line for each round and a table of the faults; exits with 1 at the first round
that ends differently, and keeps its directory. `--seed S --round N` repeats the faults of one round, at about the same
moments.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import socketserver
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.kinds import KINDS

_IN_NAMESPACE = "SOAK_IN_MOUNT_NAMESPACE"


def main() -> int:
    """Run the soak, and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--round", type=int, help="run this round alone")
    parser.add_argument("--first", type=int, default=1, help="number of the first round")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of jobs to draw from, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("soak.jsonl"), help="file to which each round adds a line")
    parser.add_argument("--keep", type=Path, default=Path("soak-failed"), help="directory for what has failed")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="print the table of these files instead")
    args = parser.parse_args()
    if args.table:
        from tests.soak.tally import read_rounds, table

        print(table(read_rounds(args.table)))
        return 0
    has_mounts = _enter_namespace()
    if not has_mounts:
        print("no full disks: this user may not mount", flush=True)
    args.kinds = _possible(args.kinds.split(","))
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        return _soak(args, Path(directory), has_mounts)


def _enter_namespace() -> bool:
    """Begin again in a mount namespace of our own, if the machine permits it; returns whether we are in one."""
    if os.environ.get(_IN_NAMESPACE):
        return True
    prefix = ["unshare", "--mount"]
    try:
        works = subprocess.run([*prefix, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0
    except FileNotFoundError:
        works = False
    if works:
        os.environ[_IN_NAMESPACE] = "yes"
        os.execvp("unshare", [*prefix, sys.executable, "-m", "tests.soak", *sys.argv[1:]])
    return False


def _possible(kinds: list[str]) -> list[str]:
    """Return those of the kinds that this machine permits."""
    from tests.soak.cluster import refusal

    on_nodes = [name for name in kinds if KINDS[name].on_nodes]
    if not on_nodes or not (reason := refusal()):
        return kinds
    print(f"no lost nodes: {reason}", flush=True)
    return [name for name in kinds if name not in on_nodes] or sys.exit("no kind of job is left")


def _soak(args: argparse.Namespace, directory: Path, has_mounts: bool) -> int:
    from tests.soak.rounds import IDENTICAL, Rounds
    from tests.soak.scene import Scene
    from tests.soak.tally import read_rounds, table
    from tests.support.forks import fork_server

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # or the object store prints its requests,
    socketserver.BaseServer.handle_error = lambda *_: None  # type: ignore[assignment]  # and those of killed jobs
    end, number, before = time.monotonic() + 3600 * args.hours, args.round or args.first, len(_lines(args.out))
    with Scene(directory, has_mounts) as scene:
        fork_server().start("time:sleep", 0, cwd=directory, env=os.environ).wait()  # jobs are timed from now on
        rounds = Rounds(scene, args.seed, args.kinds)
        while time.monotonic() < end:
            report, workspace = rounds.run(number)
            with args.out.open("a") as file:
                file.write(f"{report.line()}\n")
            faults = ", ".join(fault["name"] for fault in report.faults)
            print(f"round {number} {report.kind} {report.seconds:.0f} s: {report.outcome} ({faults})", flush=True)
            if report.outcome != IDENTICAL:
                kept = args.keep / f"seed-{args.seed}-round-{number}"
                shutil.copytree(workspace, kept, symlinks=True, dirs_exist_ok=True)
                print(f"{report.difference}\nkept in {kept}; repeat it with --seed {args.seed} --round {number}")
                return 1
            shutil.rmtree(workspace)
            if args.round:
                break
            number += 1
    print(table(read_rounds([args.out])[before:]))
    return 0


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


if __name__ == "__main__":
    sys.exit(main())
