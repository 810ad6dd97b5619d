"""The file of an evaluation, and its table."""

from __future__ import annotations

import pytest

from trainer.data.rollout_io import main as print_rollouts
from trainer.episodes import Episode
from trainer.errors import UserError
from trainer.evaluate.job import Results, SetResult, _values_of, print_results, read_results, write_episodes


def results(*rewards: list[float], rows: str = "abcdefgh", **fields) -> Results:
    """An evaluation with one set, whose rows have these rewards."""
    episodes = [
        Episode(f"{row}:{i}", str(row), [], reward, {"speed": reward / 2})
        for row, given in enumerate(rewards)
        for i, reward in enumerate(given)
    ]
    values = _values_of(episodes, len(rewards[0]), 1.0)
    found = SetResult(list(rows[: len(rewards)]), sum(map(len, rewards)), 0, 12, values)
    usual = {"subject": "run", "step": 3, "weights": "w", "settings": {"a": "1"}, "sets": {"math": found}}
    return Results(**{**usual, **fields})


def test_what_is_written_is_read_again(tmp_path):
    written = results([1.0, 0.0], [1.0, 1.0], metrics={"val/math/accuracy": 0.75})
    written.write(str(tmp_path), lambda: None)
    assert read_results(str(tmp_path)) == written and read_results(str(tmp_path / "none")) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1}', '{"format": "1", "sets": {}}'])
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path, text):
    (tmp_path / "evaluation.json").write_text(text)
    with pytest.raises(UserError, match=r"evaluation.json: is damaged \(.*\); delete .*, and evaluate again"):
        read_results(str(tmp_path))


def test_other_weights_and_settings_are_named():
    first = results([1.0])
    assert first.differences(results([0.0])) == []
    assert first.differences(results([1.0], weights="x", settings={"a": "2", "b": "1"})) == ["model", "a", "b"]


def test_the_table_has_each_measure_with_its_interval(capsys):
    print_results(results([1.0, 0.0], [1.0, 1.0], [0.0, 0.0]))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any("math │ 3 │ accuracy │ 0.5 │" in line for line in lines)
    assert any("│ pass@2 │ 0.6667 │ 0.2077 to 0.9385 │" in line for line in lines), lines
    assert any("│ reward/speed │ 0.25 │" in line for line in lines), "the terms of the rewards"
    assert lines[-1] == "math: 6 completions of 3 rows, 2.0 tokens each"


def test_the_transcripts_are_printed_by_the_command_of_rollouts(tmp_path, capsys):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "é"}]
    episode = Episode("val:math:0:0", "val:math:0", [], 1.0, messages=chat)
    write_episodes(str(tmp_path), "math", 3, [episode], lambda: None)
    assert print_rollouts([str(tmp_path)]) == 0
    assert '"uid": "val:math:0:0"' in capsys.readouterr().out
