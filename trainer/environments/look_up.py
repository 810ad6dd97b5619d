"""An environment of several turns whose answer is in a table that only a tool can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.environments.tools import ToolEnvironment


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
