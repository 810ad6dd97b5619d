"""`trainer checkpoint`: list, verify and export checkpoints, and go back to one.

It needs no Ray and no GPU, and only `export` needs torch, so it answers quickly on a login node.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from typing import Any

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.components import read_config
from trainer.checkpoint.exports import export_directory, is_exported
from trainer.checkpoint.inspection import (
    check_step,
    choose_checkpoint,
    describe,
    describe_all,
    open_run,
)
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.manifest import CorruptCheckpointError, step_in
from trainer.checkpoint.storage import open_storage, remove_records
from trainer.checkpoint.store import BOOKKEEPING, CheckpointStore, open_store
from trainer.errors import UserError
from trainer.files.uris import is_same, is_url, lies_in, problem_of
from trainer.process import time_limits
from trainer.process.log_setup import ToolParser, escape, run_tool


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status (see `_STATUS`)."""
    return run_tool(_parser(), _run, argv, lambda error: 1 if isinstance(error, CorruptCheckpointError) else 2)


def _run(args: argparse.Namespace) -> int:
    for path in (getattr(args, name, None) for name in ("root", "path", "checkpoint", "out")):
        if path is not None and is_url(path) and (problem := problem_of(path)) is not None:
            raise UserError(f"{path}: {problem}")
        if path is not None and path != getattr(args, "out", None) and not open_storage(path).exists():
            what = "is a file" if os.path.exists(path) else "no such directory"
            raise UserError(f"{path}: {what}; name a run, or a directory or URL with global_step_N in it")
    result, lines, status = _COMMANDS[args.command](args)
    print(json.dumps(result, indent=2) if args.json else "\n".join(escape(line, lines=False) for line in lines))
    return status


def _parser() -> ToolParser:
    parser = ToolParser(prog="trainer checkpoint", description=__doc__, epilog=_STATUS)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, help: str, *arguments: tuple[str, str]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        for argument, meaning in arguments:
            sub.add_argument(argument, help=meaning)
        sub.add_argument("--json", action="store_true", help="print JSON")
        return sub

    root = ("root", "directory or URL with global_step_N in it, or a run directory")
    one = ("checkpoint", "global_step_N with its path or URL, or a run: its newest valid checkpoint")
    command("ls", "list the checkpoints of a run: step, time, size, ranks, score, damage", root)
    command(
        "verify",
        "check every byte of a checkpoint, or of all checkpoints of a run",
        ("path", "a global_step_N directory, or a run"),
    )
    export = command("export", "write the policy in Hugging Face format", one, ("out", "directory or URL to create"))
    chosen = export.add_mutually_exclusive_group()
    chosen.add_argument("--best", action="store_true", help="of a run: the checkpoint with the best score (see ls)")
    chosen.add_argument("--step", type=int, help="of a run: the checkpoint of this step")
    export.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="auto: the dtype in the model's config",
    )
    export.add_argument("--max-file-gb", type=float, default=5.0, help="largest safetensors file; bounds the memory")
    export.add_argument("--adapter", action="store_true", help="with LoRA: write the adapter alone, in peft's format")
    export.add_argument("--base", help="with LoRA: directory of the adapted weights, if they have moved")
    back = command("rollback", "archive newer checkpoints, so that resume_mode=latest uses an older one", root)
    back.add_argument("--to", type=int, required=True, help="step of the older checkpoint")
    return parser


Result = tuple[Any, list[str], int]
_STATUS = "Exit status: 0 success (also for a list with damaged checkpoints), 1 a checkpoint is damaged, 2 bad input."


def _ls(args: argparse.Namespace) -> Result:
    store = open_run(args.root)
    rows = describe_all(store, "size")
    lines = _table(rows)
    metrics = sorted({row["score_metric"] for row in rows if row["score"] is not None and row["score_metric"]})
    lines += [f"score: {' or '.join(metrics)} at that step"] if metrics else []
    best = next((row for row in rows if row["best"]), None)
    if best is not None and best["score_of_start"] is not None:
        sign = -1 if best["score_mode"] == "min" else 1
        beaten = sign * best["score"] > sign * best["score_of_start"]
        lines.append(f"the start: {best['score_of_start']:.4g}{'' if beaten else ', which no checkpoint has beaten'}")
    if any(row["valid"] for row in rows):
        command = f"trainer checkpoint verify {shlex.quote(args.root)}"
        lines.append(f"sizes agree: the content was not read; `{command}` reads every byte")
    hidden = [name for name in store.storage.names() if name.startswith(".")]
    others = [name for name in hidden if not name.startswith(BOOKKEEPING)]
    lines += [f"also there, and no checkpoints: {', '.join(others)}"] if others else []
    return {"root": store.root, "checkpoints": rows, "others": others}, lines, 0


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'step':>8}  {'saved at':25}  {'size':>10}  {'ranks':>5}  {'score':>9}  check"]
    for row in rows:
        check = "sizes agree" if row["valid"] else f"NO: {row['problem']}"
        score = "" if row["score"] is None else f"{row['score']:.4g}"
        marks = ", ".join(mark for mark in ("best", "latest") if row[mark])
        lines.append(
            f"{row['step']:>8}  {row['saved_at'] or '?':25}  {row['bytes'] / 1e6:>7.1f} MB  {row['ranks'] or '?':>5}  "
            f"{score:>9}  {check}  {marks}".rstrip()
        )
    return lines


