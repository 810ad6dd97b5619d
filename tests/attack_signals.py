"""Send a signal to a whole job at one moment after another: `python -m tests.attack_signals --every 0.1`.

Each round starts the same small job, waits a little longer than the last one, sends a signal, and checks how the job
ended: exit status 75 (or 0, if the job had just finished), one sentence, no traceback, and nothing left behind. Prints
a line for each round and exits with 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

from tests.support.signalled_jobs import WAYS, Job, problems_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=float, default=0.1, help="seconds after the start of the process")
    parser.add_argument("--last", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=0.5)
    parser.add_argument("overrides", nargs="*", help="of the job: rollout=transformers trainer.ray_address=processes …")
    args = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="attack") as scratch:
        for number, way in zip(itertools.count(), itertools.cycle(WAYS)):
            delay = args.first + number * args.every
            if delay > args.last:
                break
            job = Job(Path(scratch), f"round{number}", args.overrides)
            time.sleep(delay)
            last_line = job.last_line()
            WAYS[way](job.process)
            sent = time.monotonic()
            problems = problems_of(job)
            failures += bool(problems)
            print(
                f"{delay:6.2f} s  {way:22} status {job.process.returncode:3} after {time.monotonic() - sent:4.1f} s  "
                f"at {last_line[:60]!r} ended {job.last_line()[:150]!r}  {'; '.join(problems) or 'good'}",
                flush=True,
            )
            if problems:
                print(job.output(), flush=True)
            job.delete()
    print(f"{failures} rounds failed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
