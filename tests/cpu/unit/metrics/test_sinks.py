"""W&B and TensorBoard of a run that is killed and resumed."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.full_disk import fill, free
from tests.support.metrics import make_tracker, run_python
from tests.support.namespaces import small_disk
from trainer.metrics.samples import COLUMNS, Transcript

# ------------------------------------------------------------------------------------------------------
# TensorBoard


def test_tensorboard_shows_each_step_once_after_a_kill(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def shown() -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("reward/mean")]

    def texts() -> list[tuple[int, bytes]]:
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        return [(e.step, e.tensor_proto.string_val[0]) for e in events.Tensors("samples/validation/text_summary")]

    killed = make_tracker(tmp_path, services=["tensorboard"])
    for step in range(1, 6):
        killed.log(step, {"reward/mean": step})
    assert shown() == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]  # there although the writer was not closed

    resumed = make_tracker(tmp_path, services=["tensorboard"])
    resumed.rewind(3)
    sample = Transcript("val:7", 0, [], [{"role": "assistant", "content": "<b>two\n# 2\x1b"}], "2", 0.5)
    resumed.log(4, {"reward/mean": 40}, {"validation": [sample, sample]})
    assert shown() == [(1, 1), (2, 2), (3, 3), (4, 40)]
    ((step, text),) = texts()
    lines = text.decode().split("\n")
    assert step == 4 and lines[0] == "    val:7:0" and lines.count("    completion  <b>two") == 2
    assert all(line.startswith("    ") or not line for line in lines), "rendered as Markdown"
    resumed.close()
    killed.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread of TensorBoard
def test_a_full_disk_ends_tensorboard_and_not_the_run(tmp_path, caplog):
    with small_disk("64k") as directory:
        tracker = make_tracker(Path(directory), services=["tensorboard"])
        tracker.log(1, {"reward/mean": 1.0})
        fill(Path(directory))
        text = Transcript("val:7", 0, [], [{"role": "assistant", "content": "x" * 9000}], "2", 0.5)
        for step in (2, 3):
            tracker.log(step, {"reward/mean": 1.0}, {"validation": [text]})
        free(Path(directory))
        tracker.log(4, {"reward/mean": 1.0})
        tracker.close()
        assert len(Path(directory, "metrics.jsonl").read_text().splitlines()) == 4
    (message,) = (message for message in caplog.messages if "gets no more steps" in message)
    assert message.startswith("TensorBoard gets no more steps (") and message.endswith("); metrics.jsonl has them all")


# ------------------------------------------------------------------------------------------------------
# W&B

WANDB_RUN = """
import json, os, signal, sys
import psutil
from trainer.config import LoggerConfig
from trainer.metrics.samples import Transcript
from trainer.metrics.tracker import Tracker

run_dir, mode, run_id, rewind, first, last = sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:7])
os.environ["WANDB_MODE"] = mode
logger = LoggerConfig(services=["wandb"], name="a name")
config = {"trainer": {"run_name": "a group"}}
tracker = Tracker(run_dir, logger, config, {"wandb_run_id": run_id} if run_id else None)
if rewind >= 0:
    tracker.rewind(rewind)
sample = Transcript("val:7", 0, [], [{"role": "assistant", "content": "two\\x1b"}], "2", 0.5, {"exact": 0.5})
for step in range(first, last + 1):
    samples = {"validation": [sample, sample]} if step in (2, 6) else {}
    tracker.log(step, {"reward/mean": step / 8, "policy/kl": float("nan")}, samples)
print(json.dumps(tracker.state_dict()), flush=True)
if rewind < 0:
    os.kill(os.getpid(), signal.SIGKILL)
