"""What each preset learns: `python -m benchmarks.learning [--presets grpo ppo ...] [--seeds 1 2 3]`.

Trains every preset of `conf/algorithm` on the built-in task (writing words backwards) from one and the same warm
start, once a seed, as a user would: whole jobs with vLLM. Writes `docs/learning.md`, a table of held-out accuracy
before and after, and `docs/images/learning.png`, accuracy against samples. Jobs that were done before are not run
again, and one that was killed goes on: the same command finishes a benchmark that died.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.config import compose, conf_dir
from trainer.metrics.tracker import METRICS_FILE, read_metrics

ACCURACY = "val/accuracy"
INTRO = """# What the presets learn

Every preset of `conf/algorithm`, trained on the built-in task (writing words backwards) from one warm start by whole
jobs with vLLM, once a seed. Accuracy is the share of 256 held-out words whose greedy completion is right.

```bash
{command}
```

{table}

![Held-out accuracy against samples, a panel a preset, a line a seed; in grey those of all presets](images/learning.png)

All presets have the same number of optimizer steps, and the learning rates of the built-in model
(`conf/model/tiny.yaml`), which were chosen once, for GRPO. So the table shows that each preset learns, not which one
is best. `dapo` samples more completions than it trains on, because it replaces prompts that teach nothing. Gains are
in points, from the start to the last step; samples are completions trained on.
"""
Rows = list[dict[str, Any]]


def presets() -> list[str]:
    """All of them, by name."""
    return sorted(os.path.splitext(name)[0] for name in os.listdir(os.path.join(conf_dir(), "algorithm")))


def overrides(preset: str, seed: int, steps: int, extra: list[str]) -> list[str]:
    """What a job is started with, but for where it writes."""
    schedule = "trainer.policy.optimizer.schedule_steps=null"  # over the whole run, however long it is
    return [f"algorithm={preset}", f"trainer.seed={seed}", f"trainer.total_steps={steps}", schedule, *extra]


def run(preset: str, seed: int, steps: int, extra: list[str], out: str) -> Rows:
    """Run a job to its end; returns its metrics."""
    run_dir = os.path.join(out, preset, f"seed-{seed}")
    command = [
        sys.executable, "-m", "trainer.main", *overrides(preset, seed, steps, extra), f"trainer.run_dir={run_dir}",
        "trainer.resume_mode=latest", "trainer.max_ckpts_to_keep=1", "logger.samples=0", "logger.plot=false",
    ]  # fmt: skip
    os.makedirs(run_dir, exist_ok=True)
    with open(os.path.join(run_dir, "output.log"), "a") as log:
        status = subprocess.run(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}; see {log.name}")
    rows = read_metrics(os.path.join(run_dir, METRICS_FILE))
    curve = [row[ACCURACY] for row in rows if ACCURACY in row]
    print(f"{preset:>20} seed {seed}: {' '.join(f'{value:.3f}' for value in curve)}", flush=True)
    return rows


def table(results: dict[str, list[Rows]], seeds: list[int]) -> list[str]:
    """Accuracy before, and after for each seed, and the mean and smallest gain in points."""
    head = ["preset", "start", *(f"seed {seed}" for seed in seeds), "mean gain", "smallest gain", "samples"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for preset, runs in results.items():
        start = runs[0][0][ACCURACY]
        ends = [rows[-1][ACCURACY] for rows in runs]
        gains = [100 * (end - rows[0][ACCURACY]) for end, rows in zip(ends, runs, strict=True)]
        cells = [preset, f"{start:.3f}", *(f"{end:.3f}" for end in ends), f"{sum(gains) / len(gains):+.1f}",
                 f"{min(gains):+.1f}", f"{runs[0][-1]['progress/samples']:,.0f}"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def plot(results: dict[str, list[Rows]], path: str) -> None:
    """One panel a preset: every seed's curve, over those of all others in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 3
    figure, axes = pyplot.subplots(
        -(-len(results) // columns), columns, figsize=(10, 2.4 * -(-len(results) // columns)), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip

    def curve(rows: Rows) -> tuple[list[float], list[float]]:
        points = [(row.get("progress/samples", 0), row[ACCURACY]) for row in rows if ACCURACY in row]
        return [x for x, _ in points], [y for _, y in points]

    for panel in axes.flat:
        panel.set_axis_off()
    for panel, (preset, runs) in zip(axes.flat, results.items(), strict=False):
        panel.set_axis_on()
        for rows in (rows for others in results.values() for rows in others):
            panel.plot(*curve(rows), color="#dddddd", linewidth=0.7)
        for rows in runs:
            panel.plot(*curve(rows), color="#0072B2", linewidth=1.4)
        panel.set_title(preset, fontsize=9)
        panel.tick_params(labelsize=8)
    figure.supxlabel("samples trained on", fontsize=9)
    figure.supylabel("held-out accuracy", fontsize=9)
    figure.savefig(path, dpi=130)


def write_docs(results: dict[str, list[Rows]], seeds: list[int], docs: str, command: str) -> str:
    """Table and plot, as a page and a picture below `docs`; returns the page."""
    os.makedirs(os.path.join(docs, "images"), exist_ok=True)
    plot(results, os.path.join(docs, "images", "learning.png"))
    text = INTRO.format(command=command, table="\n".join(table(results, seeds)))
    with open(os.path.join(docs, "learning.md"), "w") as file:
        file.write(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=presets())
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="jobs at a time (default: 1)")
    parser.add_argument("--out", default="outputs/learning", help="where the runs are (default: outputs/learning)")
    parser.add_argument("--docs", default="docs", help="where table and plot go (default: docs)")
    parser.add_argument("extra", nargs="*", help="overrides for every job, after --")
    args = parser.parse_args()
    jobs = [(preset, seed) for preset in args.presets for seed in args.seeds]
    for preset, seed in jobs:
        compose(overrides(preset, seed, args.steps, args.extra))  # a name that is wrong should not wait for its turn
    with ThreadPoolExecutor(args.jobs) as threads:
        rows = list(threads.map(lambda job: run(*job, args.steps, args.extra, args.out), jobs))
    results = {p: [r for (name, _), r in zip(jobs, rows, strict=True) if name == p] for p in args.presets}
    print(write_docs(results, args.seeds, args.docs, " ".join(["python -m benchmarks.learning", *sys.argv[1:]])))


if __name__ == "__main__":
    main()
