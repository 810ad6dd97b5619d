"""What each preset learns, with and without rollouts ahead: `python -m benchmarks.learning [--presets grpo ppo ...]`.

Trains every preset of `conf/algorithm` on the built-in task (writing words backwards) from one and the same warm
start, once for each seed and each value of `rollout.ahead`, as a user would: whole jobs with vLLM. Writes
`docs/learning.md`, a table of held-out accuracy before and after, and `docs/images/learning.png`, accuracy against
samples. Jobs that were done before are not run again, and one that was killed continues: the same command finishes a
benchmark that died. A job that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import sqrt
from statistics import mean, variance
from typing import Any

from benchmarks.learning_tool import HEADING
from trainer.config import compose, conf_dir
from trainer.metrics.tracker import METRICS_FILE, read_metrics

ACCURACY = "val/accuracy"
INTRO = """# What the presets learn

Every preset of `conf/algorithm`, trained on the built-in task (writing words backwards) from one warm start by whole
jobs with vLLM, once for each seed, with and without [rollouts ahead](async.md). Accuracy is the share of 256 held-out
words whose greedy completion is right.

```bash
{command}
```

{table}

![Held-out accuracy against samples, a panel for each preset, a line for each job](images/learning.png)

All presets have the same number of optimizer steps, and the learning rates of the built-in model
(`conf/model/tiny.yaml`), which were chosen once, for GRPO (`cispo`: half of it). So the table shows that each preset
learns, not which one is best. `dapo` samples more completions than it trains on, because it replaces prompts that
teach nothing. `start` is the accuracy of the warm start. The numbers below `ahead` are the accuracy after the last
step, seed by seed. The difference is that of the means, in points, with its standard error over the seeds. The reward
is the mean of the training rewards of the last ten steps, over the seeds. Samples are completions trained on.
"""
_LAST = 10
Rows = list[dict[str, Any]]
Results = dict[str, dict[int, list[Rows]]]
"""The metrics of the jobs by preset and `rollout.ahead`, seed by seed."""
COLOURS = ("#0072B2", "#D55E00", "#009E73")


def presets() -> list[str]:
    """All of them, by name, but `opd`, which needs a teacher."""
    return sorted({os.path.splitext(name)[0] for name in os.listdir(os.path.join(conf_dir(), "algorithm"))} - {"opd"})


@dataclass(frozen=True)
class Job:
    """One training run."""

    preset: str
    ahead: int
    seed: int

    def overrides(self, steps: int, extra: list[str]) -> list[str]:
        """Return what the job is started with, but for where it writes."""
        schedule = "trainer.policy.optimizer.schedule_steps=null"  # over the whole run, however long it is
        settings = [f"algorithm={self.preset}", f"trainer.seed={self.seed}", f"rollout.ahead={self.ahead}"]
        return [*settings, f"trainer.total_steps={steps}", schedule, *extra]

    def run(self, steps: int, extra: list[str], out: str) -> Rows | None:
        """Run the job to its end; return its metrics. None: it has failed."""
        run_dir = os.path.join(out, self.preset, f"ahead-{self.ahead}-seed-{self.seed}")
        command = [
            sys.executable, "-m", "trainer", "train", *self.overrides(steps, extra), f"trainer.run_dir={run_dir}",
            "trainer.resume_mode=latest", "trainer.max_ckpts_to_keep=1", "logger.samples=0", "logger.plot=false",
        ]  # fmt: skip
        os.makedirs(run_dir, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(os.path.join(run_dir, "output.log"), "a") as log:
            status = subprocess.run(command, stdout=log, stderr=log, env=environment).returncode
        if status:
            print(f"{' '.join(command)} ended with status {status}; see {log.name}", file=sys.stderr, flush=True)
            return None
        rows = read_metrics(os.path.join(run_dir, METRICS_FILE))
        curve = " ".join(f"{row[ACCURACY]:.3f}" for row in rows if ACCURACY in row)
        print(f"{self.preset:>20} ahead {self.ahead} seed {self.seed}: {curve}", flush=True)
        return rows


def table(results: Results, seeds: list[int]) -> list[str]:
    """Accuracy before and after, for each value of `rollout.ahead`, and the difference of the first two values."""
    settings = list(next(iter(results.values())))
    head = ["preset", "start"]
    head += [f"ahead {setting}: seeds {', '.join(map(str, seeds))}" for setting in settings]
    head += ["difference"] if len(settings) > 1 else []
    head += [*(f"reward, ahead {setting}" for setting in settings), "samples"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for preset, runs in results.items():
        first = runs[settings[0]]
        ends = {setting: [100 * rows[-1][ACCURACY] for rows in of_setting] for setting, of_setting in runs.items()}
        cells = [preset, f"{first[0][0][ACCURACY]:.3f}"]
        cells += [" ".join(f"{end / 100:.3f}" for end in ends[setting]) for setting in settings]
        if len(settings) > 1:
            before, after = (ends[setting] for setting in settings[:2])
            error = sqrt(sum(variance(values) / len(values) for values in (before, after) if len(values) > 1))
            cells.append(f"{mean(after) - mean(before):+.1f} ± {error:.1f}")
        for setting in settings:
            cells.append(f"{mean(row['reward/mean'] for rows in runs[setting] for row in rows[-_LAST:]):.3f}")
        cells.append(f"{first[0][-1]['progress/samples']:,.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def plot(results: Results, path: str) -> None:
    """One panel for each preset: a curve for each job, a colour for each value of `rollout.ahead`, others in grey."""
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
        for rows in (rows for others in results.values() for seeds in others.values() for rows in seeds):
            panel.plot(*curve(rows), color="#dddddd", linewidth=0.7)
        for colour, (ahead, seeds) in zip(COLOURS, runs.items(), strict=False):
            for number, rows in enumerate(seeds):
                label = f"ahead {ahead}" if number == 0 else None
                panel.plot(*curve(rows), color=colour, linewidth=1.2, label=label)
        panel.set_title(preset, fontsize=9)
        panel.tick_params(labelsize=8)
    axes.flat[0].legend(fontsize=8)
    figure.supxlabel("samples trained on", fontsize=9)
    figure.supylabel("held-out accuracy", fontsize=9)
    figure.savefig(path, dpi=130)


def write_docs(results: Results, seeds: list[int], docs: str, command: str) -> str:
    """Table and plot, as a page and a picture below `docs`; returns the page."""
    os.makedirs(os.path.join(docs, "images"), exist_ok=True)
    plot(results, os.path.join(docs, "images", "learning.png"))
    text = INTRO.format(command=command, table="\n".join(table(results, seeds)))
    path = os.path.join(docs, "learning.md")
    if os.path.exists(path):  # the section of the other benchmark stays
        with open(path) as file:
            _, heading, section = file.read().partition(HEADING)
        text += "\n" + heading + section if heading else ""
    with open(path, "w") as file:
        file.write(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=presets())
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--ahead", nargs="+", type=int, default=[0, 1], help="of rollout.ahead (default: 0 1)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=1, help="jobs at a time (default: 1)")
    parser.add_argument("--out", default="outputs/learning", help="where the runs are (default: outputs/learning)")
    parser.add_argument("--docs", default="docs", help="where table and plot go (default: docs)")
    parser.add_argument("extra", nargs="*", help="overrides for every job, after --")
    args = parser.parse_args()
    jobs = [Job(preset, ahead, seed) for seed in args.seeds for preset in args.presets for ahead in args.ahead]
    for job in jobs:
        compose(job.overrides(args.steps, args.extra))  # a name that is wrong should not wait for its turn
    with ThreadPoolExecutor(args.jobs) as threads:
        done = dict(zip(jobs, threads.map(lambda job: job.run(args.steps, args.extra, args.out), jobs), strict=True))
    if failed := [job for job, rows in done.items() if rows is None]:
        raise SystemExit(f"failed: {failed}; the same command continues them")
    results: Results = {
        preset: {ahead: [done[Job(preset, ahead, seed)] or [] for seed in args.seeds] for ahead in args.ahead}
        for preset in args.presets
    }
    print(write_docs(results, args.seeds, args.docs, " ".join(["python -m benchmarks.learning", *sys.argv[1:]])))


if __name__ == "__main__":
    main()