def _verify(args: argparse.Namespace) -> Result:
    path = args.path.rstrip("/")
    rows = [describe(path, "hash")] if step_in(path) is not None else describe_all(open_run(path), "hash")
    return rows, [_finding(row) for row in rows], 0 if all(row["valid"] for row in rows) else 1


def _finding(row: dict[str, Any]) -> str:
    """Return what a check of all bytes has found, and what to do about damage."""
    if row["valid"]:
        of_ranks = f"{row['files']} files of {row['ranks'] or '?'} ranks"
        return f"{row['path']}: every byte is as it was saved; {of_ranks}, {row['bytes'] / 1e6:.1f} MB"
    if not row["readable"]:
        return f"{row['path']}: NOT READ: {row['problem']}; it may be undamaged: verify it where all files can be read"
    return (
        f"{row['path']}: DAMAGED: {row['problem']}; restore it from a copy, or delete it: trainer.resume_mode=latest "
        "continues from the newest undamaged one"
    )


def _export(args: argparse.Namespace) -> Result:
    from trainer.checkpoint.tensors import NamedFiles
    from trainer.models.export_weights import export

    if not 0 < args.max_file_gb < 1e6:
        raise UserError(f"--max-file-gb={args.max_file_gb}: must be a number above 0")
    checkpoint, why = choose_checkpoint(args.checkpoint, args.step, args.best)
    limit = int(args.max_file_gb * 1e9)
    if is_url(args.out) and is_exported(args.out):
        raise UserError(f"{args.out}: exists already; name another")
    if lies_in(args.out, checkpoint.path):
        raise UserError(f"{args.out}: is in the checkpoint {checkpoint.path}; name a directory outside of it")
    with export_directory(args.out) as directory:
        files = export(NamedFiles(checkpoint), directory, args.dtype, limit, args.adapter, args.base)
    lines = [f"exported {checkpoint.path}{why} to {args.out}: {', '.join(files)}"]
    return {"checkpoint": checkpoint.path, "out": args.out, "files": files}, lines, 0


def _rollback(args: argparse.Namespace) -> Result:
    store = open_run(args.root)
    check_step(store, args.to, "--to")
    checkpoint = manifests.verify(store.path(args.to), "hash")
    with contextlib.ExitStack() as locked:  # a running job must not lose the checkpoints that it uses
        locked.enter_context(_lock(store)).acquire()
        saved = read_config(checkpoint).get("trainer", {})
        tiers = _tiers(store, saved)
        for tier in tiers:
            if tier is not store:
                locked.enter_context(_lock(tier)).acquire()
        # The records of rollouts after the step are generated again: those in the store, and on this machine.
        run_dir = saved.get("run_dir")
        run_dirs = {args.root, os.path.dirname(store.root), *([run_dir] if isinstance(run_dir, str) else [])}
        for place in {store.root, *(place for place in run_dirs if not is_url(place))}:
            remove_records(open_storage(place), lambda of: of > args.to)
        archived = [name for tier in tiers for name in CheckpointManager(tier).archive(after=args.to)]
    lines = [f"archived {name}" for name in archived] or ["no checkpoint is newer"]
    return {"step": args.to, "archived": archived}, lines, 0


def _lock(store: CheckpointStore) -> RunLock:
    return RunLock(store.root, time_limits.LOCK_LEASE_S, "checkpoint directory", "end that job first")


def _tiers(store: CheckpointStore, saved: dict[str, Any]) -> list[CheckpointStore]:
    """Return the stores at `trainer.ckpt_path` and `trainer.ckpt_cache_dir` of the run, one of which is `store`.

    Args:
        saved: `trainer.*` of the run.

    Raises:
        UserError: the second is not on this machine. The run would continue the newer checkpoints that are there.
    """
    cache = saved.get("ckpt_cache_dir")
    if not isinstance(cache, str):
        return [store]
    if is_same(store.root, cache):
        return [open_store(saved["ckpt_path"]), store]
    if not os.path.isdir(cache):
        raise UserError(
            f"trainer.ckpt_cache_dir={cache}: is not on this machine, and the run goes on with what is newer there; "
            f"give the command on each machine that has it, or, if it is lost, make it: mkdir -p {shlex.quote(cache)}"
        )
    return [store, open_store(cache)]


_COMMANDS = {"ls": _ls, "verify": _verify, "export": _export, "rollback": _rollback}


if __name__ == "__main__":
    sys.exit(main())
