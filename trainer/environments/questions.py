"""Environments with tools: questions with a right answer, such as GSM8K; names to look up; and the tool `python`."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.environments.base import Message, StepResult
from trainer.environments.calculator import calculator
from trainer.environments.tools import ToolEnvironment, ToolFailure
from trainer.errors import UserError
from trainer.import_utils import import_function
from trainer.rewards.functions import REWARDS
from trainer.sandbox.programs import MAX_CODE, CodeLimits, CodeResult, shared_sandbox

_CALCULATION = re.compile(r"<<([^<>=]*)=[^<>]*>>[\d.,]*")
"""A calculation in a solution of GSM8K, and its result, which the solution writes once more behind it."""
_ANSWER = "####"


class PythonTool:
    """Gives an environment the tool `python`. Each call runs a program in a sandbox of its own.

    Args:
        modules: packages beside the standard library that programs may import, such as `numpy`.
        limits: fields of `trainer.sandbox.programs.CodeLimits`.

    Raises:
        UserError: an argument is none of these, or programs cannot be closed in on this machine.
    """

    def __init__(self, modules: Sequence[str] = (), **limits: Any):
        try:
            self._limits = CodeLimits(**limits)
        except TypeError as error:
            names = ", ".join(CodeLimits.__dataclass_fields__)
            raise UserError(f"the tool python takes modules, {names} ({error})") from error
        self._sandbox = shared_sandbox(self._limits, tuple(modules))

    async def python(self, code: str) -> str:
        """Run a Python program, and return what it prints. Nothing stays for the next one.

        Args:
            code: The program. If it ends with an expression, its value is printed.
        """
        try:
            return self._answer(await self._sandbox.run(code))
        except (RuntimeError, UserError, OSError) as error:
            raise ToolFailure(f"the tool python failed: {error}") from error

    def _answer(self, result: CodeResult) -> str:
        limits = self._limits
        text = result.output
        if result.left_out:
            text += f"… ({result.left_out:,} more characters)"
        if result.problem:
            reasons = {
                "cpu": f"took more than {limits.cpu_s} s of processor time",
                "time": f"took more than {limits.time_s:g} s",
                "output": "printed too much",
                "size": f"has more than {MAX_CODE:,} characters",
            }
            reason = reasons.get(result.problem, f"was ended by {result.problem}")
            text += f"{chr(10) if text and not text.endswith(chr(10)) else ''}Error: the program {reason}"
        return text.strip() or "(no output)"


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
        self.recorded_tools = tuple(tool.__name__ for tool in self.tools)
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

    async def step(self, reply: Message, step_id: str = "", recorded: StepResult | None = None) -> StepResult:
        result = await super().step(reply, step_id, recorded)  # a step has results, or the score
        self._results += [message["content"] for message in result.messages]
        return result

    def score(self, answer: str, row: Mapping[str, Any]) -> float | Mapping[str, float]:
        solution = str(row[self._keys[1]])
        right = self._reward(answer, solution)
        if not self._steps_reward:
            return right
        terms = right if isinstance(right, Mapping) else {"right": right}
        wanted = []
        for expression in _CALCULATION.findall(solution):
            with contextlib.suppress(ValueError, ArithmeticError):  # a calculation that the calculator cannot do
                wanted.append(calculator(expression))
        found = (Counter(wanted) & Counter(self._results)).total()
        return {**terms, "steps": self._steps_reward * (found / max(len(wanted), len(self._results), 1))}


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


class LookUp(ToolEnvironment):
    """The policy gets a name, looks it up, and looks up what it finds until it finds a number, its answer.

    The rows of `data.synthetic=look_up` have a `prompt`, a `table` and an `answer`. The table is not shown, so an
    answer without the tool is a guess of one of a hundred numbers. The reward is 1 for the right number, else 0.
    """

    instructions = ""  # the built-in model has learnt the form of a call

    def prompt(self, row: Mapping[str, Any]) -> str:
        self._table = row["table"]
        self.tools = (self.look_up,)
        return row["prompt"]

    def look_up(self, name: str) -> str:
        """Look a name up in the table.

        Args:
            name: The name.
        """
        return self._table[name]

    def score(self, answer: str, row: Mapping[str, Any]) -> float:
        return float(answer == row["answer"])
