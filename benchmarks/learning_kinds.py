"""What the built-in model learns from a teacher, pairs, a reward model, old rollouts and itself.

`python -m benchmarks.learning_kinds` trains each kind from one start, on CPUs, once for each seed, and prints a table
for `docs/learning.md`. A job that was done before is not run again, and one that was killed continues.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from trainer.data.generators import generate
from trainer.environments import StepResult
from trainer.metrics.tracker import METRICS_FILE, read_metrics

LETTERS = {"min_letters": 3, "max_letters": 6}
_ARGS = "{" + ", ".join(f"{name}: {value}" for name, value in LETTERS.items()) + "}"
WORDS = [f"+data.synthetic_args={_ARGS}", "data.train_size=2048", "data.val_size=256"]
HELD_OUT = ["data=reverse_text", WORDS[0], WORDS[2]]
SAMPLED = ["rollout=transformers", "rollout.max_response_tokens=8"]
STEPS = 30
RM_STEPS = 200
"""A small reward model needs more to see that two letters are swapped."""
STONES = range(4, 16)
ACCURACY = "val/accuracy"


class Nim:
    """Two players take 1, 2 or 3 stones in turn. Who takes the last one wins; a reply that is no move loses."""

    players: tuple[str, ...] = ("first", "second")

    def reset(self, row: dict[str, Any], seed: int) -> list[dict[str, str]]:
        self.stones, self.turn, self.rng = int(row["prompt"]), 0, random.Random(seed)
        return self.shown()

    def step(self, reply: dict[str, str]) -> StepResult:
        if not self.takes(reply["content"]):
            return self.won_by(1 - self.turn)
        if not self.stones:
            return self.won_by(self.turn)
        self.turn = 1 - self.turn
        return StepResult(self.shown(), player=self.players[self.turn])

    def takes(self, move: str) -> bool:
        """Make a move; returns whether it is one."""
        if move.strip() not in ("1", "2", "3") or int(move) > self.stones:
            return False
        self.stones -= int(move)
        return True

    def won_by(self, turn: int) -> StepResult:
        rewards = {player: 1.0 if i == turn else -1.0 for i, player in enumerate(self.players)}
        return StepResult(done=True, player_rewards=rewards)

    def shown(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": str(self.stones)}]

    def close(self) -> None: ...


class NimAgainstChance(Nim):
    """The policy begins; its opponent wins where one move does it, and else moves by chance. A win has reward 1."""

    players = ()

    def step(self, reply: dict[str, str]) -> StepResult:
        if not self.takes(reply["content"]):
            return StepResult(reward=0.0, done=True)
        if self.stones <= 3:
            return StepResult(reward=float(not self.stones), done=True)
        self.stones -= self.rng.randint(1, 3)
        return StepResult(self.shown())


def pairs(split: str, size: int) -> list[dict[str, Any]]:
    """Pairs of words: better is the word backwards, worse is that with two letters swapped."""
    rng, rows = random.Random(0), []
    for row in generate("reverse_text", LETTERS, size, split):
        wrong = list(row["answer"])
        i, j = rng.sample(range(len(wrong)), 2)
        wrong[i], wrong[j] = wrong[j], wrong[i]
        if "".join(wrong) != row["answer"]:
            rows.append({"prompt": row["prompt"], "chosen": row["answer"], "rejected": "".join(wrong)})
    return rows


def moves() -> list[dict[str, Any]]:
    """Moves by chance, for the first model of the game."""
    rng = random.Random(0)
    numbers = [n for n in range(1, STONES.stop) for _ in range(20)]
    return [{"prompt": str(n), "answer": str(rng.randint(1, min(3, n)))} for n in numbers]


class Kind(NamedTuple):
    """One kind of training, and how its result is measured."""

    name: str
    task: str
    start: str
    words: Sequence[str]
    steps: int = STEPS
    held_out: Sequence[str] | None = HELD_OUT
    """Overrides of the evaluation. None: the run's own metric `val/rewards/accuracies` counts."""


