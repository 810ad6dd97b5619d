"""Questions with a right answer, and tools to find it: an environment for data such as GSM8K."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.environments.base import Message
from trainer.environments.calculator import calculator
from trainer.environments.python_tool import PythonTool
from trainer.environments.tools import ToolEnvironment
from trainer.errors import UserError
from trainer.import_utils import import_function
from trainer.rewards.functions import REWARDS


class Questions(ToolEnvironment):
    """Asks the question of a row. The policy may call tools, and answers with a reply without a call.

    Args:
        tools: `calculator`, `python`, or the import path of a function.
        reward: of the answer: one of the built-in rewards, or the import path of a function (answer, right answer).
        prompt_key: column of the question, a text or chat messages.
        answer_key: column of the right answer.
        python: options of the tool `python` (see `PythonTool`).

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
    ):
        self._python = PythonTool(**(python or {})) if "python" in tools else None
        self.tools = tuple(map(self._find, tools))
        if reward not in REWARDS and ":" not in reward:
            raise UserError(f"reward={reward}: choose {', '.join(REWARDS)}, or an import path")
        self._reward: Callable[[str, str], Any] = REWARDS.get(reward) or import_function(reward, "reward")
        self._keys = prompt_key, answer_key

    def _find(self, name: str) -> Callable[..., Any]:
        if name == "python" and self._python is not None:
            return self._python.python
        if name == "calculator":
            return calculator
        if ":" in name:
            return import_function(name, "environment.kwargs.tools")
        raise UserError(f"tools={name}: choose calculator, python, or an import path")

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """Check the options, and that programs can be closed in on this machine."""
        environment = cls(**options)
        if environment._python is not None:
            environment._python.close()

    def prompt(self, row: Mapping[str, Any]) -> str | Sequence[Message]:
        return row[self._keys[0]]

    def score(self, answer: str, row: Mapping[str, Any]) -> float | Mapping[str, float]:
        return self._reward(answer, str(row[self._keys[1]]))
