"""Whole jobs with environments: they learn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forks import fork_server
from tests.support.jobs import environment, left_running, metrics
from tests.support.pages import commands_of_page, files_of_page

pytestmark = [pytest.mark.early, pytest.mark.slow]

PAGE = "docs/environments.md"
QUICK = "rollout=transformers trainer.ray_address=processes logger.plot=false trainer.ckpt_interval=-1"


def test_the_environment_of_the_page_is_learnt_with_its_tool(tmp_path: Path, marker: str):
    """The commands as they stand there, but for the engine."""
    assert files_of_page(PAGE, tmp_path)[:2] == ["shop.py", "rows.py"]
    programs = tmp_path / "programs"
    programs.mkdir()
    fork_server().write_python(programs)
    script = commands_of_page(PAGE, "rows.py").replace("python rows.py", f"{sys.executable} rows.py")
    script = script.replace("trainer.run_name=shop", f"trainer.run_name=shop {QUICK}")
    env = environment() | {"PATH": f"{programs}:{os.environ['PATH']}", "TRAINER_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert left_running(marker) == []
    rows = [row for row in metrics(tmp_path / "outputs/shop") if "val/accuracy" in row]
    assert rows[0]["val/accuracy"] <= 0.4 and rows[-1]["val/accuracy"] >= 0.7, rows
    last = [json.loads(line) for line in (tmp_path / "outputs/shop/validation/step_20.jsonl").read_text().splitlines()]
    right = [episode for episode in last if episode["reward"] == 1]
    called = [episode for episode in right if episode["metrics"]["tool_calls/price"]]
    assert len(called) >= 0.95 * len(right), "a price was guessed"