tracker.close()
assert psutil.Process().children() == []
"""


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def wandb_environment(home: Path, server: socket.socket) -> dict[str, str]:
    """No account, and every way out leads to `server`."""
    address = f"http://127.0.0.1:{server.getsockname()[1]}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and k.lower() != "no_proxy"}
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address)
    return {**kept, **proxies, "HOME": str(home), "NETRC": str(home / "netrc"), "WANDB_BASE_URL": address}


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a W&B transaction log (LevelDB's log format)."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position = path.read_bytes(), 7
    while position < len(content):
        _, size, kind = struct.unpack_from("<IHB", content, position)
        assert kind == 1, "a record that is cut into pieces"
        yield Record.FromString(content[position + 7 : position + 7 + size])
        position += 7 + size


def wandb_history(path: Path) -> dict[int, dict[str, str]]:
    """Step -> metric -> JSON of the value."""
    lines = [record.history for record in wandb_records(path) if record.HasField("history")]
    return {
        line.step.num: {"/".join(item.nested_key) or item.key: item.value_json for item in line.item} for line in lines
    }


@pytest.mark.release
def test_wandb_offline_keeps_the_run_and_loses_no_step_to_a_kill(tmp_path, listener):
    run_dir, environment = tmp_path / "run", wandb_environment(tmp_path, listener)
    secret = "environment.kwargs.api_key=hush-1"
    killed = run_python(WANDB_RUN, str(run_dir), "offline", "", "-1", "0", "5", secret, env=environment)
    run_id = json.loads(killed.stdout)["wandb_run_id"]
    time.sleep(1)  # W&B names directories by the second
    resumed = run_python(WANDB_RUN, str(run_dir), "offline", run_id, "3", "4", "6", secret, env=environment)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout) == {"wandb_run_id": run_id}

    _, newest = sorted((run_dir / "wandb").glob(f"offline-run-*-{run_id}"))
    history = wandb_history(newest / f"run-{run_id}.wandb")
    assert {step: json.loads(row["reward/mean"]) for step, row in history.items()} == {s: s / 8 for s in range(7)}
    table = json.loads((newest / "files" / json.loads(history[6]["samples/validation/path"])).read_text())
    row = ["val:7:0", "", "2", "two\\x1b", 0.5, "exact 0.5", "stop", "", ""]
    assert table == {"columns": list(COLUMNS), "data": [row, row]}
    with pytest.raises(BlockingIOError):
        listener.accept()  # no process has connected
    (run, *_) = [record.run for record in wandb_records(newest / f"run-{run_id}.wandb") if record.HasField("run")]
    assert (run.display_name, run.run_group, run.project) == ("a name", "a group", "trainer")
    assert "reward/mean" not in resumed.stdout + resumed.stderr, "W&B prints no table of metrics"
    kept = [file.read_bytes() for file in (run_dir / "wandb").rglob("*") if file.is_file()]
    assert kept and not any(b"hush" in content for content in kept)


def test_wandb_online_without_an_account_names_the_key(tmp_path, listener):
    result = run_python(
        WANDB_RUN, str(tmp_path / "run"), "online", "", "-1", "0", "1",
        env=wandb_environment(tmp_path, listener) | {"WANDB_ERROR_REPORTING": "false"}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert result.returncode == 1
    assert "UserError: logger.services=[wandb]: No API key configured" in result.stderr


# ------------------------------------------------------------------------------------------------------
# A service of a trainer

TRAINER_RUN = """
import json, shutil, sys
from pathlib import Path
from tests.support.toy import toy_config, toy_run
from trainer.metrics.tracker import read_metrics

root = Path(sys.argv[1])

def config(name="run"):
    cfg = toy_config(root / name, total_steps=6, ckpt_interval=2)
    cfg.logger.services = ["trackio"]
    cfg.logger.name = "mine"
    if name == "fork":
        cfg.trainer.resume_mode = "from_path"
        cfg.trainer.resume_path = str(root / "run" / "checkpoints" / "global_step_4")
    return cfg

toy_run(config(), root / "model", stop_after=3)
shutil.rmtree(root / "run" / "checkpoints" / "global_step_3")  # step 3 is trained again, as after a kill
toy_run(config(), root / "model")
toy_run(config("fork"), root / "model", stop_after=5)
rows = read_metrics(str(root / "run" / "metrics.jsonl"))

import trackio
from trackio.sqlite_storage import SQLiteStorage
logs = {run.name: SQLiteStorage.get_logs("trainer", run.name, run_id=run.id) for run in trackio.Api().runs("trainer")}
print(json.dumps([rows, logs]))
"""


@pytest.mark.release
def test_a_trainer_that_is_killed_and_resumed_continues_its_run_of_a_service(tmp_path):
    """A fork has a run of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "TRACKIO_", "HF_"))}
    own = {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = run_python(TRAINER_RUN, str(tmp_path), env=kept | own)
    assert done.returncode == 0, done.stderr
    rows, logs = json.loads(done.stdout.splitlines()[-1])
    assert [row["step"] for row in rows] == list(range(1, 7))
    logged = [one for one in logs.values() if len(one) > 2]
    assert len(logs) == 2 and "mine" in logs and len(logged) == 1
    assert [{name: log[name] for name in row} for row, log in zip(rows, logged[0], strict=True)] == rows