class Benchmark:
    """The files and jobs in a directory."""

    def __init__(self, out: str):
        self.out = os.path.abspath(out)
        os.makedirs(self.out, exist_ok=True)

    def file(self, name: str, rows: Sequence[dict[str, Any]]) -> str:
        path = os.path.join(self.out, name)
        with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        os.replace(file.name, path)  # a job may read it
        return path

    def run(self, command: str, name: str, words: Sequence[str]) -> str:
        """Run a job to its end, unless it was run before; return its directory."""
        directory = os.path.join(self.out, name)
        done = os.path.join(directory, "ended")
        if not os.path.exists(done):
            os.makedirs(directory, exist_ok=True)
            own = [f"trainer.run_dir={directory}", "trainer.device=cpu", "trainer.ray_address=processes"]
            if command != "evaluate":
                own += ["trainer.resume_mode=latest", "trainer.max_ckpts_to_keep=1", "logger.plot=false"]
            with open(f"{directory}.log", "a", encoding="utf-8") as log:
                job = [sys.executable, "-m", "trainer", command, *words, *own]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                subprocess.run(job, stdout=log, stderr=log, check=True, env=environment)
            open(done, "w").close()
        return directory

    def train(self, kind: Kind, name: str, seed: int) -> str:
        """Train; return the directory of the exported model."""
        words = [
            f"trainer.task={kind.task}",
            f"model.path={kind.start}",
            f"trainer.seed={seed}",
            f"trainer.total_steps={kind.steps}",
        ]
        words += [f"trainer.hf_save_interval={kind.steps}", f"trainer.ckpt_interval={kind.steps}"]
        words += [f"trainer.val_interval={-1 if kind.held_out else kind.steps}"]
        return export_in(self.run("train", name, [*words, *kind.words]))

    def supervised(self, name: str, *words: str) -> str:
        return export_in(self.run("sft", name, ["trainer.val_interval=-1", "trainer.ckpt_interval=-1", *words]))

    def measure(self, model: str, name: str, held_out: Sequence[str] | None) -> float:
        """Return the accuracy of greedy completions on held-out rows, or of a reward model on held-out pairs."""
        if held_out is None:
            return read_metrics(os.path.join(self.out, name, METRICS_FILE))[-1]["val/rewards/accuracies"]
        directory = self.run("evaluate", f"{name}-evaluated", [model, *SAMPLED, *held_out])
        with open(os.path.join(directory, "evaluation.json"), encoding="utf-8") as file:
            return json.load(file)["metrics"][ACCURACY]


def export_in(directory: str) -> str:
    (path,) = glob.glob(os.path.join(glob.escape(directory), "exports/global_step_*/policy"))
    return path


def rl(*words: str, prompts: int = 16) -> list[str]:
    batch = [f"trainer.train_batch_size={prompts}", f"trainer.mini_batch_size={prompts // 2}", "rollout.n=8"]
    lr = ["trainer.policy.optimizer.lr=4e-4", "trainer.policy.optimizer.scheduler=cosine"]
    return [*SAMPLED, *batch, *lr, *words]


