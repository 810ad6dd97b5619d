"""`metrics.jsonl`, W&B and TensorBoard of a run that is killed and resumed."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.metrics import make_tracker
from tests.support.odd_files import DEEP_JSON
from trainer.config import LoggerConfig
from trainer.errors import UserError
from trainer.metrics import names
from trainer.metrics.samples import COLUMNS, Transcript
from trainer.metrics.tracker import Tracker, read_metrics
from trainer.reports.report import write_report

ROOT = Path(__file__).parents[4]


def test_lines_of_earlier_versions_are_read_under_the_names_of_today(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "perf/tokens_shared": 0.5, "rollout/corrected_frac": null}\n')
    assert read_metrics(str(path)) == [{"step": 1, "perf/prefix_reuse_frac": 0.5, "rollout_is/clip_frac": None}]


def run_python(code: str, *args: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=60, **kwargs
    )


def test_a_line_has_the_step_then_sorted_names_and_valid_json(tmp_path):
    tracker = make_tracker(tmp_path)
    tracker.log(0, {"val/accuracy": 0.5})
    tracker.log(
        1,
        {
            "reward/std": float("inf"),
            "reward/mean": np.float32(0.25),
            "policy/kl": float("nan"),
            "progress/prompts": np.int64(64),
        },
    )
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 0, "val/accuracy": 0.5}\n'
        '{"step": 1, "policy/kl": null, "progress/prompts": 64, "reward/mean": 0.25, "reward/std": null}\n'
    )
    tracker.close()
    tracker.close()  # harmless


def test_logging_a_step_twice_is_a_bug(tmp_path):
    tracker = make_tracker(tmp_path)
    tracker.log(3, {"reward/mean": 1.0})
    with pytest.raises(AssertionError, match="step 3 is logged after step 3"):
        tracker.log(3, {"reward/mean": 1.0})
    with pytest.raises(AssertionError, match="rewind first"):
        make_tracker(tmp_path).log(4, {"reward/mean": 1.0})
    assert len(read_metrics(str(tmp_path / "metrics.jsonl"))) == 1


def test_a_new_run_in_an_old_directory_starts_from_nothing(tmp_path):
    make_tracker(tmp_path).log(7, {"reward/mean": 1.0})
    tracker = make_tracker(tmp_path)
    tracker.rewind(-1)
    tracker.log(0, {"reward/mean": 2.0})
    assert read_metrics(str(tmp_path / "metrics.jsonl")) == [{"step": 0, "reward/mean": 2.0}]


numbers = st.floats() | st.integers(-(2**60), 2**60)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(sorted(names.METRICS)), numbers), min_size=1, max_size=8),
    kept_bytes=st.floats(0, 1),
    tail=st.sampled_from([b"", b"\0" * 100]),
    resume=st.floats(0, 1),
)
def test_a_run_cut_anywhere_and_resumed_has_the_file_of_the_uninterrupted_run(
    tmp_path_factory, rows, kept_bytes, tail, resume
):
    run_dir = tmp_path_factory.mktemp("run")
    path = run_dir / "metrics.jsonl"
    tracker = make_tracker(run_dir)
    for step, row in enumerate(rows):
        tracker.log(step, row)
    tracker.close()
    whole = path.read_bytes()

    # A power failure may cut the file anywhere, or leave zeros for what was not written yet.
    cut = whole[: round(kept_bytes * len(whole))] + tail
    path.write_bytes(cut)
    (run_dir / "metrics.jsonl.tmp").write_bytes(b'{"left by": a ki')
    lines = cut.count(b"\n")
    step = round(resume * lines) - 1  # the checkpoint's: all lines up to it are in the file
    tracker = make_tracker(run_dir)
    tracker.rewind(step)
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[: step + 1])
    for later in range(step + 1, len(rows)):
        tracker.log(later, rows[later])
    tracker.close()
    assert path.read_bytes() == whole
    kept = [row["step"] for row in read_metrics(str(run_dir / "metrics.cut.jsonl"))]
    logged = set(whole.splitlines()) & set(cut.splitlines())  # the last one counts without its line break too
    assert kept == list(range(step + 1, len(logged))), "lines were discarded"
    assert set(os.listdir(run_dir)) <= {"metrics.jsonl", "metrics.cut.jsonl"}


def test_what_was_logged_survives_a_kill(tmp_path):
    code = """
