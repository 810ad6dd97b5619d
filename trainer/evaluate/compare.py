"""`trainer evaluate compare A B`: what differs between two evaluations of the same rows, and by how much for sure."""

from __future__ import annotations

import argparse
from statistics import fmean
from typing import NamedTuple

from trainer.errors import UserError
from trainer.evaluate.results import CONTENT, Results, SetResult, print_table, read_results
from trainer.metrics.estimates import Estimate, paired_difference
from trainer.process.log_setup import ToolParser, run_tool, show

_FEW_ROWS = 30
"""Below this number of rows, the mean of their differences is hardly normal, and the interval is rough."""


class Difference(NamedTuple):
    """A measure of a set in two evaluations."""

    set: str
    measure: str
    a: float
    b: float
    difference: Estimate
    """Of b - a."""

    @property
    def verdict(self) -> str:
        if not self.difference.excludes_zero:
            return "not distinguishable from noise"
        return "B is higher" if self.difference.value > 0 else "B is lower"


def compare(a: Results, b: Results) -> tuple[list[Difference], list[str]]:
    """Return the differences of all measures that both have, over the rows that both have measured, and notes.

    Raises:
        UserError: the two have no row in common.
    """
    differences, notes = [], []
    for name in [name for name in a.sets if name in b.sets]:
        left, right = a.sets[name], b.sets[name]
        pairs = _common_rows(left, right)
        if len(pairs) < max(len(left.rows), len(right.rows)):
            notes.append(f"{name}: {len(pairs)} rows are in both, of {len(left.rows)} in A and {len(right.rows)} in B")
        if 0 < len(pairs) < _FEW_ROWS:
            notes.append(f"{name}: {len(pairs)} rows are few; the intervals are rough")
        for measure in [measure for measure in left.values if measure in right.values]:
            old, new = left.values[measure], right.values[measure]
            values = [(old[x], new[y]) for x, y in pairs if x in old and y in new]
            if values:
                first, second = zip(*values, strict=True)
                are_shares = measure == "accuracy" or measure.startswith("pass@")
                difference = paired_difference(first, second, are_shares)
                differences.append(Difference(name, measure, fmean(first), fmean(second), difference))
    if not differences:
        raise UserError(
            f"the evaluations have no row in common: A has {_described(a)}, B has {_described(b)}; evaluate both on "
            "the same data"
        )
    others = [key for key in a.differences(b) if key != "model" and not key.startswith(CONTENT)]
    if others:
        notes.append(f"A and B differ in {', '.join(others)}, too, which may have made the difference")
    return differences, notes


def _common_rows(a: SetResult, b: SetResult) -> list[tuple[str, str]]:
    """Return the indices of each row in both. Rows with equal content are matched in their order."""
    indices = {row: str(index) for index, row in enumerate(_numbered(b.rows))}
    return [(str(index), indices[row]) for index, row in enumerate(_numbered(a.rows)) if row in indices]


def _numbered(rows: list[str]) -> list[tuple[str, int]]:
    """Return each row with the number of equal rows before it."""
    seen: dict[str, int] = {}
    numbered = []
    for row in rows:
        seen[row] = seen.get(row, -1) + 1
        numbered.append((row, seen[row]))
    return numbered


def _described(results: Results) -> str:
    return ", ".join(f"{name} of {len(result.rows)} rows" for name, result in results.sets.items()) or "no set"


def _print_comparison(args: argparse.Namespace) -> None:
    found = []
    for letter, path in (("A", args.a), ("B", args.b)):
        results = read_results(path)
        if results is None:
            raise UserError(f"{path}: holds no finished evaluation; trainer evaluate makes one")
        show(f"{letter}: {results.subject}")
        found.append(results)
    differences, notes = compare(*found)
    rows = [
        (
            one.set,
            one.measure,
            str(one.difference.rows),
            f"{one.a:.4g}",
            f"{one.b:.4g}",
            f"{one.difference.value:+.4g}",
            f"{one.difference.low:+.4g} to {one.difference.high:+.4g}",
            one.verdict,
        )
        for one in differences
    ]
    print_table(("set", "measure", "rows", "A", "B", "B - A", "95 % interval", ""), rows)
    for line in notes:
        show(line)


def main(argv: list[str] | None = None) -> int:
    """Compare the evaluations of the command line; returns the exit status."""
    parser = ToolParser(prog="trainer evaluate compare", description="Compare two evaluations.")
    parser.add_argument("a", metavar="A", help="directory of an evaluation (trainer.run_dir)")
    parser.add_argument("b", metavar="B", help="directory of another evaluation of the same rows")
    return run_tool(parser, _print_comparison, argv)