def kinds(bench: Benchmark, start: str, teacher: str, player: str, recorded: str, seed: int) -> list[Kind]:
    """Return what is trained with a seed. The reward model goes before the run that reads it."""
    some_pairs, other_pairs = (
        bench.file(f"{name}_pairs.jsonl", pairs(name, n)) for name, n in (("train", 1024), ("val", 128))
    )
    on_pairs = [
        "data=files",
        f"data.train_files=[{some_pairs}]",
        "trainer.train_batch_size=32",
        "trainer.mini_batch_size=32",
    ]
    held_out_pairs = [f"data.val_files=[{other_pairs}]"]
    stones = bench.file("stones.jsonl", [{"prompt": str(n), "answer": ""} for n in STONES])
    # With a multiple of 4 the player who begins loses against one who plays well.
    games = [{"prompt": str(n), "answer": "", "game": game} for game in range(20) for n in STONES if n % 4]
    game = ["data=files", "environment.max_turns=15", "rollout.max_prompt_tokens=64"]
    old = ",".join(sorted(glob.glob(os.path.join(glob.escape(recorded), "rollouts/step_*.arrow"))))
    mix = [
        f"data.mix.words.synthetic_args={_ARGS}",
        "data.mix.words.synthetic=reverse_text",
        "data.mix.words.size=2048",
    ]
    mix += ["algorithm=grpo", "data.train_size=-1"]
    replay = [f"data.mix.old.files=[{old}]", "data.mix.old.replay=true"]
    taught = [f"algorithm.teacher.path={teacher}", "trainer.policy.optimizer.lr=1e-4"]
    judge = os.path.join(bench.out, f"rm-{seed}/exports/global_step_{RM_STEPS}/policy")
    reward = ["reward.name=model", f"reward.model.path={judge}"]
    return [
        Kind("distillation", "rl", start, rl(*WORDS, "algorithm=opd", *taught)),
        Kind("dpo", "dpo", start, [*on_pairs, "trainer.policy.optimizer.lr=1e-4", "dpo.sft_coef=0.1"]),
        Kind("dpo sft", "dpo", start, [*on_pairs, "trainer.policy.optimizer.lr=1e-4", "dpo.sft_coef=1"]),
        Kind("rm", "rm", start, [*on_pairs, *held_out_pairs, "trainer.policy.optimizer.lr=3e-4"], RM_STEPS, None),
        Kind("ppo", "rl", start, rl(*WORDS, "algorithm=ppo", "trainer.critic.optimizer.lr=1e-3", *reward)),
        Kind("without replay", "rl", start, rl(*mix)),
        Kind("replay", "rl", start, rl(*mix, *replay, prompts=32)),
        Kind(
            "self-play", "rl", player,
            [*rl(*game, "environment.name=benchmarks.learning_kinds:Nim", "algorithm.advantage_estimator=rae"),
             "rollout.max_response_tokens=2", f"data.train_files=[{stones}]"],
            STEPS,
            [*game, "environment.name=benchmarks.learning_kinds:NimAgainstChance",
             f"data.val_files=[{bench.file('games.jsonl', games)}]"],
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="outputs/learning_kinds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    bench = Benchmark(options.out)
    start = bench.supervised("start", *WORDS, "sft.steps=85")
    teacher = bench.supervised("teacher", *WORDS, "sft.steps=150", "model.tiny.hidden_size=192")
    player = bench.supervised(
        "player", "data=files", f"data.train_files=[{bench.file('moves.jsonl', moves())}]", "sft.steps=60"
    )
    keep = ["logger.save_rollouts=true", "trainer.val_interval=-1", "trainer.ckpt_interval=-1"]
    recorded = bench.run(
        "train", "recorded", rl(*WORDS, "algorithm=grpo", f"model.path={start}", f"trainer.total_steps={STEPS}", *keep)
    )
    print(f"teacher: {bench.measure(teacher, 'teacher', HELD_OUT):.3f}", flush=True)
    results: dict[str, list[float]] = {}
    for seed in options.seeds:
        for kind in kinds(bench, start, teacher, player, recorded, seed):
            name = f"{kind.name.replace(' ', '_')}-{seed}"
            model = bench.train(kind, name, seed)
            if kind.name not in results:
                first = os.path.basename(os.path.dirname(os.path.dirname(os.path.dirname(kind.start))))
                results[kind.name] = [0.5 if kind.held_out is None else bench.measure(kind.start, first, kind.held_out)]
            results[kind.name].append(bench.measure(model, name, kind.held_out))
            print(f"{name}: {results[kind.name][-1]:.3f}", flush=True)
    print(f"| kind | start | seeds {', '.join(map(str, options.seeds))} |\n|---|---|---|")
    for name, (before, *after) in results.items():
        print(f"| {name} | {before:.3f} | {' '.join(f'{value:.3f}' for value in after)} |")


if __name__ == "__main__":
    main()
