"""Trackio runs of a run that is killed and resumed, in a database of their own."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.metrics import run_python
from trainer.config import LoggerConfig
from trainer.errors import UserError
from trainer.metrics.sinks import Trackio

RUN = """
import json, os, signal, sys
from trainer.config import LoggerConfig
from trainer.metrics.tracker import Tracker

run_dir, run_id, rewind, first, last, end = *sys.argv[1:3], *map(int, sys.argv[3:6]), sys.argv[6]
logger = LoggerConfig(services=["trackio"], project="mine", name="a name")
config = {"trainer": {"run_name": "a group"}}
tracker = Tracker(run_dir, logger, config, {"trackio_run_id": run_id} if run_id else None)
tracker.rewind(rewind)
for step in range(first, last + 1):
    tracker.log(step, {"reward/mean": step / 8 + (end == "end"), "policy/kl": float("nan")})
print(json.dumps(tracker.state_dict()), flush=True)
if end == "kill":
    while not os.path.exists(os.environ["TRACKIO_DIR"] + "/mine.db"):  # some steps are in the database
        pass
    os.kill(os.getpid(), signal.SIGKILL)
tracker.close()
"""
READ = """
import json, trackio
found = []
for run in trackio.Api().runs("mine"):
    logs = trackio.sqlite_storage.SQLiteStorage.get_logs("mine", run.name, run_id=run.id)
    found.append([run.name, [[row["step"], row.get("reward/mean"), "policy/kl" in row] for row in logs], run.config])
print(json.dumps(found))
"""


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRACKIO_", "HF_"))}
    return kept | {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}


def stored(environment: dict[str, str]) -> list:
    done = run_python(READ, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.release
def test_a_killed_run_is_written_again_and_another_of_its_name_is_left_alone(tmp_path, environment):
    run_dir = str(tmp_path / "run")
    killed = run_python(RUN, run_dir, "", "-1", "0", "5", "kill", env=environment)
    run_id = json.loads(killed.stdout)["trackio_run_id"]
    resumed = run_python(RUN, run_dir, run_id, "3", "4", "6", "end", env=environment)
    assert resumed.returncode == 0, resumed.stderr
    state = json.loads(resumed.stdout)  # Trackio prints nothing
    assert state.keys() == {"wandb_run_id", "trackio_run_id"}
    other = run_python(RUN, str(tmp_path / "other"), "", "-1", "0", "1", "end", env=environment)
    assert other.returncode == 0, other.stderr
    (name_of_other, rows_of_other, _), (name, rows, config) = sorted(stored(environment), key=lambda run: len(run[1]))
    assert name == "a name" != name_of_other
    assert rows_of_other == [[step, step / 8 + 1, False] for step in range(2)]
    assert config["_Group"] == "a group" and config["trainer"] == {"run_name": "a group"}
    assert rows == [[step, step / 8 + (step > 3), False] for step in range(7)], "each step once"


def test_a_damaged_database_is_named_with_its_key(tmp_path, environment):
    (tmp_path / "trackio").mkdir()
    (tmp_path / "trackio" / "mine.db").write_bytes(b"x" * 8192)
    done = run_python(RUN, str(tmp_path / "run"), "", "-1", "0", "1", "end", env=environment)
    assert done.returncode == 1
    assert "UserError: logger.services=[trackio]: " in done.stderr.strip().splitlines()[-1]


def test_a_database_elsewhere_is_refused(monkeypatch):
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        with monkeypatch.context() as context:
            context.setenv(name, "http://127.0.0.1:1")
            with pytest.raises(UserError, match=f"^{name} is set: .* or leave trackio out of logger.services$"):
                Trackio("", LoggerConfig(), {}, None)


def test_a_database_that_is_damaged_later_costs_the_run_nothing(tmp_path, environment):
    (tmp_path / "trackio").mkdir()
    damage = 'open(os.environ["TRACKIO_DIR"] + "/mine.db", "wb").write(b"x" * 8192)'
    code = RUN.replace("tracker =", f"{damage}\ntracker =", 1).replace("else None)", "else None, restarted=True)", 1)
    done = run_python(code, str(tmp_path / "run"), "", "0", "1", "3", "end", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("The run goes on without; its next start sends the steps") == 1, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_database_that_cannot_be_written_costs_the_run_nothing(tmp_path, environment):
    (tmp_path / "trackio").write_text("no directory")
    done = run_python(RUN, str(tmp_path / "run"), "", "-1", "0", "3", "end", env=environment)
    assert done.returncode == 0 and "could not be persisted" in done.stderr, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
