"""How reward functions are called, by the names of their parameters."""

from __future__ import annotations

import functools

import pytest

from trainer.errors import UserError
from trainer.rewards.functions import REWARDS
from trainer.rewards.signature import NAMES, signature_of

GIVEN = {name: f"<{name}>" for name in NAMES}


class Scorer:
    def __call__(self, answer, completion):
        return completion, answer


class AsyncScorer:
    async def __call__(self, completion):
        return completion


def wrapper(*args, **options):
    return args, options


async def later(completion):
    return completion


CALLS = {
    "old form": (lambda completion, answer: (completion, answer), ("<completion>", "<answer>")),
    "old form, other names": (lambda text, gold: (text, gold), ("<completion>", "<answer>")),
    "old form, one other name": (lambda completion, gold: (completion, gold), ("<completion>", "<answer>")),
    "old form, positional": (lambda a, b, /: (a, b), ("<completion>", "<answer>")),
    "old form with a row": (lambda text, gold, row: (text, gold, row), ("<completion>", "<answer>", "<row>")),
    "old form with a default": (lambda text, gold="": (text, gold), ("<completion>", "<answer>")),
    "names in any order": (lambda answer, completion: (completion, answer), ("<completion>", "<answer>")),
    "one name": (lambda completion: completion, "<completion>"),
    "all names of one": (
        lambda status, row, messages, prompt, answer, *, completion: (completion, prompt, status, row, messages),
        ("<completion>", "<prompt>", "<status>", "<row>", "<messages>"),
    ),
    "a default of its own": (lambda completion, tolerance=0.5: (completion, tolerance), ("<completion>", 0.5)),
    "a group": (lambda completions, answer: (completions, answer), ("<completions>", "<answer>")),
    "a group with options": (
        lambda completions, **options: (completions, sorted(options)),
        ("<completions>", ["answer", "messages", "prompt", "row", "status"]),
    ),
    "options": (
        lambda completion, **options: (completion, sorted(options)),
        ("<completion>", ["answer", "messages", "prompt", "row", "status"]),
    ),
    "a wrapper": (wrapper, (("<completion>", "<answer>"), {"row": "<row>"})),
    "an object": (Scorer(), ("<completion>", "<answer>")),
    "a partial": (functools.partial(lambda scale, completion: (scale, completion), 2), (2, "<completion>")),
}


def test_a_function_gets_what_its_parameters_name():
    for name in CALLS:
        function, expected = CALLS[name]
        calling = signature_of(function, "reward.name=f")
        assert calling.call(function, {name: GIVEN[name] for name in calling.wanted}) == expected
        assert calling.grouped == name.startswith("a group")
        assert not calling.is_async


@pytest.mark.parametrize("function", [later, AsyncScorer(), functools.partial(later)])
def test_async_functions_are_known(function):
    assert signature_of(function, "reward.name=f").is_async


REFUSED = {
    "TRL": (
        lambda prompts, completions, **options: 0,
        "asks for prompts, which no reward gets; valid are completion, ",
    ),
    "TRL, with a column": (lambda completions, solution, **options: 0, "asks for solution, which no reward gets"),
    "verl": (
        lambda data_source, solution_str, ground_truth, extra_info=None: 0,
        "asks for data_source, solution_str, ground_truth, which no reward gets; .* docs/rewards.md has the names",
    ),
    "one unknown name": (lambda text: 0, "asks for text, which no reward gets"),
    "a keyword": (lambda completion, *, threshold: 0, "asks for threshold, which no reward gets"),
    "one and all": (lambda completion, completions: 0, "asks for completions, the whole group, and for one"),
}


def test_parameters_that_no_reward_gets_are_refused():
    for name in REFUSED:
        function, sentence = REFUSED[name]
        with pytest.raises(UserError, match=f"^reward.name=f: the function {sentence}") as refusal:
            signature_of(function, "reward.name=f")
        assert "\n" not in str(refusal.value)


def test_the_built_in_rewards_name_completion_and_answer():
    for name, function in REWARDS.items():
        task = ("row",) if name == "reasoning_gym" else ()
        assert signature_of(function, "").wanted == ("completion", "answer", *task)
