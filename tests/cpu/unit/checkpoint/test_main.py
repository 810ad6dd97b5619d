"""The command line of the checkpoints."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import manager, save
from trainer.checkpoint import last_commit
from trainer.checkpoint.__main__ import main
from trainer.checkpoint.inspection import read_named
from trainer.checkpoint.manager import CheckpointManager


@pytest.mark.parametrize("root", ["", "checkpoints"])
def test_of_a_run_the_newest_valid_checkpoint_is_taken(tmp_path, capsys, root):
    checkpoints = manager(tmp_path / "run" / root)
    out = str(tmp_path / "out")
    assert main(["export", str(tmp_path), out]) == 2
    assert "no checkpoint is there" in capsys.readouterr().err
    for step in (9, 10, 11):
        save(checkpoints, step)
    (tmp_path / "run" / root / "global_step_11/manifest.json").write_text("{}")
    (tmp_path / "run" / root / "global_step_10/weights/shard").write_bytes(b"shorter")
    assert read_named(str(tmp_path / "run")).step == 9
    assert capsys.readouterr().err.count("skipped a damaged checkpoint") == 2
    (tmp_path / "run" / root / "global_step_9/manifest.json").unlink()
    assert main(["export", str(tmp_path / "run"), out]) == 2
    assert "no checkpoint there is valid" in capsys.readouterr().err


def test_what_is_known_of_a_checkpoint_is_listed(tmp_path, capsys):
    axes = {"dp_replicate": 2, "dp_shard": 1, "cp": 2, "tp": 2}
    save(manager(tmp_path), 3, ranks=8, axes=axes)
    assert main(["ls", str(tmp_path)]) == 0
    _, line, explanation = capsys.readouterr().out.splitlines()
    assert line.endswith("  sizes agree  latest") and explanation.startswith("sizes agree: the content was not read")
    assert main(["verify", str(tmp_path)]) == 0
    assert "of 8 ranks, " in capsys.readouterr().out
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["axes"] == axes


def test_axes_that_are_no_sizes_are_damage(tmp_path, capsys):
    save(manager(tmp_path), 3, axes={"tp": -1})
    assert main(["verify", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert (
        "global_step_3: DAMAGED: manifest.json is damaged" in line and "; restore it from a copy, or delete it" in line
    )


def scored(root: Path, scores: dict[int, float | None], mode: str = "max") -> CheckpointManager:
    """Checkpoints with these scores by step."""
    checkpoints = manager(root)
    for step, score in scores.items():
        save(checkpoints, step, score=score, score_metric="val/accuracy", score_mode=mode, score_of_start=0.5)
    return checkpoints


def flip_a_byte(root: Path, step: int) -> None:
    shard = root / f"global_step_{step}/weights/shard"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])


def listed(capsys, *arguments: str) -> list[dict[str, Any]]:
    assert main(["ls", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["checkpoints"]


def test_a_flipped_byte_is_seen_when_bytes_are_read_and_not_denied_before(tmp_path, capsys):
    scored(tmp_path, {1: None, 2: None})
    flip_a_byte(tmp_path, 2)
    assert main(["ls", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (
        out.count("sizes agree") == 3
        and "yes" not in out
        and f"`trainer checkpoint verify {tmp_path}` reads every byte" in out
    )
    assert main(["verify", str(tmp_path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert "every byte is as it was saved" in first and "DAMAGED: weights/shard does not have the content" in second


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 4)])
def test_the_best_and_the_latest_checkpoint_are_marked(mode, best, tmp_path, capsys):
    scored(tmp_path, {1: 0.5, 2: 0.75, 3: 0.75, 4: 0.25, 5: None}, mode)
    rows = listed(capsys, str(tmp_path))
    assert [row["step"] for row in rows if row["best"]] == [best]
    assert [row["step"] for row in rows if row["latest"]] == [5]
    assert main(["ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[best].endswith("  sizes agree  best") and lines[5].endswith("latest")
    assert "     0.75  sizes" in lines[2] and lines[6] == "score: val/accuracy at that step"
    assert lines[7] == "the start: 0.5"


def test_a_start_that_no_checkpoint_has_beaten_is_named(tmp_path, capsys):
    scored(tmp_path, {1: 0.5, 2: 0.25})
    assert main(["ls", str(tmp_path)]) == 0
    assert "the start: 0.5, which no checkpoint has beaten" in capsys.readouterr().out.splitlines()


def test_scores_of_another_metric_do_not_count_for_the_best(tmp_path, capsys):
    """A run is compared by its mean reward until it has a success."""
    checkpoints = manager(tmp_path)
    for step, metric, score in ((1, "val/reward/mean", 0.9), (2, "val/accuracy", 0.1), (3, "val/accuracy", 0.2)):
        save(checkpoints, step, score=score, score_metric=metric, score_mode="max")
    assert [row["step"] for row in listed(capsys, str(tmp_path)) if row["best"]] == [3]


def test_a_step_that_is_not_there_is_refused_with_the_steps_there_are(tmp_path, capsys):
    scored(tmp_path, {10: None, 20: None})
    before = sorted(os.listdir(tmp_path))
    for command, option in (("rollback", "--to"), ("export", "--step")):
        out = [str(tmp_path / "out")] if command == "export" else []
        assert main([command, str(tmp_path), *out, option, "15"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"error: {option}=15: {tmp_path} has no checkpoint of that step; it has 10, 20"
    assert sorted(os.listdir(tmp_path)) == before


def test_no_checkpoint_with_a_score_is_no_best_one(tmp_path, capsys):
    scored(tmp_path, {10: None, 20: None})
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--best"]) == 2
    assert "--best: no checkpoint of " in capsys.readouterr().err
    assert main(["export", str(tmp_path / "global_step_10"), str(tmp_path / "out"), "--best"]) == 2
    assert "is one checkpoint, and --best and --step choose one of a run" in capsys.readouterr().err


def test_the_checkpoints_of_a_run_are_found_where_the_run_keeps_them(tmp_path, capsys):
    scored(tmp_path / "elsewhere", {3: None})
    (tmp_path / "run").mkdir()
    last_commit.write(str(tmp_path / "run"), 3, str(tmp_path / "elsewhere"))
    assert [row["step"] for row in listed(capsys, str(tmp_path / "run"))] == [3]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("none", "none: no such directory; name a run"),
        ("file", "file: is a file; name a run"),
        ("empty", "empty: no checkpoint is there; looked in "),
        ("global_step_1", "global_step_1: is one checkpoint; name its run"),
        ("s3://", "must be a bucket and a prefix"),
        ("ftp://host/run", "must be a directory that all ranks see, or begin with"),
    ],
)
def test_what_holds_no_checkpoints_is_refused_with_one_sentence(path, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scored(tmp_path, {1: None})
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for command in (["ls"], ["rollback", "--to", "1"]):
        assert main([*command, path]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and said in line, command


def as_nobody(folder: str, *arguments: str) -> tuple[int, str]:
    """Run the command in a fork of this process that belongs to another user; return its status and its output."""
    printed = Path(folder, "printed")
    printed.write_text("")
    printed.chmod(0o666)
    child = os.fork()
    if child == 0:
        status = 99
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            sys.stdout = sys.stderr = printed.open("w")
            status = main(list(arguments))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), printed.read_text()


def test_what_another_user_may_not_read_is_said_in_one_sentence():
    """Root may read everything, so another user asks."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    with tempfile.TemporaryDirectory() as folder:  # other users cannot enter `tmp_path`
        os.chmod(folder, 0o755)
        scored(Path(folder, "run/checkpoints"), {1: None, 2: None})
        assert main(["export", f"{folder}/run", f"{folder}/out"]) != 0  # that user may be unable to import modules
        Path(folder, "run/checkpoints/global_step_2").chmod(0)
        rows = json.loads(as_nobody(folder, "ls", f"{folder}/run", "--json")[1])["checkpoints"]
        assert rows[0]["problem"] is None
        assert "manifest.json cannot be read (Permission denied)" in rows[1]["problem"]
        status, said = as_nobody(folder, "verify", f"{folder}/run")
        assert status == 1 and "every byte is as it was saved" in said
        assert "global_step_2: NOT READ: " in said and "; it may be undamaged" in said
        for command in (["rollback", f"{folder}/run", "--to", "1"], ["export", f"{folder}/run", f"{folder}/out"]):
            status, said = as_nobody(folder, *command)
            assert status == 2 and said.count("\n") == 1, said
            assert "Permission denied" in said and "; give the command as its owner, or ask for access" in said
