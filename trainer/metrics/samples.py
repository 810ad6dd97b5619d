"""Episodes as people read them: on the terminal, in W&B and TensorBoard, and in files of the run directory."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.files.atomic_io import write_file
from trainer.process.log_setup import escape

Message = Mapping[str, Any]  # `role` and `content`
VALIDATION_FOLDER = "validation"
COLUMNS = ("uid", "prompt", "answer", "completion", "reward", "rewards", "finish_reason", "failure", "metrics")
"""Of a table of transcripts."""
_WIDTH = 100
_FIRST, _LAST = 4, 3  # lines of a long text that a terminal shows. The last ones often hold the answer.
_MOST_CHARACTERS = 1 << 16  # of a longer text, tables and terminals get the beginning and the end


@dataclass(frozen=True)
class Transcript:
    """One episode as text."""

    uid: str  # of the prompt
    number: int  # of the completion, among those of the prompt
    prompt: Sequence[Message]  # the messages before the first reply
    completion: Sequence[Message]
    """The reply; with an environment, the first reply and all messages after it."""
    answer: str  # the reference answer; empty if the data has none
    reward: float | None  # None: it failed, and is left out
    rewards: Mapping[str, float] = field(default_factory=dict)  # what `reward` consists of
    finish_reason: str = "stop"  # see `trainer.episodes.Episode.status`
    failure: str = ""  # see `trainer.episodes.Episode.failure`
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What its environment, or its tools, have counted."""

    @property
    def name(self) -> str:
        return f"{self.uid}:{self.number}"

    def row(self) -> tuple[str, str, str, str, float | None, str, str, str, str]:
        prompt, answer, completion = self._texts()
        reward, failure = self.reward, printable(self.failure)
        parts, metrics = _listed(self.rewards), _listed(self.metrics)
        return self.name, prompt, answer, completion, reward, parts, self.finish_reason, failure, metrics

    def block(self, brief: bool = False) -> str:
        """Return readable lines without control characters; `brief`: the beginning and the end of long texts."""
        prompt, answer, completion = self._texts()
        parts = f" ({_listed(self.rewards)})" if len(self.rewards) > 1 else ""
        reward = "none" if self.reward is None else f"{self.reward:.4g}"
        reward += parts + ("" if self.finish_reason == "stop" else f", ended by: {self.finish_reason}")
        texts = {"prompt": prompt, "completion": completion, "answer": answer, "reward": reward}
        texts |= {"failure": printable(self.failure), "metrics": _listed(self.metrics)}
        texts = {label: text for label, text in texts.items() if text or label in ("prompt", "completion")}
        lines = []
        for label, text in texts.items():
            shown = text.split("\n")
            if brief:
                options: dict[str, Any] = {"replace_whitespace": False, "drop_whitespace": False}
                shown = [part for line in shown for part in textwrap.wrap(line, _WIDTH, **options) or [""]]
                left_out = len(shown) - _FIRST - _LAST
                if left_out > 1:
                    shown = [*shown[:_FIRST], f"… ({left_out} lines left out)", *shown[-_LAST:]]
            lines += [f"{label if i == 0 else '':<10}  {line}".rstrip() for i, line in enumerate(shown)]
        return "\n".join(lines)

    def _texts(self) -> tuple[str, str, str]:
        texts, half = [_turns(self.prompt), self.answer, _turns(self.completion)], _MOST_CHARACTERS // 2
        for place, text in enumerate(texts):
            left_out = len(text) - _MOST_CHARACTERS
            if left_out > 0:  # wrapping megabytes takes minutes
                texts[place] = f"{text[:half]}\n… ({left_out:,} characters left out)\n{text[-half:]}"
        prompt, answer, completion = map(printable, texts)
        return prompt, answer, completion


def draw(size: int, count: int, seed: int, split: str, step: int) -> list[int]:
    """Return `count` different indices below `size`, ascending: others in each step, the same in a resumed run."""
    from trainer.seeding import permutation  # imports NumPy, which readers of metrics do not need

    return sorted(permutation(size, seed, "sample", split, step)[:count].tolist())


def write_validation(
    run_dir: str, step: int, transcripts: Sequence[Transcript], fence: Callable[[], None] = lambda: None
) -> None:
    """Write `{run_dir}/validation/step_{step}.jsonl` atomically: one line an episode, also again after a kill."""
    fence()
    directory = os.path.join(run_dir, VALIDATION_FOLDER)
    os.makedirs(directory, exist_ok=True)
    rows = [{"step": step, **vars(one), "failure": one.failure or None} for one in transcripts]
    write_file(os.path.join(directory, f"step_{step}.jsonl"), "".join(json.dumps(row) + "\n" for row in rows), fence)


def printable(text: str) -> str:
    """Return `text` with characters escaped that control a terminal or cannot be seen, but for line breaks."""
    return escape(text.replace("\t", "    "))


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def _turns(messages: Sequence[Message]) -> str:
    """Return the contents of messages, with the roles if there are several. The system prompt is left out."""
    shown = [message for message in messages if message["role"] != "system"]
    if len(shown) == 1:
        return str(shown[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in shown)
