"""`trainer compare`."""

from __future__ import annotations

import json

import pytest
import yaml

from trainer.compare import main
from trainer.config import compose
from trainer.main import best_value


def write_run(path, accuracies, **config):
    path.mkdir()
    rows = [{"step": step, "val/accuracy": value} for step, value in enumerate(accuracies)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = {"best_metric": "val/accuracy", "best_mode": "max", "run_dir": str(path), **config}
    (path / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer, "rollout": {"n": 8}}))
    return str(path)


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
        ["run", "lr", "best val/accuracy", "at step", "last", "steps"],
        ["better", "0.25", "0.75", "2", "0.625", "3"],
        ["worse", "0.5", "0.5", "1", "0.125", "2"],
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_lower_value_is_better_with_best_mode_min(tmp_path, capsys):
    paths = [write_run(tmp_path / str(seed), [seed], seed=seed, best_mode="min") for seed in (2, 1, 3)]
    assert main([*paths, "--out", str(tmp_path / "x.png")]) == 0
    names = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert names == ["1", "2", "3"]


def test_a_run_without_the_metric_comes_last(runs, tmp_path, capsys):
    empty = write_run(tmp_path / "empty", [])
    assert main([empty, *runs, "--metric", "val/accuracy", "--out", str(tmp_path / "x.png")]) == 0
    assert capsys.readouterr().out.splitlines()[-3].split("│")[1].strip() == "empty"


def test_start_weights_are_no_result_of_training(tmp_path, capsys):
    """Step 0 counts only in a run that has measured nothing later."""
    runs = [
        write_run(tmp_path / name, values) for name, values in (("a", [0.9, 0.5]), ("b", [0.9, 0.75]), ("c", [0.25]))
    ]
    assert main([*runs, "--out", str(tmp_path / "x.png")]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [(row[1].strip(), row[2].strip()) for row in rows] == [("b", "0.75"), ("a", "0.5"), ("c", "0.25")]
    assert [best_value(compose([f"trainer.run_dir={run}"])) for run in runs] == [0.5, 0.75, 0.25]


def test_a_directory_that_is_no_run_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: is no run directory; it has no metrics.jsonl\n"


def test_a_sweep_and_all_that_its_directory_holds_can_be_compared(runs, tmp_path, capsys):
    (tmp_path / "multirun.yaml").write_text("")
    (tmp_path / "refused").mkdir()
    picture = ["--out", str(tmp_path / "x.png")]
    assert main([*map(str, sorted(tmp_path.iterdir())), *picture]) == 0
    by_glob = capsys.readouterr()
    assert by_glob.err == f"left out {tmp_path}/refused: it has no metrics.jsonl\n"
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
