"""Rows of GSM8K whose solutions call a calculator: `python examples/gsm8k_calculator/rows.py train.jsonl rows.jsonl`.

Each row keeps its question and answer, and gets the column `messages`: the solution as a chat that calls the tool
`calculator` where the solution has a calculation `<<48/2=24>>`. A warm start learns from it. Rows are left out if a
calculation is none that the calculator takes, or if the last result is not the answer.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from trainer.environments import supervised_chat
from trainer.environments.questions import Questions, worked_chat


def row_of(row: dict[str, Any], most_calls: int, longest: int) -> dict[str, Any] | None:
    """Return the row with its chat; None: it is too long, or its solution cannot be followed."""
    chat = worked_chat(row["answer"], with_text=False)
    if chat is None or len(chat) // 2 > most_calls or len(row["question"]) > longest:
        return None
    final = row["answer"].rpartition("####")[2].replace(",", "").strip()
    if chat[-2]["content"] != final:
        return None
    return row | supervised_chat(Questions, row, chat, instructions="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a file of GSM8K, with question and answer in each line")
    parser.add_argument("target")
    parser.add_argument("--calls", type=int, default=2, help="most calculations of a solution")
    parser.add_argument("--characters", type=int, default=200, help="of the longest question")
    arguments = parser.parse_args()
    with open(arguments.source) as source, open(arguments.target, "w") as target:
        for line in source:
            row = row_of(json.loads(line), arguments.calls, arguments.characters)
            if row is not None:
                target.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
