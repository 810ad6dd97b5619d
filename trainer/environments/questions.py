"""Questions with a right answer, and tools to find it: an environment for data such as GSM8K."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.environments.base import Message, StepResult
from trainer.environments.calculator import calculator
from trainer.environments.python_tool import PythonTool
from trainer.environments.tools import ToolEnvironment
from trainer.import_utils import import_function
from trainer.rewards.functions import REWARDS

_CALCULATION = re.compile(r"<<([^<>=]*)=[^<>]*>>[\d.,]*")
"""A calculation in a solution of GSM8K, and its result, which the solution writes once more behind it."""
_ANSWER = "####"


class Questions(ToolEnvironment):
    """Asks the question of a row. The policy may call tools, and answers with a reply without a call.

    Args:
        tools: `calculator`, `python`, or the import path of a function.
        reward: of the answer: one of the built-in rewards, or the import path of a function (answer, right answer).
        prompt_key: column of the question, a text or chat messages.
        answer_key: column of the right answer.
        python: options of the tool `python` (see `PythonTool`).
        instructions: the system message, with `{tools}` in place of the descriptions of the tools. Empty: none, for a
            policy that knows the tools already. null: the usual one of `ToolEnvironment`.
        steps_reward: for calls with the results of the calculations in the right answer (`<<48/2=24>>` in GSM8K),
            for a policy that hardly ever finds the answer. Times the share of the calculations that have such a call,
            or of the calls, if there are more, it is the term `steps` of the reward, beside `right` or the terms of
            `reward`.

    Raises:
        UserError: an option is none that there is.
    """

    def __init__(
        self,
        tools: Sequence[str] = ("calculator",),
        reward: str = "gsm8k",
        prompt_key: str = "question",
        answer_key: str = "answer",
        python: Mapping[str, Any] | None = None,
        instructions: str | None = None,
        steps_reward: float = 0.0,
    ):
        self._python = python or {}
        self.tools = tuple(map(self._find, tools))
        self._reward: Callable[[str, str], Any] = REWARDS.get(reward) or import_function(reward, "reward", REWARDS)
        self._keys = prompt_key, answer_key
        if instructions is not None:
            self.instructions = instructions
        self._steps_reward = steps_reward
        self._results: list[str] = []

    def _find(self, name: str) -> Callable[..., Any]:
        if name == "python":
            return PythonTool(**self._python).python
        if name == "calculator":
            return calculator
        return import_function(name, "tools", ("calculator", "python"))

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """Check the options, and that programs can be closed in on this machine."""
        cls(**options)

    def prompt(self, row: Mapping[str, Any]) -> str | Sequence[Message]:
        return row[self._keys[0]]

    async def step(self, reply: Message) -> StepResult:
        result = await super().step(reply)  # a step has results, or the score
        self._results += [message["content"] for message in result.messages]
        return result

    def score(self, answer: str, row: Mapping[str, Any]) -> float | Mapping[str, float]:
        solution = str(row[self._keys[1]])
        right = self._reward(answer, solution)
        if not self._steps_reward:
            return right
        terms = right if isinstance(right, Mapping) else {"right": right}
        return {**terms, "steps": self._steps_reward * _share(_results_of(solution), self._results)}


def _share(wanted: Sequence[str], found: Sequence[str]) -> float:
    """Return how many of the wanted results were found, as a share of them, or of what was found if that is more."""
    common = Counter(wanted) & Counter(found)
    return common.total() / max(len(wanted), len(found), 1)


def _results_of(solution: str) -> list[str]:
    """Return the results of the calculations in a solution of GSM8K that the calculator can do."""
    results = []
    for expression in _CALCULATION.findall(solution):
        with contextlib.suppress(ValueError, ArithmeticError):
            results.append(calculator(expression))
    return results


def worked_chat(answer: str, with_text: bool = True) -> list[Message] | None:
    """Return a solution of GSM8K as a chat that calls the calculator: once for each calculation `<<48/2=24>>` in it.

    The last reply is the answer (`#### 24`). `supervised_chat` makes a row for supervised steps of the chat.

    Args:
        answer: column of the solution.
        with_text: keep the sentences of the solution. A call ends the sentence up to its calculation.

    Returns:
        None: a calculation is none that the calculator takes, or there is none.
    """
    solution, _, final = answer.rpartition(_ANSWER)
    chat: list[Message] = []
    parts = _CALCULATION.split(solution)  # text, calculation, text, …
    for said, expression in zip(parts[::2], parts[1::2], strict=False):
        try:
            result = calculator(expression)
        except (ValueError, ArithmeticError):
            return None
        call = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
        chat.append(
            {
                "role": "assistant",
                "content": said.strip() if with_text else "",
                "tool_calls": [{"type": "function", "function": call}],
            }
        )
        chat.append({"role": "tool", "content": result})
    if not chat:
        return None
    rest = parts[-1].strip() if with_text else ""
    return [*chat, {"role": "assistant", "content": f"{rest}\n{_ANSWER} {final.strip()}".strip()}]
