"""Generated data sets. They are the same on every machine and for every run seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np

from trainer.data import reasoning_tasks
from trainer.errors import UserError, one_line
from trainer.seeding import HASH_SEED, derive_seed

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_CONTINUED = 0.35
"""Share of the chats of `look_up` that look up a name which they have found. The others give up then."""


def generate(
    name: str, args: Mapping[str, Any], size: int, split: str, task: str | None = None
) -> list[dict[str, Any]]:
    """Return `size` examples with `prompt` and `answer`. No prompt is in both `train` and `val`.

    Args:
        name: `arithmetic` (sums of two numbers up to `max_value`, 99), `look_up` (names whose numbers take up to
            `max_calls`, 3, calls of a tool to find; see `_name`), `reverse_text` (words of `min_letters` to
            `max_letters`, 4 to 10, and their reversal), or `reasoning_gym`, whose examples also hold what
            `reasoning_tasks.score` needs.
        split: `train` or `val`.
        task: the task of `reasoning_gym`.

    Raises:
        UserError: an option is out of range, or there are fewer than `size` different examples.
    """
    if name == reasoning_tasks.NAME:
        assert task is not None
        reasoning_tasks.check_task(task, args)
        return json.loads(_generate_apart(task, json.dumps(dict(args)), size, split))
    return _select(
        partial({"arithmetic": _sum, "look_up": _name, "reverse_text": _word}[name], **args), name, size, split
    )


def _select(sample: Callable[[int], dict[str, Any]], name: str, size: int, split: str) -> list[dict[str, Any]]:
    """Return the first `size` different examples of a split."""
    examples: dict[str, dict[str, Any]] = {}
    for attempt in range(20 * size + 1000):
        if len(examples) == size:
            break
        example = sample(attempt)
        prompt = example["prompt"]
        # The prompt itself determines its split, so the splits cannot overlap for any sizes.
        if (derive_seed("split", prompt) % 5 == 0) == (split == "val"):
            examples.setdefault(prompt, example)
    if len(examples) < size:
        raise UserError(
            f"data.{split}_size={size}: data.synthetic={name} with these data.synthetic_args has only "
            f"{len(examples)} different examples for {split}"
        )
    return list(examples.values())


@lru_cache(maxsize=4)
def _generate_apart(task: str, options: str, size: int, split: str) -> str:
    """Return examples of reasoning-gym as JSON. They are made in a process with a fixed seed for hashes.

    Some of its tasks take items from sets, whose order depends on that seed.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from trainer.data.generators import main; main()"
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
    given = json.dumps([task, options, size, split])  # all users of the machine can read a command line
    done = subprocess.run(command, env=environment, input=given, capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout
    last = one_line((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    raise UserError(
        last if last.startswith("data.") else f"data.synthetic_args.task={task}: examples cannot be made ({last})"
    )


def main() -> None:
    """Print examples of reasoning-gym as JSON; exit with the reason if there are none."""
    task, options, size, split = json.load(sys.stdin)
    output, sys.stdout = sys.stdout, sys.stderr  # whatever a task prints
    sample = partial(reasoning_tasks.make_example, task, json.loads(options))
    try:
        json.dump(_select(sample, reasoning_tasks.NAME, size, split), output)
    except UserError as error:
        sys.exit(str(error))


def _sum(attempt: int, max_value: int = 99) -> dict[str, str]:
    if max_value < 0:
        raise UserError(f"data.synthetic_args: max_value={max_value} must be at least 0")
    a, b = (int(r % (max_value + 1)) for r in _random("arithmetic", attempt, 2))
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def _word(attempt: int, min_letters: int = 4, max_letters: int = 10) -> dict[str, str]:
    if not 1 <= min_letters <= max_letters:
        raise UserError(f"data.synthetic_args: min_letters={min_letters} and max_letters={max_letters} leave no word")
    first, *rest = _random("reverse_text", attempt, max_letters + 1)
    length = min_letters + int(first % (max_letters - min_letters + 1))
    word = "".join(_LETTERS[int(r % 26)] for r in rest[:length])
    return {"prompt": word, "answer": word[::-1]}


def _name(attempt: int, max_calls: int = 3) -> dict[str, Any]:
    """Return a name and its number, with the columns `table` and `messages`.

    The table leads from each name to another one, or to the number. The messages are a chat to learn the calls from. It
    often gives up when it has found another name.
    """
    if max_calls < 1:
        raise UserError(f"data.synthetic_args: max_calls={max_calls} must be at least 1")
    count, number, *rest = (int(r) for r in _random("look_up", attempt, 2 + 4 * max_calls))
    calls, answer = 1 + count % max_calls, f"{number % 100:02}"
    names = ["".join(_LETTERS[r % 26] for r in rest[4 * i : 4 * i + 3]) for i in range(calls)]
    names = names if len({*names}) == calls else names[:1]
    table = dict(zip(names, [*names[1:], answer], strict=True))
    messages, last = [{"role": "user", "content": names[0]}], answer
    for (name, found), luck in zip(table.items(), rest[3::4], strict=False):
        call = json.dumps({"name": "look_up", "arguments": {"name": name}})
        messages.append({"role": "assistant", "content": f"<tool_call>{call}</tool_call>"})
        messages.append({"role": "tool", "content": found})
        if found != answer and luck % 1000 >= 1000 * _CONTINUED:
            last = "I do not know."
            break
    messages.append({"role": "assistant", "content": last})
    return {"prompt": names[0], "answer": answer, "table": table, "messages": messages}


def _random(name: str, attempt: int, count: int) -> np.ndarray:
    return np.random.Philox(key=derive_seed(name, attempt)).random_raw(count)
