"""`trainer view RUN...`, or `python -m trainer.view RUN...`: write one HTML file that shows runs."""

from __future__ import annotations

import argparse
import os
import re
import sys

from trainer.errors import UserError, format_size
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
    parser.add_argument("--steps", type=_steps, default=(0, None), metavar="A-B", help="only episodes of these steps")
    help = "of each run at most so many episodes (default: %(default)d)"
    parser.add_argument("--max-episodes", type=_count, default=limits.episodes, metavar="N", help=help)
    help = "of each run about so many tokens (default: %(default)d)"
    parser.add_argument("--max-tokens", type=_count, default=limits.tokens, metavar="N", help=help)
    return run_tool(parser, view, argv)


def view(args: argparse.Namespace) -> None:
    """Write the page.

    Raises:
        UserError: there is no run, a file of it is damaged, or the page cannot be written where it should be.
    """
    builder = Builder(args.paths, Limits(args.max_episodes, args.max_tokens, *args.steps))
    out = args.out or (os.path.join(builder.paths[0], _OUT) if len(builder.paths) == 1 else _OUT)
    folder = os.path.dirname(out) or "."
    if os.path.isdir(out) or not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--out={out}: cannot be written; name a file in a directory in which you may write")
    size = builder.write(out)
    for note in builder.notes:
        show(note, error=True)
    show(f"view: {out} ({format_size(size)})")


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


if __name__ == "__main__":
    sys.exit(main())
