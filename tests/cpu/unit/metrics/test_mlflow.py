"""MLflow runs of a run that is killed and resumed, in a database of their own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.support.metrics import run_python
from trainer.metrics.sinks import mlflow_name

RUN = """
import contextlib, json, os, signal, sqlite3, sys, time
from trainer.config import LoggerConfig
from trainer.metrics.tracker import Tracker

def is_sent(step):
    with contextlib.closing(sqlite3.connect(run_dir + "/mlflow.db")) as database:
        return database.execute("SELECT 1 FROM metrics WHERE step = ?", [step]).fetchone()

run_dir, uri, run_id, rewind, first, last, end = *sys.argv[1:4], *map(int, sys.argv[4:7]), sys.argv[7]
if uri:
    os.environ["MLFLOW_TRACKING_URI"] = uri
logger = LoggerConfig(services=["mlflow"], project="mine", name="a name")
config = {"trainer": {"seed": 1}, "reward": {"name": ["gsm8k"]}, "data": {str(i): "x" * 1000 for i in range(150)}}
tracker = Tracker(run_dir, logger, config, {"mlflow_run_id": run_id} if run_id else None)
if rewind >= 0:
    tracker.rewind(rewind)
for step in range(first, last + 1):
    odd = {"policy/kl": float("nan"), "policy/loss": float("inf")}
    tracker.log(step, {"reward/mean": step / 8, "val/pass@4": 0.5, "time/step": float(rewind)} | odd)
print(json.dumps(tracker.state_dict()), flush=True)
while end == "kill when sent" and not is_sent(last):
    time.sleep(0.01)
if end.startswith("kill"):
    os.kill(os.getpid(), signal.SIGKILL)
tracker.close(1 if end == "fail" else 0)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    return kept | {"HOME": str(tmp_path_factory.mktemp("home"))}


def stored(run_dir: Path) -> dict[str, Any]:
    """Run -> name, status, values of each metric, parameters. MLflow takes seconds to read its own tables."""
    found: dict[str, Any] = {}
    with contextlib.closing(sqlite3.connect(run_dir / "mlflow.db")) as database:
        runs = (
            "SELECT run_uuid, runs.name, status FROM runs JOIN experiments USING (experiment_id)"
            " WHERE experiments.name = 'mine'"
        )
        for run_id, name, status in database.execute(runs).fetchall():
            history: dict[str, list] = {}
            values = "SELECT key, step, value FROM metrics WHERE run_uuid = ? ORDER BY step"
            for key, step, value in database.execute(values, [run_id]):
                history.setdefault(key, []).append([step, value])
            params = dict(database.execute("SELECT key, value FROM params WHERE run_uuid = ?", [run_id]))
            found[run_id] = [name, status, history, params]
    return found


def logged(run_dir: Path, count: int) -> dict[str, list]:
    """Return the values of the lines of `metrics.jsonl`, as `stored` does."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == count
    return {
        mlflow_name(name): [[row["step"], row[name]] for row in rows]
        for name in ("reward/mean", "val/pass@4", "time/step")
    }


def test_names_have_the_characters_that_mlflow_takes():
    names = {"policy/kl": "policy/kl", "val/pass@4": "val/pass_4", "reward/é:b/mean": "reward/__b/mean"}
    assert {metric: mlflow_name(metric) for metric in names} == names
    assert mlflow_name("a" * 300) == "a" * 250


@pytest.mark.release
def test_a_killed_run_is_continued_and_has_each_step_once(tmp_path, environment):
    """MLflow does not know the run that is to be continued, so there is a new one. It has the steps 0 to 5 when the run
    is killed. It would keep both numbers of a step, so these stay as they are. At the end the job fails.
    """
    run_dir = tmp_path / "run"
    killed = run_python(RUN, str(run_dir), "", "0" * 32, "-1", "0", "5", "kill when sent", env=environment)
    run_id = json.loads(killed.stdout)["mlflow_run_id"]
    assert run_id != "0" * 32
    others = RUN.replace("step / 8", "step / 8 if step < 4 else 1")
    resumed = run_python(others, str(run_dir), "", run_id, "3", "4", "7", "fail", env=environment)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout) == {"wandb_run_id": None, "mlflow_run_id": run_id}
    found = stored(run_dir)
    name, status, history, params = found.pop(run_id)
    assert (name, status, found) == ("a name", "FAILED", {})
    assert [step for step, _ in history.pop("time/step")] == [*range(8)]
    assert history == {
        "reward/mean": [[step, step / 8 if step < 6 else 1] for step in range(8)],
        "val/pass_4": [[step, 0.5] for step in range(8)],
    }
    assert params["trainer.seed"] == "1" and params["reward.name"] == "['gsm8k']" and len(params) == 152
    assert resumed.stdout.count("\n") == 1, "MLflow prints nothing"


@pytest.mark.release
def test_steps_that_a_store_refuses_are_sent_with_a_later_step(tmp_path, environment):
    """Steps 2 and 3 are logged while a table is away."""
    run_dir = tmp_path / "run"
    move = """
    if step in (2, 4):
        while not is_sent(1) if step == 2 else not tracker._sinks[0]._has_warned:
            time.sleep(0.01)
        with contextlib.closing(sqlite3.connect(run_dir + "/mlflow.db", isolation_level=None)) as database:
            tables = ("metrics", "away") if step == 2 else ("away", "metrics")
            database.execute("ALTER TABLE {} RENAME TO {}".format(*tables))
    odd ="""
    done = run_python(RUN.replace("\n    odd =", move, 1), str(run_dir), "", "", "-1", "0", "5", "end", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("MLflow lacks steps of this run: ") == 1
    ((_, status, history, _),) = stored(run_dir).values()
    assert status == "FINISHED" and history == logged(run_dir, 6)


@pytest.mark.release
def test_a_server_that_does_not_answer_is_refused_at_the_first_start_alone(tmp_path, environment):
    run_dir = tmp_path / "run"
    with socket.socket() as unused:  # bound, and nobody listens
        unused.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{unused.getsockname()[1]}"
        environment |= {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        refused = run_python(RUN, str(run_dir), uri, "", "-1", "0", "1", "end", env=environment)
        (run_dir / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0}\n{"step": 1, "reward/mean": 0.125}\n')
        resumed = run_python(RUN, str(run_dir), uri, "0" * 32, "1", "2", "3", "end", env=environment)
    assert refused.returncode == 1
    last = refused.stderr.strip().splitlines()[-1]
    assert "UserError: logger.services=[mlflow]: " in last and last.endswith("leave the service out")
    assert resumed.returncode == 0, resumed.stderr
    assert "The run goes on without; its next start sends the steps" in resumed.stderr
    assert json.loads(resumed.stdout)["mlflow_run_id"] == "0" * 32, "the next start continues the run"
    later = run_python(RUN, str(run_dir), "", "", "3", "4", "4", "end", env=environment)
    assert later.returncode == 0, later.stderr
    ((_, status, history, _),) = stored(run_dir).values()
    assert status == "FINISHED" and history["reward/mean"] == [[step, step / 8] for step in range(5)]
