"""The table of faults and outcomes of many rounds."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_COLUMNS = ("fault", "times", "recovered in the run", "after a restart", "rounds", "identical")


def read_rounds(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the rounds of files of results."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def table(rounds: Iterable[Mapping[str, Any]]) -> str:
    """Return a Markdown table: how often each fault was done, how the job recovered, and what came of its rounds."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for report in rounds:
        for fault in report["faults"]:
            counts[fault["name"]]["times"] += 1
            counts[fault["name"]][fault.get("recovered", "failed")] += 1
        for name in {fault["name"] for fault in report["faults"]}:
            counts[name]["rounds"] += 1
            counts[name][report["outcome"]] += 1
    keys = ("times", "in the run", "restart", "rounds", "identical")
    rows = [[name, *(str(counts[name][key]) for key in keys)] for name in sorted(counts)]
    lines = [_COLUMNS, ["---", *["---:"] * len(keys)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
