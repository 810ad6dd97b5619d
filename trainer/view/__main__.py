"""`trainer view RUN...`, or `python -m trainer.view RUN...`: write one HTML file that shows runs."""

from __future__ import annotations

import argparse
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
    parser.add_argument("--follow", action="store_true", help="write it again while a run goes on")
    help = "with --follow, between two looks at the files (default: %(default)g)"
    parser.add_argument("--interval", type=_seconds, default=10.0, metavar="SECONDS", help=help)
    parser.add_argument("--steps", type=_steps, default=(0, None), metavar="A-B", help="only episodes of these steps")
    help = "of each run at most so many episodes (default: %(default)d)"
    parser.add_argument("--max-episodes", type=_count, default=limits.episodes, metavar="N", help=help)
    help = "of each run about so many tokens (default: %(default)d)"
    parser.add_argument("--max-tokens", type=_count, default=limits.tokens, metavar="N", help=help)
    return run_tool(parser, view, argv)


def view(args: argparse.Namespace) -> None:
    """Write the page, and with `--follow` write it again until no run goes on.

    Raises:
        UserError: there is no run, or a file of it is damaged.
    """
    builder = Builder(args.paths, Limits(args.max_episodes, args.max_tokens, *args.steps))
    out = args.out or (os.path.join(builder.paths[0], _OUT) if len(builder.paths) == 1 else _OUT)
    if os.path.isdir(out):
        raise UserError(f"--out={out}: is a directory; name a file")
    follows = args.follow and _goes_on(builder)
    size = builder.write(out, args.interval if follows else None)
    for note in builder.notes:
        show(note, error=True)
    show(f"view: {out} ({format_size(size)})")
    if follows:
        try:
            _follow(builder, out, args.interval)
        except KeyboardInterrupt:
            builder.write(out)
            show(f"view: {out} is not written again")
    elif args.follow:
        show("no run goes on, so there is nothing to follow")


def _follow(builder: Builder, out: str, interval_s: float) -> None:
    """Write the page again when files have changed, until no run goes on."""
    seen: Any = None
    while True:
        goes_on = _goes_on(builder)  # before the files: the last page has all that the run has written
        stamp = builder.stamp()
        if not goes_on or stamp != seen:
            try:
                builder.write(out, interval_s if goes_on else None)
                seen = stamp
            except (UserError, OSError) as error:  # a file that a job is changing
                if not goes_on:
                    raise
                show(f"not written ({sentence_of(error)}); tried again", error=True)
        if not goes_on:
            show(f"view: {out} is complete: no run goes on")
            return
        time.sleep(interval_s)


def _goes_on(builder: Builder) -> bool:
    return any(holder(path)[0] for path in builder.paths)


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
