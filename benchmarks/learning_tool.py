"""What the built-in model learns of a tool: `python -m benchmarks.learning_tool`.

Trains `experiment=look_up` once for each seed, as a user would, and once with a single turn, which leaves no room for
an answer of the tool. Writes a section of `docs/learning.md`: success before and after, the time of each
command, and an episode before and after. A job that was done before is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import mean
from typing import Any

from trainer.metrics.samples import VALIDATION_FOLDER
from trainer.metrics.tracker import METRICS_FILE, read_metrics

ACCURACY = "val/accuracy"
HEADING = "## A tool over several turns"
SECTION = """{heading}

`experiment=look_up` shows the built-in model a name. Its number is in a table that only the tool `look_up` can read.
Often the tool finds another name, which has to be looked up in turn, up to three times. The chats of the warm start
show the form of a call, but two of three that have found a name give up. So the model begins there: it solves the
third of the rows that take one call. GRPO teaches it to go on until it has a number.

```bash
{command}
```

| job | start | after step {middle} | after step {last} | calls an episode | seconds, whole command |
|---|---|---|---|---|---|
{table}

Success is the share of {rows} held-out rows whose greedy episode ends with the right number. The seconds of seed
{first} include the warm start, which the others find in the cache. `one turn` is the same job with
`environment.max_turns=1`: without an answer of the tool, the number is one of a hundred.

One held-out row, before the first step and after the last one:

```text
{episodes}
```
"""


def run(run_dir: str, overrides: list[str]) -> float:
    """Run a job to its end, unless it was run before; return the seconds that the command took."""
    done = os.path.join(run_dir, "seconds")
    if not os.path.exists(done):
        shutil.rmtree(run_dir, ignore_errors=True)
        os.makedirs(run_dir)
        command = [
            sys.executable,
            "-m",
            "trainer",
            "train",
            "experiment=look_up",
            f"trainer.run_dir={run_dir}/run",
            *overrides,
        ]
        started = time.monotonic()
        with open(os.path.join(run_dir, "output.log"), "w") as log:
            subprocess.run(command, stdout=log, stderr=log, check=True)
        with open(done, "w") as file:
            file.write(f"{time.monotonic() - started:.0f}")
    with open(done) as file:
        return float(file.read())


def jobs(seeds: Sequence[int]) -> dict[str, list[str]]:
    """Return the overrides of each job by its name."""
    return {f"seed {seed}": [f"trainer.seed={seed}"] for seed in seeds} | {
        "one turn": [f"trainer.seed={seeds[0]}", "environment.max_turns=1"]
    }


def episodes_at(run_dir: str, step: int) -> list[dict[str, Any]]:
    with open(os.path.join(run_dir, "run", VALIDATION_FOLDER, f"step_{step}.jsonl")) as file:
        return [json.loads(line) for line in file]


def shown(episode: dict[str, Any]) -> str:
    messages = [*episode["prompt"], *episode["completion"]]
    lines = [f"{message['role']:<10} {message['content']}" for message in messages]
    return "\n".join([*lines, f"{'reward':<10} {episode['reward']:g} (the number is {episode['answer']})"])


def row_of(name: str, rows: list[dict[str, Any]], run_dir: str, seconds: float) -> str:
    """Return a line of the table."""
    measured = [row for row in rows if ACCURACY in row]
    calls = mean(episode["metrics"]["tool_calls/look_up"] for episode in episodes_at(run_dir, measured[-1]["step"]))
    values = [measured[0], measured[len(measured) // 2], measured[-1]]
    cells = [name, *(f"{row[ACCURACY]:.3f}" for row in values), f"{calls:.2f}", f"{seconds:.0f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--out", default="outputs/learning_tool", help="where the runs are")
    parser.add_argument("--docs", default="docs", help="where learning.md is (default: docs)")
    parser.add_argument("extra", nargs="*", help="overrides for every job, after --")
    args = parser.parse_args()
    cache = f"model.cache_dir={os.path.abspath(args.out)}/models"  # so that the first job makes the model, in its time
    lines, measured = [], []
    for name, overrides in jobs(args.seeds).items():
        run_dir = os.path.join(args.out, name.replace(" ", "-"))
        seconds = run(run_dir, [cache, *overrides, *args.extra])
        rows = read_metrics(os.path.join(run_dir, "run", METRICS_FILE))
        measured = [row["step"] for row in rows if ACCURACY in row]
        lines.append(row_of(name, rows, run_dir, seconds))
        print(lines[-1], flush=True)
    first = os.path.join(args.out, f"seed-{args.seeds[0]}")
    before, after = episodes_at(first, measured[0]), episodes_at(first, measured[-1])
    pairs = zip(before, after, strict=True)
    better = [pair for pair in pairs if pair[1]["reward"] > pair[0]["reward"] and len(pair[1]["completion"]) > 6]
    section = SECTION.format(
        heading=HEADING,
        command=" ".join(["python -m benchmarks.learning_tool", *sys.argv[1:]]),
        table="\n".join(lines),
        middle=measured[len(measured) // 2],
        last=measured[-1],
        rows=len(before),
        first=args.seeds[0],
        episodes="\n\n".join(map(shown, better[0])),
    )
    path = os.path.join(args.docs, "learning.md")
    with open(path) as file:
        before_it, _, own = file.read().partition(HEADING)
    _, heading, after_it = own.partition("\n## ")
    with open(path, "w") as file:
        file.write(f"{before_it.rstrip()}\n\n{section}{heading}{after_it}")


if __name__ == "__main__":
    main()
