"""`trainer view RUN...`, or `python -m trainer.view RUN...`: write one HTML file that shows runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from typing import Any

from trainer.checkpoint.lock import holder
from trainer.errors import UserError, format_size, sentence_of
from trainer.process.log_setup import ToolParser, run_tool, show
from trainer.view.build import Builder, Limits

_OUT = "view.html"


def main(argv: list[str] | None = None) -> int:
    """Write the page of the runs on the command line; returns the exit status."""
    text = "Write one HTML file that shows runs: curves, episodes, tokens. It needs no server and no network."
    parser = ToolParser(prog="trainer view", description=text)
    limits = Limits()
    parser.add_argument("paths", nargs="+", metavar="RUN", help="directory of a run, or of several, such as a sweep")
    parser.add_argument("--out", help=f"the file to write (default: RUN/{_OUT}; of several runs {_OUT})")
    parser.add_argument("--follow", action="store_true", help="write it again until each run has reached its last step")
    help = "with --follow, between two looks at the files (default: %(default)g)"
    parser.add_argument("--interval", type=_seconds, default=10.0, metavar="SECONDS", help=help)
    parser.add_argument("--steps", type=_steps, default=(0, None), metavar="A-B", help="only episodes of these steps")
    help = "of each run at most so many episodes (default: %(default)d)"
    parser.add_argument("--max-episodes", type=_count, default=limits.episodes, metavar="N", help=help)
    help = "of each run about so many tokens (default: %(default)d)"
    parser.add_argument("--max-tokens", type=_count, default=limits.tokens, metavar="N", help=help)
    return run_tool(parser, view, argv)


def view(args: argparse.Namespace) -> None:
    """Write the page, and with `--follow` write it again until each run has reached its last step.

    Raises:
        UserError: there is no run, a file of it is damaged, or the page cannot be written where it should be.
    """
    builder = Builder(args.paths, Limits(args.max_episodes, args.max_tokens, *args.steps))
    out = args.out or (os.path.join(builder.paths[0], _OUT) if len(builder.paths) == 1 else _OUT)
    _check_out(out)
    if not args.follow:
        _write_first(builder, out)
        return
    try:
        seen = builder.stamp()
        _write_first(builder, out, args.interval)
        _follow(builder, out, args.interval, seen)
    except KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):  # a second one: the page stays as it is
            builder.write(out)
        show(f"view: {out} is not written again")


def _check_out(out: str) -> None:
    """Check that the page can be written to the file `out`."""
    folder = os.path.dirname(out) or "."
    if os.path.isdir(out) or not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--out={out}: cannot be written; name a file in a directory in which you may write")


def _write_first(builder: Builder, out: str, refresh_s: float | None = None) -> None:
    size = builder.write(out, refresh_s)
    for note in builder.notes:
        show(note, error=True)
    show(f"view: {out} ({format_size(size)})")


def _follow(builder: Builder, out: str, interval_s: float, seen: Any = None) -> None:
    """Write the page again when files have changed, until each run has reached its last step and has ended.

    It waits for a run that was stopped or killed before: a scheduler or a person may start it again.

    Args:
        seen: the stamp of the files in the page; None: there is no page yet.

    Raises:
        UserError: a file of a run is damaged or gone, and no job is there that could be changing it.
    """
    while True:
        held = _held(builder)  # before the files: then the page has all that a run without a holder has written
        try:
            stamp = builder.stamp()
            if stamp != seen:
                builder.write(out, interval_s)
                seen = stamp
        except (UserError, OSError) as error:  # a job is changing a file, or the storage does not answer
            may_pass = isinstance(error, OSError) and not _is_complete(builder)
            if not may_pass and not held and not _held(builder):
                raise
            show(f"not written ({sentence_of(error)}); tried again", error=True)
        else:
            if not held and _is_complete(builder):
                builder.write(out)
                is_known = all(run.total_steps for run in builder.progress)
                reason = "every run has reached its last step" if is_known else "no job is running"
                show(f"view: {out} is complete: {reason}")
                return
        time.sleep(interval_s)


def _held(builder: Builder) -> set[str]:
    """Return the runs that a process holds."""
    return {path for path in builder.paths if holder(path)[0]}


def _is_complete(builder: Builder) -> bool:
    return all(run.is_complete for run in builder.progress)


def _steps(text: str) -> tuple[int, int | None]:
    match = re.fullmatch(r"(\d{1,18})(?:(-)(\d{1,18})?)?", text)
    if match is None or (match[3] and int(match[3]) < int(match[1])):
        raise argparse.ArgumentTypeError(f"{text!r} names no steps; write 5, 5-20 or 5-")
    first = int(match[1])
    return first, (int(match[3]) if match[3] else None) if match[2] else first


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= len(text) <= 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.1 to 86400")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
