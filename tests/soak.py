"""Kill a whole job, over and over, for as long as one wants: `python -m tests.soak --hours 1`.

Each round trains a small run with the vLLM engine, kills all its processes at random moments and restarts
it with the same command until it is done, and compares metrics and exported weights with a run that was
never killed. Prints a line a round and a tally; exits with 1 at the first difference.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.support.jobs import comparable, family, kill_all, metrics, run_job, start_job

STEPS = 6


def weights(run: Path) -> bytes:
    return (run / f"exports/global_step_{STEPS}/policy/model.safetensors").read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="for both runs: algorithm=ppo trainer.num_workers=2 …")
    args = parser.parse_args()
    moments, end = random.Random(args.seed), time.monotonic() + 3600 * args.hours
    base = [f"trainer.total_steps={STEPS}", f"trainer.hf_save_interval={STEPS}", "logger.plot=false",
            "trainer.resume_mode=latest", *args.overrides]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        cwd = Path(scratch)
        started = time.monotonic()
        whole = run_job(*base, "trainer.run_name=whole", cwd=cwd, timeout=3600)
        assert whole.returncode == 0, whole.stdout + whole.stderr
        seconds = time.monotonic() - started
        kills = rounds = verified = 0
        while time.monotonic() < end:
            rounds += 1
            job, killed = [*base, f"trainer.run_name=round{rounds}"], 0
            run = cwd / f"outputs/round{rounds}"
            while True:
                log = cwd / "log"
                process = start_job(*job, cwd=cwd, log=log)
                moment = time.monotonic() + moments.uniform(1, 1.2 * seconds)
                while process.poll() is None and time.monotonic() < moment:
                    time.sleep(0.01)
                if process.poll() is None:
                    kill_all(family(process.pid))
                    process.wait()
                    killed += 1
                verified += "resume verified" in log.read_text()
                if process.returncode == 0:
                    break
                assert process.returncode == -9, log.read_text()
            same = comparable(metrics(run)) == comparable(metrics(cwd / "outputs/whole"))
            same = same and weights(run) == weights(cwd / "outputs/whole")
            kills += killed
            print(f"round {rounds}: killed {killed} times, {'identical' if same else 'DIFFERENT'}", flush=True)
            if not same:
                sys.exit(1)
    print(f"{rounds} rounds, {kills} kills, {verified} resumes verified against replayed steps: all identical")


if __name__ == "__main__":
    main()
