"""Tasks of the package reasoning-gym: their examples, and the scores of answers.

An example is a function of the package's version, the task, its options, a seed and a number. A row holds these, so a
process that scores an answer makes the example again, with all that the task knows about it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trainer.errors import UserError, describe_error, did_you_mean
from trainer.seeding import derive_seed

NAME = "reasoning_gym"
COMPOSITE = "composite"
"""The task that mixes others: its option `datasets` is a list of {name, weight, config}."""
_CHUNK = 1000
"""Examples of one data set of the package. Some of its tasks make all of theirs at the start, or have no more than
20,000."""
_EVALUATES = frozenset(
    {"binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24"}
    | {"simple_integration", "spiral_matrix", "string_insertion"}
)
"""Tasks whose score evaluates an answer, as Python or by SymPy, which makes Python of it: an answer could run code."""

_NO_ANSWER = "I do not know"


def check_task(task: str, options: Mapping[str, Any]) -> None:
    """Check that the package has the task, and that the task takes the options.

    Raises:
        UserError: the package is not installed, has no such task, or refuses the options, or the task's score is that
            of a right answer whatever the policy says.
    """
    known = known_tasks()
    if task not in known:
        meant = did_you_mean(task, known) or f"choose one of {', '.join(sorted(known))}"
        raise UserError(f"data.synthetic_args.task={task}: reasoning-gym {_version()} has no such task; {meant}")
    parts = [one["name"] for one in options.get("datasets", [])] if task == COMPOSITE else []
    for name in (task, *parts):
        if name in _EVALUATES:
            raise UserError(
                f"data.synthetic_args.task={task}: the score of reasoning-gym's task {name} evaluates what "
                "the policy has written, so an answer could run code with your rights; choose another task"
            )
    names = [name for name in known[task][1].__dataclass_fields__ if name != "size"]
    for name in options:
        if name not in names:
            meant = did_you_mean(name, names) or f"its options are {', '.join(names)}"
            raise UserError(f"data.synthetic_args: the task {task} takes no {name}; {meant}")
    if all(_is_right(_NO_ANSWER, make_example(task, options, number)) for number in range(3)):
        raise UserError(
            f"data.synthetic_args.task={task}: reasoning-gym {_version()} gives full reward for `{_NO_ANSWER}` to each "
            "of its first questions, so nothing could be learnt; choose another task"
        )


def _is_right(answer: str, row: Mapping[str, Any]) -> bool:
    try:
        return score(answer, row) == 1
    except Exception:  # some tasks raise for a text that they cannot read; the reward then counts as failed
        return False


def make_example(task: str, options: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return one example: `prompt`, `answer`, and what it was made of."""
    entry = _entry(task, _as_text(options), number)
    made_of = {"task": task, "options": dict(options), "number": number, "version": _version()}
    answer = entry["answer"]
    return {"prompt": entry["question"], "answer": "" if answer is None else str(answer), NAME: made_of}


def score(completion: str, row: Mapping[str, Any]) -> float:
    """Return what the task gives for the answer in a completion: the text in the last `<answer>…</answer>`.

    A completion without that is the answer as a whole, without thoughts up to `</think>`.

    Raises:
        ValueError: the row is not of the package, or this version of the package makes another example of it.
    """
    made_of = row.get(NAME)
    if not isinstance(made_of, Mapping):
        raise ValueError("the row is not of reasoning-gym; choose data=reasoning_gym")
    entry = _entry(made_of["task"], _as_text(made_of["options"]), made_of["number"])
    if entry["question"] != row["prompt"]:
        raise ValueError(
            f"reasoning-gym {_version()} makes another example of the row, which is of version {made_of['version']}"
        )
    answer, end = completion.rpartition("</think>")[2], 0
    while (begin := completion.find("<answer>", end)) >= 0 and (end := completion.find("</answer>", begin)) >= 0:
        answer = completion[begin + len("<answer>") : end]
    dataset = _chunk(made_of["task"], _as_text(made_of["options"]), made_of["number"] // _CHUNK)
    return float(dataset.score_answer(answer.strip(), copy.deepcopy(entry)))


def known_tasks() -> Mapping[str, Any]:
    """Return the tasks of the package by name: the classes of data set and options.

    Raises:
        UserError: the package is not installed.
    """
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            f"data.synthetic={NAME}: the package reasoning-gym cannot be imported ({describe_error(error)}); install "
            "the extra `environments` (docs/install.md)"
        ) from error
    return DATASETS


def _version() -> str:
    return importlib.metadata.version("reasoning-gym")


def _as_text(options: Mapping[str, Any]) -> str:
    return json.dumps(options, sort_keys=True)


@functools.lru_cache(maxsize=8)
def _chunk(task: str, options: str, number: int) -> Any:
    """Return a data set of `_CHUNK` examples."""
    kind, settings = known_tasks()[task]
    given = json.loads(options)
    seed = derive_seed(NAME, given.pop("seed", 0), number) % 2**32
    try:
        if task == COMPOSITE:
            from reasoning_gym.composite import DatasetSpec

            given["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **one}) for one in given["datasets"]]
        with _seeded(task, number):
            return kind(settings(**given, seed=seed, size=_CHUNK))
    except Exception as error:
        raise UserError(
            f"data.synthetic_args={options}: reasoning-gym refuses them for the task {task} ({describe_error(error)})"
        ) from error


@functools.lru_cache(maxsize=512)
def _entry(task: str, options: str, number: int) -> dict[str, Any]:
    chunk, index = divmod(number, _CHUNK)
    dataset = _chunk(task, options, chunk)
    with _seeded(task, number):
        return dataset[index]


@contextlib.contextmanager
def _seeded(task: str, number: int) -> Iterator[None]:
    """Seed the generators of the process for the block: some tasks draw from them. Restore them after it."""
    states = random.getstate(), np.random.get_state()
    seed = derive_seed(NAME, task, number) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
