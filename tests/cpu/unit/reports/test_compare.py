"""`trainer compare`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure

from trainer.config import compose
from trainer.main import best_value
from trainer.reports.compare import _print_table, main

ROOT = Path(__file__).parents[4]


def write_run(path, accuracies, **config):
    path.mkdir()
    rows = [{"step": step, "val/accuracy": value} for step, value in enumerate(accuracies)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    best_mode = config.pop("best_mode", "max")
    trainer = {"best_metric": "val/accuracy", "run_dir": str(path), **config}
    (path / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer, "rollout": {"n": 8}}))
    task = {"name": "rl", "total_steps": len(rows), "metrics": {}}
    task |= {"best_metric": trainer["best_metric"], "best_mode": best_mode}
    where = {"command": [], "directory": "/", "config": {"trainer": {"total_steps": len(rows), "ckpt_path": "x"}}}
    (path / "starts.jsonl").write_text(json.dumps({**where, "task": task}) + "\n")
    return str(path)


def keeping_legends(savefig, legends):
    """Return `savefig`, which also appends the texts of the legends."""

    def save(figure, *args, **kwargs):
        savefig(figure, *args, **kwargs)
        legends.extend(text.get_text() for axes in figure.axes for text in axes.get_legend().get_texts())

    return save


@pytest.fixture
def runs(tmp_path):
    worse = write_run(tmp_path / "worse", [0.25, 0.5, 0.125], seed=1, policy={"lr": 0.5})
    better = write_run(tmp_path / "better", [0.25, None, 0.75, 0.625], seed=1, policy={"lr": 0.25})
    return [worse, better]


def test_the_table_has_differing_keys_best_and_last_values_and_steps_with_the_best_run_first(runs, tmp_path, capsys):
    picture = tmp_path / "curves.png"
    assert main([*runs, "--out", str(picture)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line or "┃" in line]
    cells = [[cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]] for line in lines]
    assert cells == [
        ["run", "policy.lr", "start", "best val/accuracy", "at step", "last", "steps"],
        ["better", "0.25", "0.25", "0.75", "2", "0.625", "3"],
        ["worse", "0.5", "0.25", "0.5", "1", "0.125", "2"],
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_curves_are_drawn_whatever_the_names_of_the_runs(tmp_path):
    names = ["a$b_$", "_hidden", os.fsdecode(b"\xff")]
    paths = [write_run(tmp_path / name, [0.25, i / 4]) for i, name in enumerate(names)]
    legends: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keeping_legends(Figure.savefig, legends))
        assert main([*paths, "--out", str(tmp_path / "x.png")]) == 0
    assert sorted(legends) == [" _hidden", "\\udcff", "a$b_$"]


def test_a_key_whose_last_word_is_another_column_keeps_its_name(capsys):
    _print_table([{"run": "one", "sft.steps": 400, "policy.lr": 0.5, "steps": 2}], ["sft.steps", "policy.lr"])
    titles = capsys.readouterr().out.splitlines()[1]
    assert [title.strip() for title in titles.strip("┃").split("┃")] == ["run", "sft.steps", "policy.lr", "steps"]


def test_a_lower_value_is_better_with_best_mode_min(tmp_path, capsys):
    paths = [write_run(tmp_path / str(seed), [seed], seed=seed, best_mode="min") for seed in (2, 1, 3)]
    assert main([*paths, "--out", str(tmp_path / "x.png")]) == 0
    names = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert names == ["1", "2", "3"]


def test_a_run_without_the_metric_comes_last(runs, tmp_path, capsys):
    empty = write_run(tmp_path / "empty", [])
    assert main([empty, *runs, "--metric", "val/accuracy", "--out", str(tmp_path / "x.png")]) == 0
    assert capsys.readouterr().out.splitlines()[-3].split("│")[1].strip() == "empty"


def test_runs_that_have_not_beaten_their_start_are_ordered_by_their_last_value(tmp_path, capsys):
    """And a search, whose jobs have one start, compares what they have learnt."""
    runs = [
        write_run(tmp_path / name, values) for name, values in (("a", [0.9, 0.5]), ("b", [0.9, 0.75]), ("c", [0.25]))
    ]
    assert main([*runs, "--out", str(tmp_path / "x.png")]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[row[i].strip() for i in (1, 2, 3, 4)] for row in rows] == [
        ["b", "0.9", "0.9", "0"], ["a", "0.9", "0.9", "0"], ["c", "0.25", "0.25", "0"]
    ]  # fmt: skip
    assert [best_value(compose([f"trainer.run_dir={run}"])) for run in runs] == [0.5, 0.75, 0.25]


def many_keys(tmp_path, number: int) -> list[str]:
    """Two runs that differ in so many keys; `key_30`, if there is one, was on their command lines."""
    runs = []
    for i in (1, 2):
        same = {role: {"optimizer": {"lr": 0.5, "betas": [0.9]}} for role in ("policy", "critic")}
        differing = {f"key_{n:02}": i * n for n in range(1, number + 1)}
        runs.append(write_run(tmp_path / f"run{i}", [i / 4], **same, **differing))
        starts = tmp_path / f"run{i}" / "starts.jsonl"
        start = json.loads(starts.read_text()) | {"command": ["trainer", "train", f"trainer.key_30={30 * i}"]}
        starts.write_text(json.dumps(start) + "\n")
    return runs


def header(text: str) -> list[str]:
    line = next(line for line in text.splitlines() if "┃" in line)
    return [cell.strip() for cell in line.split("┃")[1:-1]]


def test_of_many_keys_those_of_the_commands_are_shown(tmp_path, capsys):
    runs, picture = many_keys(tmp_path, 37), ["--out", str(tmp_path / "x.png")]
    assert main([*runs, *picture]) == 0
    out = capsys.readouterr().out
    assert header(out) == ["run", *(f"trainer.key_{n:02}" for n in (*range(1, 12), 30)), *RESULTS]
    assert "25 more keys differ (trainer.key_12, trainer.key_13, " in out
    assert main([*runs, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)[0]) == 1 + 37 + len(RESULTS)
    assert main(["no/run"]) == 2
    assert capsys.readouterr().err == "error: no/run: no such directory\n"


RESULTS = ["start", "best val/accuracy", "at step", "last", "steps"]


def test_a_program_reads_the_table_as_json(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = many_keys(tmp_path, 1)
    assert main([*runs, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == {
        "run": "run2",
        "trainer.key_01": 2,
        "start": 0.5,
        "best val/accuracy": 0.5,
        "at step": 0,
        "last": 0.5,
        "steps": 0,
    }
    assert not list(tmp_path.glob("*.png"))


def test_a_supervised_run_is_compared_by_its_lowest_held_out_loss(tmp_path, capsys):
    paths = []
    for name, losses in (("a", [3.0, 2.0, 2.5]), ("b", [3.0, 1.0, 4.0])):
        path = write_run(tmp_path / name, [], best_metric="val/loss", best_mode="min")
        rows = [{"step": step, "sft/loss": 9.0, "val/loss": loss} for step, loss in enumerate(losses, start=1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(path)
    assert main([*paths, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["run"], row["best val/loss"], row["at step"], row["last"]) for row in rows] == [
        ("b", 1.0, 2, 4.0),
        ("a", 2.0, 2, 2.5),
    ]


def test_a_metric_that_no_run_has_logged_is_refused(runs, capsys):
    assert main([*runs, "--metric", "val/acuracy"]) == 2
    assert capsys.readouterr().err.startswith("error: --metric=val/acuracy: no run has logged it; did you mean val/acc")


def test_a_directory_that_is_no_run_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: is no run directory; it has no metrics.jsonl\n"
    (tmp_path / "starts.jsonl").touch()
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: its run has logged no step yet; try again when it has\n"


def test_a_sweep_and_all_that_its_directory_holds_can_be_compared(runs, tmp_path, capsys):
    (tmp_path / "multirun.yaml").write_text("")
    (tmp_path / "refused").mkdir()
    picture = ["--out", str(tmp_path / "x.png")]
    assert main([*map(str, sorted(tmp_path.iterdir())), *picture]) == 0
    by_glob = capsys.readouterr()
    assert by_glob.err == f"left out {tmp_path}/refused: is no run directory; it has no metrics.jsonl\n"
    assert main([str(tmp_path), *picture]) == 0
    by_sweep = capsys.readouterr()
    assert by_sweep.out == by_glob.out and by_sweep.err == ""
    assert [line.split("│")[1].strip() for line in by_sweep.out.splitlines() if "│" in line] == ["better", "worse"]


def test_long_keys_and_values_are_not_cut_where_output_goes_to_a_file(tmp_path, capsys):
    settings = {f"a_key_with_a_long_name_{i}": "x" * 30 for i in range(6)}
    paths = [
        write_run(tmp_path / str(seed), [1], seed=seed, allow_config_change=[str(seed)],
                  **{name: value + str(seed) for name, value in settings.items()})
        for seed in (1, 2)
    ]  # fmt: skip
    assert main([*paths, "--out", str(tmp_path / "x.png")]) == 0
    header, *rows = (line for line in capsys.readouterr().out.splitlines() if "│" in line or "┃" in line)
    assert len(rows) == 2 and all(name in header for name in settings) and "x" * 30 + "1" in rows[0]
    assert "allow_config_change" not in header


def test_secrets_in_a_config_are_not_shown(tmp_path, capsys):
    paths = [write_run(tmp_path / str(seed), [seed], seed=seed, secret_key=f"hush-{seed}") for seed in (1, 2)]
    assert main([*paths, "--out", str(tmp_path / "x.png")]) == 0
    shown = capsys.readouterr().out
    assert "seed" in shown and "hush" not in shown
