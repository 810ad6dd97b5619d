"""Show that a change of the code leaves the numbers of runs as they were.

    python -m tools.same_runs record DIRECTORY     # before the change: train small runs
    python -m tools.same_runs compare DIRECTORY    # after it: train them again, and compare them with the recorded ones
    python -m tools.same_runs resume DIRECTORY     # continue the recorded runs from their middle checkpoint

`compare` and `resume` print one line a run, and end with status 1 if a metric (those of clocks aside) or a byte of an
exported weight differs; `--tolerance 1e-5` allows rounding, for a change of the arithmetic. On one machine, one thread.
Of a run in flight, the counters of prompts are compared alone: nothing else of it is promised.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.metrics.tracker import read_metrics

STEPS = 6
_SMALL = ["sft.steps=30", "sft.optimizer.warmup_steps=5", "data.train_size=64", "data.val_size=16",
          "trainer.val_interval=3", "trainer.ckpt_interval=3", f"trainer.hf_save_interval={STEPS}",
          "logger.plot=false"]  # fmt: skip
_ROLLOUTS = ["trainer.train_batch_size=8", "trainer.mini_batch_size=4", f"trainer.total_steps={STEPS}", "rollout.n=4",
             "rollout.max_num_seqs=32"]  # fmt: skip
_CHATS = [f"sft.steps={STEPS}", "sft.batch_size=2", "sft.max_length=64", "data.synthetic=null", "data.train_size=-1"]
RUNS: dict[str, tuple[str, list[str]]] = {
    "grpo": ("train", ["rollout.val_n=2"]),
    "ppo": ("train", ["algorithm=ppo", "trainer.num_workers=2", "algorithm.kl_coef=0.01",
                             "trainer.critic.warmup_steps=1"]),
    "dapo": ("train", ["algorithm=dapo", "rollout=transformers", "data.train_size=24",
                              "data.curriculum=tools.same_runs:hardest_first", "algorithm.kl_coef=0.01",
                              "+algorithm.options.kl_target=0.05", "+algorithm.options.kl_horizon=64",
                              "algorithm.ref_sync_interval=2", "algorithm.rollout_correction=tis",
                              "logger.save_rollouts=true"]),
    "lora": ("train", ["trainer.policy.lora.rank=4", "algorithm.kl_coef=0.01"]),
    "episodes": ("train", ["environment.name=examples.environment.hint:Hint", "rollout.max_prompt_tokens=96",
                                  "logger.save_rollouts=true"]),
    "agent": ("train", ["environment.name=tools.same_runs:Twice", "rollout.max_prompt_tokens=96",
                               "logger.save_rollouts=true"]),
    "mix": ("train", ["data.synthetic=null", "data.train_size=-1", "data.val_size=-1", "rollout.val_n=2",
                             "data.mix.hints.synthetic=reverse_text", "data.mix.hints.size=24",
                             "data.mix.hints.environment.name=examples.environment.hint:Hint",
                             "data.mix.hints.weight=2", "data.mix.sums.synthetic=arithmetic", "data.mix.sums.size=16",
                             "data.mix.sums.reward.name=arithmetic", "data.val_sets.sums.synthetic=arithmetic",
                             "data.val_sets.sums.size=8", "data.val_sets.sums.n=2",
                             "data.val_sets.sums.reward.name=arithmetic", "trainer.best_metric=val/sums/avg@2",
                             "algorithm.advantage_estimator=remax", "algorithm.dynamic_sampling=true",
                             "rollout.max_prompt_tokens=96"]),
    "ahead": ("train", ["rollout.ahead=1", "rollout.num_engines=2", "algorithm.dynamic_sampling=true"]),
    "ahead2": ("train", ["rollout.ahead=2", "environment.name=examples.environment.hint:Hint",
                                "rollout.max_prompt_tokens=96"]),
    "in_flight": ("train", ["rollout.in_flight_updates=true", "rollout.max_staleness=1"]),
    "supervised": ("sft", ["data.messages_key=messages", *_CHATS]),
    "rollouts": ("sft", ["sft.source=rollouts", "sft.max_weight=2.0", "trainer.val_interval=-1", *_CHATS]),
}  # fmt: skip


class Twice:
    """An agent that asks the policy two times; its reward is the share of equal letters of the two replies."""

    async def run(self, row: Mapping[str, Any], seed: int, endpoint: Any) -> float:
        chat = [{"role": "user", "content": row["prompt"]}]
        first = await asyncio.to_thread(self._ask, endpoint, chat)
        chat += [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
        second = await asyncio.to_thread(self._ask, endpoint, chat)
        return sum(a == b for a, b in zip(first, second, strict=False)) / max(1, len(first), len(second))

    def _ask(self, endpoint: Any, messages: list[dict[str, str]]) -> str:
        body = json.dumps({"model": endpoint.model, "messages": messages}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {endpoint.api_key}"}
        request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]["content"] or ""


def hardest_first(prompts: Sequence[Any], epoch: int, rewards: Mapping[int, float]) -> list[int]:
    """A curriculum that depends on the rewards of earlier steps."""
    return sorted(range(len(prompts)), key=lambda place: (rewards.get(place, 0.0), (7 * place + epoch) % 24))


def train(name: str, directory: Path, *overrides: str) -> Path:
    """Train one of `RUNS` below `directory`; return its run directory."""
    job, settings = RUNS[name]
    if name == "supervised":
        files = [_write_chats(directory, kind, count) for kind, count in (("a", 7), ("b", 20))]
        settings = [*settings, f"data.train_files=[{files[0]},{files[1]}]", f"data.val_files=[{files[0]}]"]
    if name == "rollouts":
        (file,) = (directory / "dapo/rollouts").glob("step_1.*")
        settings = [*settings, f"data.train_files=[{file}]",
                    f"model.path={directory}/dapo/exports/global_step_{STEPS}/policy"]  # fmt: skip
    small = _SMALL if job == "sft" else [*_SMALL, *_ROLLOUTS]
    command = [sys.executable, "-m", "trainer", job, *small, *settings, f"trainer.run_name={name}",
               f"trainer.run_dir={directory}/{name}", *overrides]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRAINER_CACHE": str(directory / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return directory / name


def _write_chats(directory: Path, name: str, count: int) -> Path:
    file = directory / f"{name}.jsonl"
    turns = [("user", "{0}{1}"), ("assistant", "{1}"), ("user", "again"), ("assistant", "{1}, {1}")]
    with open(file, "w") as lines:
        for i in range(count):
            chat = [{"role": role, "content": text.format(name, i)} for role, text in turns]
            lines.write(json.dumps({"messages": chat}) + "\n")
    return file


def difference(before: Path, after: Path, tolerance: float) -> str:
    """Say in what two runs differ most; empty when they are the same."""
    rows = [read_metrics(str(run / "metrics.jsonl")) for run in (before, after)]
    if [row["step"] for row in rows[0]] != [row["step"] for row in rows[1]]:
        return "their steps differ"
    worst, found = tolerance, ""
    for old, new in zip(*rows, strict=True):
        names = {name for name in old if not name.startswith(("time/", "perf/", "journal/"))}
        if before.name == "in_flight":
            names &= {"progress/prompts", "progress/samples", "progress/epoch"}
        if not names <= new.keys():
            return f"step {old['step']}: {', '.join(sorted(names - new.keys()))} is gone"  # more may have come
        for name in sorted(names):
            a, b = old[name], new[name]
            relative = 0.0 if a == b else abs(a - b) / max(abs(a), abs(b), 1e-2)
            if relative > worst:
                worst, found = relative, f"step {old['step']}: {name} is {b!r} and was {a!r} (relative {relative:.1e})"
    if found or tolerance or before.name == "in_flight":
        return found
    exports = [
        {path.name: path.read_bytes() for path in run.rglob("exports/**/*.safetensors")} for run in (before, after)
    ]
    return "" if exports[0] == exports[1] else "the exported weights differ"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare", "resume"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative difference of metrics that is allowed")
    arguments = parser.parse_args()
    recorded = arguments.directory.resolve()
    if arguments.action == "record":
        recorded.mkdir(parents=True, exist_ok=True)
        for name in arguments.runs:
            train(name, recorded)
            print(f"{name}: recorded", flush=True)
        return 0
    status = 0
    with tempfile.TemporaryDirectory(prefix="same-runs-") as scratch:
        for name in arguments.runs:
            if arguments.action == "resume":
                run = Path(scratch) / name
                shutil.copytree(recorded / name, run)
                shutil.rmtree(run / f"checkpoints/global_step_{STEPS}")
                shutil.rmtree(run / "exports")
                overrides = [f"trainer.run_dir={run}", "trainer.resume_mode=latest"]
                train(name, recorded, *overrides)
            else:
                train(name, recorded, f"trainer.run_dir={Path(scratch) / name}")
                run = Path(scratch) / name
            found = difference(recorded / name, run, arguments.tolerance)
            same = f"the same to {arguments.tolerance:g}" if arguments.tolerance else "the same"
            print(f"{name}: {found or same}", flush=True)
            status |= bool(found)
    return status


if __name__ == "__main__":
    sys.exit(main())
