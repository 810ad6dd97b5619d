"""What the timeline costs a step: `python -m benchmarks.trace [--pairs N | --spans N] [OVERRIDES]`.

Trains one run in which one step of each pair, drawn by chance, records spans in all processes (`logger.trace`), and the
other does not.

Prints the spans of a step, and for a step the CPU seconds of the thread that writes them, and what steps with spans
took longer than those without: in CPU seconds of all processes of the job, and on the clock. Medians, and half the
range between the quartiles; a busy machine shows in the last column, but hardly in the others.

With `--spans`, prints the CPU time of a span in the process that records it instead, and that of a call with its
answer, in the worker and the driver, with and without spans in it: these do not depend on the run.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from statistics import median, quantiles

import psutil

from tests.support.timelines import read_spans
from trainer.config import TASKS, Config
from trainer.episodes import Episode
from trainer.metrics.tracker import METRICS_FILE, read_metrics
from trainer.process.tracing import TRACER, WANTED, answer_call
from trainer.sources.sampling import SamplingSource
from trainer.tasks import Task, rl

CPU_FILE = "cpu.jsonl"
WARM_UP = 2


def is_traced(step: int) -> bool:
    """Return whether a step records spans: one of each pair of steps does."""
    return (step % 2 == 0) == (random.Random(step // 2).random() < 0.5)


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes of the job so far."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


class Alternating(SamplingSource):
    """Records spans in one step of two, and notes the CPU time that has passed at the begin of each step."""

    def next(self, step: int) -> list[Episode]:
        clocks = [
            time.pthread_getcpuclockid(t.ident) for t in threading.enumerate() if t.ident and t.name == "timeline"
        ]
        passed = {"step": step, "all": cpu_seconds(), "writer": sum(map(time.clock_gettime, clocks))}
        with open(os.path.join(self.cfg.trainer.run_dir, CPU_FILE), "a") as file:
            print(json.dumps(passed), file=file)
        TRACER.is_on = is_traced(step)
        return super().next(step)


def build(cfg: Config) -> Task:
    return rl.build(cfg, partial(rl.sample_episodes, make_source=Alternating))


TASK = replace(TASKS["rl"], build=build)


def train(run_dir: str, steps: int, overrides: list[str]) -> None:
    command = [
        sys.executable, "-m", "trainer", "train", "trainer.task=benchmarks.trace:TASK", f"trainer.run_dir={run_dir}",
        f"trainer.total_steps={steps + 1}", "trainer.val_interval=-1", "trainer.ckpt_interval=1000",
        "logger.plot=false", "logger.trace=true", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{done.stdout[-2000:]}{done.stderr[-2000:]}\n{' '.join(command)} ended with an error")


def report(run_dir: str, steps: int) -> None:
    rows = {row["step"]: row["time/step"] for row in read_metrics(os.path.join(run_dir, METRICS_FILE))}
    with open(os.path.join(run_dir, CPU_FILE)) as file:
        passed = {line["step"]: line for line in map(json.loads, file)}
    spans = read_spans(run_dir)
    windows = {span.details["step"]: span for span in spans if span.name == "step" and span.details}
    counts = Counter(n for n, step in windows.items() for span in spans if step.start <= span.start < step.end)
    whole, values = median(rows[step] for step in range(WARM_UP, steps + 1)), []
    for first in range(WARM_UP, steps, 2):
        on, off = (first, first + 1) if is_traced(first) else (first + 1, first)
        cpu = [passed[step + 1]["all"] - passed[step]["all"] for step in (on, off)]
        writer = sum(passed[step + 1]["writer"] - passed[step]["writer"] for step in (on, off))
        values.append((writer, cpu[0] - cpu[1], rows[on] - rows[off]))

    def shown(column: tuple[float, ...]) -> str:
        low, _, high = quantiles(column, n=4)
        return f"{median(column) / whole:7.2%} ± {(high - low) / 2 / whole:.2%}"

    print("| pairs | a step | spans | CPU of the writer | CPU of all processes | time of a step |")
    print("|---|---|---|---|---|---|")
    columns = " | ".join(shown(column) for column in zip(*values, strict=True))
    print(f"| {len(values)} | {whole:.2f} s | {median(counts.values()):.0f} | {columns} |", flush=True)


def span_ns(spans: int) -> float:
    """Return the CPU time of a span of this process, without that of the loop around it, in ns."""
    begin = time.process_time()
    for _ in range(spans):
        with TRACER.span("a span", groups=1):
            pass
    middle = time.process_time()
    for _ in range(spans):
        pass
    return 1e9 * (2 * middle - begin - time.process_time()) / spans


def answer_us(calls: int, inner: int, traced: bool) -> float:
    """Return the CPU time of a call and its answer, without its way over a connection, in us.

    Args:
        inner: spans that the call records, besides its own.
    """

    def work() -> int:
        for _ in range(inner):
            with TRACER.span("mini-batch", rows=8):
                pass
        return 1

    begin = time.process_time()
    for _ in range(calls):
        answer = answer_call(work, "main", (), {WANTED: True} if traced else {}, "update")
        sent = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        TRACER.receive("rank 0", pickle.loads(sent))
        TRACER.take()  # else this process would send again what it has received
    spent = time.process_time() - begin
    return 1e6 * spent / calls


def report_spans(spans: int) -> None:
    found = []
    for TRACER.is_on in (False, True):
        found.append(median(span_ns(spans) for _ in range(15)))
        TRACER.take()
    print("| spans | tracing off | tracing on |\n|---|---|---|")
    print(f"| {spans:,} | {found[0]:,.0f} ns a span | {found[1]:,.0f} ns a span |\n")
    print("| spans of an answer | tracing off | tracing on |\n|---|---|---|")
    for inner in (0, 9, 99):
        off, on = (median(answer_us(spans // 50, inner, traced) for _ in range(15)) for traced in (False, True))
        print(f"| {inner + 1} | {off:,.1f} us | {on:,.1f} us |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of steps (default: 20)")
    parser.add_argument("--spans", type=int, help="measure so many spans alone, without a run")
    parser.add_argument("overrides", nargs="*", help="further settings, such as rollout=transformers")
    args = parser.parse_args()
    if args.spans:
        return report_spans(args.spans)
    steps = 2 * args.pairs + WARM_UP - 1
    with tempfile.TemporaryDirectory() as directory:
        run_dir = os.path.join(directory, "run")
        train(run_dir, steps, args.overrides)
        report(run_dir, steps)


if __name__ == "__main__":
    main()
