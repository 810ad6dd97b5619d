"""Run directories with curves, episodes and tokens, written as a run writes them, for tests of the viewer."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.metrics import make_tracker, step_metrics
from trainer.data.rollout_io import write_rollouts
from trainer.episodes import Episode, Sample, TokenScores
from trainer.metrics.samples import Transcript, write_validation
from trainer.process.failures import JOB, Incident

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
HOSTILE = (
    "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'><!-- \x1b[31mred\x1b[0m \x00"
    "\u202egnol\u202c \u2028line \u200bnothing \ud83d half ' \" & \\ {{DATA}} \N{WAVING HAND SIGN} \r\n end"
)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for each byte, and some special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (USER, ASSISTANT, END)])
    return tokenizer


TOKENIZER = byte_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text.encode(errors="replace").decode(), add_special_tokens=False).ids


def make_episode(
    uid: str, turns: list[tuple[str, str]], reward: float | None, seed: int = 0, **values: Any
) -> tuple[Episode, TokenScores]:
    """Return an episode of turns of a user and the policy, and what a trainer would have computed for its tokens."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    mask: list[float] = []
    messages = []
    for asked, said in turns:
        given, sampled = encode(f"{USER}{asked}{ASSISTANT}"), encode(f"{said}{END}")
        ids += given + sampled
        mask += [0.0] * len(given) + [1.0] * len(sampled)
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    sampled = np.asarray(mask, np.float32)
    logprobs = (-rng.exponential(0.7, len(ids)) * sampled).astype(np.float32)
    sample = Sample(np.asarray(ids, np.int32), sampled, logprobs, (1, 1))
    trained = (logprobs + rng.normal(0, 0.05, len(ids)).astype(np.float32)) * sampled
    entropy = rng.exponential(0.8, len(ids)).astype(np.float32) * sampled
    scores = TokenScores(trained, entropy, sampled * np.float32((reward or 0.0) - 0.5))
    group = values.pop("group", uid.rpartition(":")[0])
    episode = Episode(uid, group, [sample], reward, messages=messages, turns=len(turns), **values)
    return episode, scores


def make_debate(uid: str) -> tuple[Episode, list[TokenScores]]:
    """Return an episode of two players: `pro` has won, `con` has lost."""
    both = [make_episode(uid, [("who?", said)], reward) for said, reward in (("I am pro", 1.0), ("I am con", -1.0))]
    episode = both[0][0]
    samples = [
        replace(one.samples[0], player=name, reward=one.reward)
        for (one, _), name in zip(both, ("pro", "con"), strict=True)
    ]
    return replace(episode, samples=samples, reward=0.0), [scores for _, scores in both]


def make_run(
    path: Path,
    steps: int = 3,
    groups: int = 4,
    size: int = 4,
    hostile: str = "",
    with_scores: bool = True,
    **config: Any,
) -> Path:
    """Write a run directory. In its first group of each step all rewards are 1, in the others they differ.

    Args:
        hostile: a text of the second reply of the first episode, of its question and its answer.
    """
    path.mkdir(parents=True, exist_ok=True)
    tracker = make_tracker(path)
    tracker.log(0, {"val/accuracy": 0.25})
    for step in range(1, steps + 1):
        tracker.log(step, step_metrics(step) | {"reward/zero_std_frac": 1 / groups})
        made = [
            make_episode(
                f"0:{step * groups + g}:{n}",
                [
                    (
                        f"question {g}{hostile if not g + n else ''}",
                        f"reply {n} of step {step} naïve 👋{hostile if not g + n else ''}",
                    )
                ],
                1.0 if g == 0 else (n % 2) / (g + 1),
                seed=step * 1000 + g * 10 + n,
                rewards={"right": 1.0 if g == 0 else float(n % 2), "brief": 0.5},
                status="length" if n == size - 1 else "stop",
                answer=f"answer {g}{hostile if not g + n else ''}",
                metrics={"calls": float(n)},
            )
            for g in range(groups)
            for n in range(size)
        ]
        scores = [own for _, own in made] if with_scores else None
        write_rollouts(str(path), step, [episode for episode, _ in made], scores=scores)
    tracker.close()
    said = [{"role": "user", "content": "held out"}], [{"role": "assistant", "content": "validated"}]
    write_validation(str(path), 0, [Transcript(f"val:{i}", 0, *said, "yes", i / 2) for i in range(3)])
    model = path / "model"
    model.mkdir(exist_ok=True)
    TOKENIZER.save(str(model / "tokenizer.json"))
    nested = {"model": {"path": str(model)}, "trainer": {"total_steps": steps, "ckpt_path": str(path / "checkpoints")}}
    nested |= {"algorithm": {"kl_coef": 0.1, **config}, "logger": {}}
    (path / "config.yaml").write_text(yaml.safe_dump(nested))
    start = {"time": "2026-01-02T03:04:05+0000", "command": ["trainer", "train"], "directory": "/", "host": "node"}
    start |= {"git": [{"directory": "/", "commit": "0123456789abcdef", "dirty": True}], "config": nested}
    task = {"name": "rl", "total_steps": steps, "best_metric": "val/accuracy", "best_mode": "max", "metrics": {}}
    start |= {"task": task}
    (path / "starts.jsonl").write_text(json.dumps(start) + "\n")
    command = shlex.join(start["command"])
    lines = [f"start of {command}", f"resumed from {path}/checkpoints/global_step_1, step 1 of {steps}"]
    (path / "log.txt").write_text("".join(f"2026-01-02 03:04:05 {line}\n" for line in lines))
    incident = Incident(2, "rank", "rank 1", "node", JOB, "out of memory", "restarted the ranks", 3.0, "no memory")
    line = {**vars(incident)}
    line["class"] = line.pop("kind")
    (path / "incidents.jsonl").write_text(json.dumps(line) + "\n")
    for step in range(1, steps + 1):
        (path / f"checkpoints/global_step_{step}").mkdir(parents=True)
    return path
