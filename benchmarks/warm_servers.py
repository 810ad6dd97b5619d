"""What a warm inference server saves after a kill: `python -m benchmarks.warm_servers [--kills N] [--ray]`.

Trains the built-in model, or one with random weights (`--model 17M`), with engines of its own (cold), and with an
inference server that stays up (warm). Each job is killed with all its processes after its third step, and started again
with the same command, by turns, N times each (`--kills`). The seconds are those from the kill to the first step that
the new job finishes, and, of that, those until the new job begins that step. Both jobs are otherwise the same: plain
processes, or Ray with `--ray`. A killed job trains the step that was lost from its journal while its engines load; `--
rollout.journal=false` shows what a server saves where that step must be generated.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from statistics import median

import httpx
import psutil

from benchmarks.models import SHAPES, make_model
from trainer.metrics.tracker import METRICS_FILE, read_metrics

STEPS = 1000
KILLED_AFTER = 3
COMMON = (
    "data=reverse_text", "trainer.val_interval=-1", "trainer.ckpt_interval=1", "trainer.max_ckpts_to_keep=2",
    "sft.steps=30", "logger.plot=false", f"trainer.total_steps={STEPS}",
)  # fmt: skip
"""Overrides of the server and of both jobs."""
_LONGEST_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument(
        "--model", choices=tuple(SHAPES), help="a model with random weights (default: the built-in one)"
    )
    parser.add_argument("--ray", action="store_true", help="start the job's processes with Ray")
    parser.add_argument("extra", nargs="*", help="overrides for both jobs, after --")
    options = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="warm_servers-")
    common = list(COMMON)
    if options.model:
        path = os.path.join(directory, "model")
        make_model(SHAPES[options.model], None, path)
        common += [f"model.path={path}", "trainer.train_batch_size=8", "trainer.mini_batch_size=8"]
    processes = [] if options.ray else ["trainer.ray_address=processes"]
    jobs = [*common, "trainer.resume_mode=latest", *processes, *options.extra]
    seconds: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
    try:
        with serving(common, directory) as url:
            for _ in range(options.kills):
                for name, words in ways(url).items():
                    run_dir = os.path.join(directory, name)
                    row = kill_and_restart([*jobs, *words, f"trainer.run_dir={run_dir}"], run_dir)
                    seconds[name].append(row)
                    print(f"{name}: {row[0]:.1f} s", flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for name, rows in seconds.items():
        steps, starts = (", ".join(f"{row[i]:.1f}" for row in rows) for i in (0, 1))
        print(f"{name}: from the kill to the first finished step {steps} s; until that step began {starts} s")
    ratio = median(row[0] for row in seconds["warm"]) / median(row[0] for row in seconds["cold"])
    print(f"warm / cold                                  {ratio:.2f}  (aim: at most 0.50)")


def ways(url: str) -> dict[str, list[str]]:
    """Return the overrides of a job with engines of its own, and of one that asks the server at `url`."""
    return {"cold": ["rollout.engine=vllm"], "warm": ["rollout.engine=server", f"rollout.urls=[{url}]"]}


@contextlib.contextmanager
def serving(words: list[str], directory: str):
    """Start a server, wait until it serves, and yield its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "trainer.inference", *words]
    with open(os.path.join(directory, "server.txt"), "w") as log:
        server = subprocess.Popen([*command, f"inference.port={port}"], stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _state(url) == "ready", server)
        yield url
    finally:
        server.terminate()
        server.wait()


def _state(url: str) -> str:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/trainer/status").json()["state"]
    return ""


def kill_and_restart(words: list[str], run_dir: str) -> tuple[float, float]:
    """Train, kill the job, start it again; return the seconds to its first finished step, and to that step's begin."""
    job = start(words)
    first = last_step(run_dir)
    wait_until(lambda: last_step(run_dir) >= first + KILLED_AFTER, job)
    kill(job)
    killed_at, done = time.perf_counter(), last_step(run_dir)
    job = start(words)
    wait_until(lambda: last_step(run_dir) > done, job)
    seconds = time.perf_counter() - killed_at
    took = read_metrics(os.path.join(run_dir, METRICS_FILE))[-1]["time/step"]
    kill(job)
    return seconds, seconds - took


def start(words: list[str]) -> psutil.Popen:
    output = subprocess.DEVNULL
    return psutil.Popen([sys.executable, "-m", "trainer", "train", *words], stdout=output, stderr=output)


def last_step(run_dir: str) -> int:
    path = os.path.join(run_dir, METRICS_FILE)
    return max((row["step"] for row in read_metrics(path)), default=0) if os.path.exists(path) else 0


def kill(job: psutil.Popen) -> None:
    """Kill a job with all its processes."""
    for process in [job, *job.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    job.wait()


def wait_until(is_true, process: subprocess.Popen) -> None:
    end = time.monotonic() + _LONGEST_S
    while not is_true():
        assert process.poll() is None, f"a process has ended with status {process.returncode}"
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.02)


if __name__ == "__main__":
    main()
