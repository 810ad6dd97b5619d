"""`trainer view`: which runs, which steps, and when the page is written again."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.metrics import make_tracker, step_metrics
from tests.support.viewed_runs import make_run
from trainer.checkpoint.inspection import find_store
from trainer.errors import UserError
from trainer.view.__main__ import main
from trainer.view.build import Builder, Limits, _names, _spread
from trainer.view.episodes import StepFiles


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def chunk_of(page: str, name: str) -> Any:
    (text,) = re.findall(rf'<script type="text/plain" id="{name}">(.*?)</script>', page)
    return json.loads(zlib.decompress(base64.b64decode(text)))


def test_the_page_of_a_run_is_written(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"view: {run}/view.html (")
    page = (run / "view.html").read_text()
    data = data_of(page)
    (described,) = data["runs"]
    assert data["notes"] == [] and data["differing"] == []
    assert [(one["split"], one["step"], one["count"]) for one in described["steps"]] == [
        ("training", 1, 16), ("training", 2, 16), ("training", 3, 16), ("validation", 0, 3)]  # fmt: skip
    assert chunk_of(page, described["steps"][1]["rows"])["uid"][0] == "0:8:0"
    assert "<|end|>" in chunk_of(page, described["vocabulary"])["texts"]
    assert "tokens" not in described["steps"][-1]


def test_several_runs_are_beside_one_another(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "sweep/a", kl_coef=0.1)
    make_run(tmp_path / "sweep/b", kl_coef=0.2)
    monkeypatch.chdir(tmp_path)
    assert main(["sweep"]) == 0
    assert "view: view.html" in capsys.readouterr().out
    data = data_of(Path("view.html").read_text())
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert data["differing"] == ["algorithm.kl_coef", "model.path"]
    ids = [one["rows"] for run in data["runs"] for one in run["steps"]]
    assert len({*ids}) == len(ids) == 8


def test_runs_of_one_name_are_told_apart():
    assert _names(["/a/x/run", "/b/x/run"]) == ["a/x/run", "b/x/run"]
    assert _names(["/a/run"]) == ["run"] and _names(["/a/\udcff"]) == ["\\udcff"]


def test_steps_are_spread_evenly():
    steps = [StepFiles(step, "training", "rollouts", (str(step),)) for step in range(1, 102)]
    order = [one.step for one in _spread(steps)]
    assert order[:5] == [101, 1, 51, 76, 26] and sorted(order) == [*range(1, 102)]
    assert [one.step for one in _spread(steps[:1])] == [1] and not [*_spread([])]


@pytest.mark.parametrize(
    ("options", "steps", "notes"),
    [
        (["--steps=2"], [2], []),
        (["--steps=2-"], [2, 3, 4, 5], []),
        (["--steps=2-3"], [2, 3], []),
        (["--max-episodes=20"], [2, 5], ["12 episodes of step 2", "the episodes of 3 of 6 steps"]),
        (["--max-tokens=1"], [5], ["the episodes of 5 of 6 steps"]),
    ],
)
def test_limits_are_kept_and_said(tmp_path, capsys, options, steps, notes):
    run = make_run(tmp_path / "run", steps=5)
    assert main([str(run), "--out", str(tmp_path / "out.html"), *options]) == 0
    data = data_of((tmp_path / "out.html").read_text())
    assert [one["step"] for one in data["runs"][0]["steps"] if one["split"] == "training"] == steps
    said = capsys.readouterr().err
    assert len(data["notes"]) == len(notes) and all(note in said for note in notes)


def test_what_cannot_be_read_is_said(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    (run / "rollouts/step_2.arrow").write_bytes(b"damaged")
    (run / "model/tokenizer.json").write_text("{")
    assert main([str(run)]) == 0
    said = capsys.readouterr().err
    assert "the episodes of step 2 cannot be read" in said and "its tokenizer cannot be read" in said
    shutil.rmtree(run / "model")
    assert main([str(run)]) == 0
    assert "tokens are shown by their numbers" in capsys.readouterr().err


def test_a_store_that_cannot_be_reached_leaves_the_page_whole(tmp_path):
    run = make_run(tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    (run / "committed.json").write_text('{"step": 3, "ckpt_path": "s3://"}')
    with pytest.raises(UserError, match="object store fails"):
        find_store(str(run))
    assert main([str(run)]) == 0
    (described,) = data_of((run / "view.html").read_text())["runs"]
    assert described["vocabulary"] is not None and "checkpoint" not in {mark["kind"] for mark in described["marks"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such directory"),
        (["empty"], "empty: is no run directory; it has no metrics.jsonl"),
        (["run", "--out=run"], "--out=run: cannot be written; name a file in a directory"),
        (["run", "--out=nowhere/x.html"], "--out=nowhere/x.html: cannot be written"),
        (["run", "--out=run/metrics.jsonl/x.html"], "cannot be written"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, monkeypatch, capsys, words, message):
    make_tracker(tmp_path / "run").log(1, step_metrics(1))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_directory_that_others_own_is_named(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    as_others = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    if as_others and (shutil.which("setpriv") is None or subprocess.run([*as_others, "true"], stderr=-3).returncode):
        pytest.skip("this user may write everywhere")
    run.chmod(0o555)
    command = [*as_others, sys.executable, "-m", "trainer", "view", str(run)]
    done = subprocess.run(command, capture_output=True, text=True)
    run.chmod(0o755)
    said = f"error: --out={run}/view.html: cannot be written; name a file in a directory in which you may write\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize("option", ["--steps=3-2", "--steps=x", "--steps=-1", "--max-episodes=0", "--max-tokens=x"])
def test_bad_options_are_refused(option, capsys):
    assert main([".", option]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(rf"error: argument {option.partition('=')[0]}: .+; `trainer view --help` shows .+\n", said)


def test_damaged_metrics_are_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
    with pytest.raises(UserError, match=r"metrics.jsonl:1 has no JSON object"):
        Builder([str(tmp_path)], Limits()).page()
