"""What a long life costs a run: CPU time and memory of what reads it after many steps, above what it costs after ten.

    python -m benchmarks.age [--steps 100000] [--repeat 3] [--trees BASE .] [--parts resume report view diagnose]
    python -m benchmarks.age --parts rows --rows 1000000 [--repeat 3] [--trees BASE .]

A job of ten steps is aged: its lines of `metrics.jsonl` and `log.txt` are repeated, and its checkpoint gets the last
step. Then each command runs on the young and on the aged run, once for each tree with this package. CPU time is of all
processes, memory that of the largest one. The last column is the difference, and its share of that of the first tree.
`rows` starts a job on a file of so many rows, and once more, which resumes it; above what ten rows cost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trainer.checkpoint import last_commit
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.manifest import FileEntry
from trainer.files.atomic_io import digest_file
from trainer.metrics.tracker import METRICS_FILE

YOUNG = 10
JOB = (
    *("train", "rollout=transformers", "trainer.ray_address=processes", "trainer.num_workers=1", "rollout.n=2"),
    *("trainer.train_batch_size=2", "trainer.mini_batch_size=2", "rollout.max_response_tokens=8", "logger.samples=0"),
    *("data.train_size=64", "data.val_size=4", "trainer.val_interval=10", "trainer.resume_mode=latest"),
)


def command(part: str, run: Path, steps: int) -> list[str]:
    """Return the words of a command about a run that has trained `steps` steps."""
    if part == "resume":
        return [*JOB, f"trainer.run_dir={run}", f"trainer.total_steps={steps + 1}", "trainer.ckpt_interval=-1"]
    return [part, str(run)]


def measure(tree: str, words: Sequence[str]) -> tuple[float, float]:
    """Run a command. Return the CPU seconds of its processes, and the MB of the largest one."""
    env = {**os.environ, "PYTHONPATH": os.path.abspath(tree), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        program, streams = [sys.executable, "-m", "trainer", *words], {"stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(program, env=env, cwd=tempfile.gettempdir(), **streams)
        _, process.returncode, used = os.wait4(process.pid, 0)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(words)}: exit status {process.returncode}\n{output.read()}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def grow(young: Path, old: Path, steps: int) -> None:
    """Write a run of `steps` steps that looks like the young one."""
    shutil.copytree(young, old)
    shutil.rmtree(old / ".journal", ignore_errors=True)
    first, *lines = (young / METRICS_FILE).read_text().splitlines()
    with (old / METRICS_FILE).open("w") as file:
        file.write(f"{first}\n")
        for step in range(1, steps + 1):
            line = lines[(step - 1) % YOUNG]
            file.write(re.sub(r'(?<="step": )\d+', str(step), line, count=1) + "\n")
    log = (young / "log.txt").read_text().splitlines(keepends=True)
    (old / "log.txt").write_text("".join(log[:-1] * (steps // len(log)) + log))
    checkpoint = old / "checkpoints" / f"global_step_{steps}"
    shutil.move(old / "checkpoints" / f"global_step_{YOUNG}", checkpoint)
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    (checkpoint / "trainer_state.json").write_text(json.dumps({**state, "step": steps}))
    fields = json.loads((checkpoint / manifests.MANIFEST).read_text())
    paths = [checkpoint / entry["path"] for entry in fields["files"]]
    entries = [FileEntry(str(p.relative_to(checkpoint)), p.stat().st_size, digest_file(str(p))) for p in paths]
    fields |= {"step": steps, "files": [vars(entry) for entry in entries]}
    (checkpoint / manifests.MANIFEST).write_bytes(manifests.dump(fields))
    last_commit.write(str(old), steps, str(old / "checkpoints"))


def write_rows(path: Path, count: int) -> None:
    """Write prompts of about 80 characters, as JSON lines."""
    with path.open("w") as file:
        for row in range(count):
            a, b, c = (row * prime % 997 for prime in (389, 613, 761))
            prompt = f"Ann has {a} apples and buys {b} more, then gives {c} away. How many are left?"
            file.write(json.dumps({"prompt": prompt, "answer": str(a + b - c), "id": row}) + "\n")


def measure_rows(trees: Sequence[str], folder: Path, count: int, repeat: int) -> dict[str, dict[str, list]]:
    """Return by part and tree what a first start and a second one cost on `count` rows, above what they do on ten."""
    few, many = folder / "few.jsonl", folder / "many.jsonl"
    write_rows(few, YOUNG)
    write_rows(many, count)
    more: dict[str, dict[str, list]] = {part: {tree: [] for tree in trees} for part in ("rows", "rows again")}
    for _ in range(repeat):
        for tree in trees:
            used: dict[tuple[Path, int], tuple[float, float]] = {}
            for file in (few, many):
                run = folder / "run"
                words = [f"data.train_files=[{file}]", "data.train_size=-1", "trainer.val_interval=-1"]
                for steps in (1, 2):
                    last = [f"trainer.run_dir={run}", f"trainer.total_steps={steps}", "trainer.ckpt_interval=1"]
                    used[file, steps] = measure(tree, [*JOB, *words, *last])
                shutil.rmtree(run)
            for part, steps in (("rows", 1), ("rows again", 2)):
                (cpu, size), (least_cpu, least_size) = used[many, steps], used[few, steps]
                more[part][tree].append((cpu - least_cpu, size - least_size))
    return more


def show(part: str, trees: Sequence[str], more: dict[str, list[tuple[float, float]]]) -> None:
    seconds = {tree: statistics.median(cpu for cpu, _ in some) for tree, some in more.items()}
    memory = {tree: statistics.median(size for _, size in some) for tree, some in more.items()}
    for tree in trees:
        cpu, size = seconds[tree] / seconds[trees[0]], memory[tree] / memory[trees[0]]
        print(f"{part:<10} {tree:<20} {seconds[tree]:8.2f} s {cpu:5.2f} {memory[tree]:8.0f} MB {size:5.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--trees", nargs="+", default=["."], help="directories with this package, the base first")
    parser.add_argument("--parts", nargs="+", default=["resume", "report", "view", "diagnose", "compare"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.parts == ["rows"]:
            print(f"{args.rows:,} rows; medians of {args.repeat}")
            for part, more in measure_rows(args.trees, Path(folder), args.rows, args.repeat).items():
                show(part, args.trees, more)
            return
        runs: dict[str, dict[int, Path]] = {}
        for number, tree in enumerate(args.trees):  # configs of versions differ
            young, old = Path(folder, f"young{number}"), Path(folder, f"old{number}")
            measure(tree, [*JOB, f"trainer.run_dir={young}", f"trainer.total_steps={YOUNG}"])
            grow(young, old, args.steps)
            runs[tree] = {YOUNG: young, args.steps: old}
        print(f"{args.steps:,} steps, {(old / METRICS_FILE).stat().st_size / 2**20:.0f} MB; medians of {args.repeat}")
        for part in args.parts:
            more = {tree: [] for tree in args.trees}
            for number in range(args.repeat):
                for tree in args.trees:
                    used = []
                    for steps, run in runs[tree].items():
                        copy = Path(folder, f"{number}-{run.name}")
                        shutil.copytree(run, copy)
                        last_commit.write(str(copy), steps, str(copy / "checkpoints"))  # the directory has another name
                        used.append(measure(tree, command(part, copy, steps)))
                        shutil.rmtree(copy)
                    more[tree].append((used[1][0] - used[0][0], used[1][1] - used[0][1]))
            show(part, args.trees, more)


if __name__ == "__main__":
    main()
