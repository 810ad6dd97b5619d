"""Two evaluations are compared row by row."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cpu.unit.evaluate.test_results import results
from trainer.errors import UserError
from trainer.evaluate.compare import compare, main


def test_rows_are_paired_by_their_content_in_any_order():
    a = results([1.0], [0.0], [0.0], rows="abc")
    b = results([0.0], [1.0], [1.0], rows="cbd")
    differences, notes = compare(a, b)
    accuracy = differences[0]
    assert (accuracy.set, accuracy.measure, accuracy.difference.rows) == ("math", "accuracy", 2)
    assert (accuracy.a, accuracy.b, accuracy.difference.value) == (0.0, 0.5, 0.5), "b: 0 to 1, c: 0 to 0"
    assert "math: 2 rows are in both, of 3 in A and 3 in B" in notes and "2 rows are few" in notes[1]


def test_equal_rows_are_paired_one_to_one():
    a, b = results([1.0], [0.0], rows="aa"), results([0.0], [1.0], [1.0], rows="aaa")
    assert compare(a, b)[0][0].difference.value == 0.0 and compare(a, b)[0][0].difference.rows == 2


def test_other_settings_are_named():
    """The comparison is then not one of two models alone; other rows are named by their number."""
    a = results([1.0], settings={"rollout.top_p": "1", "content of math": "1"})
    b = results([1.0], settings={"rollout.top_p": "2", "content of math": "2"}, weights="other")
    assert compare(a, b)[1][-1].startswith("A and B differ in rollout.top_p, too, which may")
    assert not any("differ" in note for note in compare(a, results([0.0], settings=a.settings, weights="x"))[1])


def many(seed: int, share: float, rows: int = 400) -> list[list[float]]:
    random, difficulty = np.random.default_rng(seed), np.random.default_rng(0).random(rows)
    return [[float(x < share) for x in one] for one in 0.5 * random.random((rows, 4)) + 0.5 * difficulty[:, None]]


def test_the_verdict_says_whether_chance_may_have_made_the_difference():
    names = [str(i) for i in range(400)]

    def verdict(a: tuple[int, float], b: tuple[int, float]) -> str:
        found = [results(*many(*one)) for one in (a, b)]
        for one in found:
            one.sets["math"].rows = names
        differences, notes = compare(*found)
        assert [one.measure for one in differences] == [
            "accuracy",
            "avg@4",
            "pass@2",
            "pass@4",
            "reward/speed",
        ] and not notes
        return differences[0].verdict

    assert verdict((1, 0.5), (2, 0.6)) == "B is higher" and verdict((1, 0.6), (2, 0.5)) == "B is lower"
    assert verdict((1, 0.5), (3, 0.5)) == "not distinguishable from noise"
    (equal, *_) = compare(results([1.0], [0.0]), results([1.0], [0.0]))[0]
    assert equal.verdict == "not distinguishable from noise" and equal.difference.high > 0.4, "two rows say little"
    assert compare(results([1.0]), results([1.0]))[0] != [], "one row has no spread"


def test_the_command_prints_a_table(tmp_path, capsys):
    for name, share in (("a", 0.5), ("b", 0.6)):
        (tmp_path / name).mkdir()
        found = results(*many(1, share, 100), rows=[str(i) for i in range(100)], subject=name)
        found.write(str(tmp_path / name), lambda: None)
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("A: a\nB: b\n") and "95 % interval" in printed


def test_what_cannot_be_compared_gets_one_sentence(tmp_path, capsys):
    sentence = "^the evaluations have no row in common: A has math of 1 rows, B has math of 1 rows; evaluate"
    with pytest.raises(UserError, match=sentence):
        compare(results([1.0], rows="a"), results([1.0], rows="b"))
    results([1.0]).write(str(tmp_path), lambda: None)
    assert main([str(tmp_path / "none"), str(tmp_path)]) == 2
    assert "holds no finished evaluation; trainer evaluate makes one" in capsys.readouterr().err
