"""The command line of the checkpoints."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.checkpoints import manager, save
from trainer.checkpoint.__main__ import main


@pytest.mark.parametrize(("hours", "age"), [(-50, "2 d"), (-3, "3 h"), (1, "in the future"), (10**5, "in the future")])
def test_a_checkpoint_from_a_clock_ahead_has_an_age_in_the_future(hours, age, tmp_path, capsys):
    saved_at = (datetime.now(UTC) + timedelta(hours=hours)).isoformat(timespec="seconds")
    save(manager(tmp_path), 1, ranks=1, saved_at=saved_at)
    assert main(["ls", str(tmp_path)]) == 0
    assert f" {age} " in capsys.readouterr().out


@pytest.mark.parametrize("root", ["", "checkpoints"])
def test_of_a_run_the_newest_valid_checkpoint_is_shown(tmp_path, capsys, root):
    checkpoints = manager(tmp_path / "run" / root)
    assert main(["show", str(tmp_path)]) == 2
    assert "no checkpoint is there" in capsys.readouterr().err
    for step in (9, 10, 11):
        save(checkpoints, step)
    (tmp_path / "run" / root / "global_step_11/manifest.json").write_text("{}")
    (tmp_path / "run" / root / "global_step_10/weights/shard").write_bytes(b"shorter")
    assert main(["show", str(tmp_path / "run"), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["step"] == 9 and printed.err.count("skipped a damaged checkpoint") == 2
    (tmp_path / "run" / root / "global_step_9/manifest.json").unlink()
    assert main(["show", str(tmp_path / "run")]) == 2
    assert "no checkpoint there is valid" in capsys.readouterr().err


AXES = {"replicate": 2, "shard": 1, "context": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("description", "said"),
    [
        ({"ranks": 8, "axes": AXES}, "replicate 2, context 2, tensor 2"),
        ({"ranks": 1, "axes": dict.fromkeys(AXES, 1)}, "one rank"),
        ({"ranks": 8}, "axes unknown"),
    ],
)
def test_the_axes_of_the_ranks_that_wrote_a_checkpoint_are_shown(tmp_path, capsys, description, said):
    save(manager(tmp_path), 3, **description)
    ranks = description["ranks"]
    assert main(["ls", str(tmp_path)]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert line.endswith(f"  {ranks}  {said}  yes") and line.index(said) == heading.index("axes")
    assert main(["verify", str(tmp_path)]) == 0
    assert f"of {ranks} ranks ({said}), " in capsys.readouterr().out
    assert main(["show", str(tmp_path)]) == 0
    assert ("axes: {'replicate'" in capsys.readouterr().out) == ("axes" in description)
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["axes"] == description.get("axes")


def test_axes_that_are_no_sizes_are_damage(tmp_path, capsys):
    save(manager(tmp_path), 3, axes={"tensor": -1})
    assert main(["verify", str(tmp_path)]) == 1
    assert "manifest.json is damaged" in capsys.readouterr().out
