"""From which checkpoint a run resumes, and which configs and names it accepts."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from tests.support.odd_files import replace, resume, rewrite
from trainer.checkpoint.__main__ import main as checkpoint_tool


def test_a_checkpoint_of_a_step_that_no_run_reaches_is_compared_with_its_lines_at_once(run_dir):
    name, step = "global_step_900000000000000000", 900_000_000_000_000_000
    checkpoint = (run_dir / "checkpoints/global_step_2").rename(run_dir / "checkpoints" / name)
    rewrite(checkpoint, json.loads((checkpoint / "manifest.json").read_text()) | {"step": step, "metrics_from": 1})
    assert "metrics.jsonl: has no line for step 3" in resume(run_dir)


@pytest.mark.parametrize(
    "name", ["global_step_٢", "global_step_02", "global_step_9999999999999999999999", "global_step_2\n"]
)
def test_a_directory_with_almost_the_name_of_a_checkpoint_is_none(run_dir, name):
    shutil.copytree(run_dir / "checkpoints/global_step_2", run_dir / "checkpoints" / name)
    assert resume(run_dir) == 2


def test_a_checkpoint_with_the_old_names_of_keys_resumes(run_dir, capsys):
    first, second = (run_dir / f"checkpoints/global_step_{step}" for step in (1, 2))
    for checkpoint, names in ((first, ("colocate_roles", "share_gpus")), (second, ("colocate", "colocate"))):
        saved = yaml.safe_load((checkpoint / "config.yaml").read_bytes())
        del saved["trainer"]["colocate_roles"], saved["rollout"]["share_gpus"]
        saved["trainer"][names[0]], saved["rollout"][names[1]] = False, True
        replace(checkpoint, "config.yaml", yaml.safe_dump(saved).encode())
    checkpoint_tool(["diff", str(first), str(second)])
    assert capsys.readouterr().out.startswith("config:\ncounters:"), "the two configs differ in nothing"
    assert resume(run_dir) == 2
