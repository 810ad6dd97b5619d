"""Curves of metrics, and the pictures that hold them."""

from __future__ import annotations

import math

import pytest

from trainer.reports import drawing


def rows(values: list[float | None]) -> list[dict]:
    return [{"step": step, "reward/mean": value} for step, value in enumerate(values, start=1)]


def drawn(tmp_path, values: list[float | None]) -> list:
    with drawing.picture(str(tmp_path / "x.png"), 2, 2) as figure:
        axes = figure.add_subplot()
        drawing.curve(axes, rows(values), "reward/mean", "reward")
    return list(axes.lines)


def test_few_points_are_a_line_with_markers_and_null_is_a_gap_in_it(tmp_path):
    (line,) = drawn(tmp_path, [0.5, None, 0.25])
    assert line.get_marker() == "o" and line.get_label() == "reward"
    steps, values = line.get_xdata(), line.get_ydata()
    assert list(steps) == [1, 2, 3] and math.isnan(values[1]) and list(values[::2]) == [0.5, 0.25]


def test_many_points_are_a_running_mean_over_their_shadow(tmp_path):
    shadow, mean = drawn(tmp_path, [1.0 if step % 2 else None for step in range(200)] + [0.0, 2.0] * 100)
    assert shadow.get_color() == mean.get_color() and shadow.get_alpha() < 1
    assert len(mean.get_ydata()) == 400
    assert set(mean.get_ydata()[10:190]) == {1.0}, "NaN does not count in the mean"
    assert all(value == pytest.approx(1.0) for value in mean.get_ydata()[204:396])


def test_a_picture_that_fails_leaves_the_one_before(tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(b"before")
    with pytest.raises(ZeroDivisionError), drawing.picture(str(path), 2, 2):
        _ = 1 / 0
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]
    drawn(tmp_path, [1.0])
    assert path.read_bytes().startswith(b"\x89PNG") and list(tmp_path.iterdir()) == [path]