import sys
from trainer.config import LoggerConfig
from trainer.metrics.tracker import Tracker
tracker = Tracker(sys.argv[1], LoggerConfig(), {})
for step in range(10**6):
    tracker.log(step, {"reward/mean": step / 7, "policy/kl": 1e-300})
    print(step, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for _ in range(200):
        process.stdout.readline()
    process.kill()
    logged = 200 + len(process.stdout.read().splitlines())
    process.wait()
    rows = read_metrics(str(tmp_path / "metrics.jsonl"))
    assert len(rows) >= logged
    assert rows == [{"step": s, "policy/kl": 1e-300, "reward/mean": s / 7} for s in range(len(rows))]


def test_a_full_disk_is_an_error_and_costs_nothing_that_was_written(tmp_path):
    code = """
import resource, sys
from trainer.config import LoggerConfig
from trainer.metrics.tracker import Tracker
tracker = Tracker(sys.argv[1], LoggerConfig(), {})
if sys.argv[2] == "rewind":
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
    tracker.rewind(3)
else:
    for step in range(4):
        tracker.log(step, {"reward/mean": 1.0})
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150))
    tracker.log(4, {"reward/mean": 1.0})
"""
    path = tmp_path / "metrics.jsonl"
    logging = run_python(code, str(tmp_path), "log")
    assert "the last line was cut short" in logging.stderr
    assert [row["step"] for row in read_metrics(str(path))] == [0, 1, 2, 3]
    before = path.read_bytes()
    rewinding = run_python(code, str(tmp_path), "rewind")
    assert "File too large" in rewinding.stderr
    assert path.read_bytes() == before


def test_reading_leaves_out_a_torn_end_and_refuses_rubbish_elsewhere(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": null}\n{"step": 2, "a"')
    assert read_metrics(str(path)) == [{"step": 1, "a": None}]
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2 has no JSON object"):
        read_metrics(str(path))
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics.jsonl:2"):
        make_tracker(tmp_path).rewind(1)
    assert path.read_bytes() == before


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

    killed = make_tracker(tmp_path, tensorboard=True)
    for step in range(1, 6):
        killed.log(step, {"reward/mean": step})
    assert shown() == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]  # there although the writer was not closed

    resumed = make_tracker(tmp_path, tensorboard=True)
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


# ------------------------------------------------------------------------------------------------------
# W&B

WANDB_RUN = """
import json, os, signal, sys
import psutil
from trainer.config import LoggerConfig, WandbConfig
from trainer.metrics.samples import Transcript
from trainer.metrics.tracker import Tracker

run_dir, mode, run_id, rewind, first, last = sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:7])
named = {"name": "a name", "group": "a group", "tags": ["one", "two"], "notes": "some notes"}
logger = LoggerConfig(wandb=WandbConfig(mode=mode, **named))
tracker = Tracker(run_dir, logger, {"seed": 1}, run_id or None)
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
    assert (run.display_name, run.run_group, list(run.tags), run.notes) == (
        "a name", "a group", ["one", "two"], "some notes"
    )  # fmt: skip
    assert "reward/mean" not in resumed.stdout + resumed.stderr, "W&B prints no table of metrics"
    kept = [file.read_bytes() for file in (run_dir / "wandb").rglob("*") if file.is_file()]
    assert kept and not any(b"hush" in content for content in kept)


def test_wandb_online_without_an_account_names_the_key(tmp_path, listener):
    result = run_python(
        WANDB_RUN, str(tmp_path / "run"), "online", "", "-1", "0", "1",
        env=wandb_environment(tmp_path, listener) | {"WANDB_ERROR_REPORTING": "false"}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert result.returncode == 1
    assert "UserError: logger.wandb.mode=online: No API key configured" in result.stderr


def test_the_run_id_is_kept_while_wandb_is_off(tmp_path):
    assert make_tracker(tmp_path).state_dict() == {"wandb_run_id": None}
    tracker = Tracker(str(tmp_path), LoggerConfig(), {}, run_id="abcd1234")
    assert tracker.state_dict() == {"wandb_run_id": "abcd1234"}
    assert os.listdir(tmp_path) == []


def test_lines_that_are_cut_are_kept_and_each_only_once(tmp_path):
    def start(cut: int, last: int, reward: float) -> None:
        tracker = Tracker(str(tmp_path), LoggerConfig(), {})
        tracker.rewind(cut)
        for step in range(cut + 1, last + 1):
            tracker.log(step, {"reward/mean": reward, "time/step": os.urandom(1)[0], "perf/mfu": os.urandom(1)[0]})
        tracker.close()

    start(-1, 4, 0.5)
    assert not (tmp_path / "metrics.cut.jsonl").exists()
    for _ in range(3):
        start(1, 4, 0.5)  # the same again: nothing more to keep
    start(-1, 2, 0.25)
    start(2, 2, 0.25)
    kept = [json.loads(line) for line in (tmp_path / "metrics.cut.jsonl").read_text().splitlines()]
    assert [(row["step"], row["reward/mean"]) for row in kept] == [(2, 0.5), (3, 0.5), (4, 0.5), (0, 0.5), (1, 0.5)]
    assert [row["reward/mean"] for row in read_metrics(str(tmp_path / "metrics.jsonl"))] == [0.25] * 3


@pytest.mark.parametrize(
    "line",
    [DEEP_JSON, b'{"step": "1"}', b'{"step": 1e3}', b'{"step": true}', b'{"step": 5, "a": "b"}',
     b'{"step": 5, "a": []}', b'{"step": -1}', b'{"step": 5, "a": ' + b"9" * 400 + b"}",
     b'{"step": 5, "a": Infinity}', b"\xff"],
    ids=range(10),
)  # fmt: skip
def test_lines_of_metrics_of_another_shape_are_refused(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "reward/mean": 0.5}\n' + line + b"\n" + b'{"step": 6}\n')
    for read in (lambda: read_metrics(str(path)), lambda: write_report(str(tmp_path))):
        with pytest.raises(UserError, match=r"metrics.jsonl:2 has no JSON object with a step"):
            read()
