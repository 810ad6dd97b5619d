"""A class of the user's own gets the metrics, and cannot end a run that has begun."""

from __future__ import annotations

import sys

import pytest

from trainer.config import LoggerConfig, compose
from trainer.errors import UserError
from trainer.main import prepare
from trainer.metrics.samples import Transcript
from trainer.metrics.sinks import find_sink
from trainer.metrics.tracker import Tracker, read_metrics

CODE = """
CALLS = []


class Own:
    def __init__(self, run_dir, config):
        fails_at = config.get("fails_at")
        if fails_at == "start":
            raise ValueError("no route to the service")
        self.fails_at = fails_at

    def start(self, rows, step):
        CALLS.append(("start", [row["step"] for row in rows], step))

    def log(self, step, values):
        if step == self.fails_at:
            raise ConnectionError("the service is gone")
        CALLS.append(("log", step, values["reward/mean"]))

    def samples(self, step, samples):
        CALLS.append(("samples", step, [*samples]))

    def end(self, exit_code):
        CALLS.append(("end", exit_code))


class Half:
    def log(self, step, values): ...
    def start(self, rows, step): ...


class WithoutStep(Own):
    def log(self, values): ...


class Async(Own):
    async def log(self, step, values): ...


class More(Own):
    def __init__(self, run_dir, config, url): ...
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    (tmp_path / "own_service.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_service", raising=False)
    import own_service

    return own_service.CALLS


def tracker(tmp_path, **config) -> Tracker:
    return Tracker(str(tmp_path / "run"), LoggerConfig(services=["own_service:Own"]), config)


def test_a_sink_gets_each_step_and_at_a_restart_those_that_count(tmp_path, calls):
    first = tracker(tmp_path)
    first.rewind(-1)
    for step in (1, 2, 3):
        samples = {"validation": [Transcript("val:7", 0, [], [], "2", 0.5)]} if step == 3 else {}
        first.log(step, {"reward/mean": step / 4}, samples)
    first.close(1)
    again = tracker(tmp_path)
    again.rewind(2)
    again.log(3, {"reward/mean": 0.75})
    again.close()
    logged = [("log", step, step / 4) for step in (1, 2, 3)]
    assert calls[:4] == [("start", [], -1), *logged[:2], ("samples", 3, ["validation"])]
    assert calls[4:] == [logged[2], ("end", 1), ("start", [1, 2], 2), logged[2], ("end", 0)]


def test_a_sink_that_fails_is_left_out_until_the_next_start(tmp_path, calls, caplog):
    one = tracker(tmp_path, fails_at=2)
    one.rewind(-1)
    for step in (1, 2, 3):
        one.log(step, {"reward/mean": step / 4})
    one.close()
    assert calls == [("start", [], -1), ("log", 1, 0.25)]
    assert [row["step"] for row in read_metrics(str(tmp_path / "run/metrics.jsonl"))] == [1, 2, 3]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("OwnSink gets no more steps (logger.services=own_service:Own: ConnectionError: ")
    assert "own_service.py:17, in log" in warning and warning.endswith("; metrics.jsonl has them all")


def test_a_sink_that_cannot_be_built_ends_the_first_start_alone(tmp_path, calls, caplog):
    with pytest.raises(UserError, match="own_service:Own: ValueError: no route to the service"):
        tracker(tmp_path, fails_at="start")
    begun = tracker(tmp_path)
    begun.rewind(-1)
    begun.log(1, {"reward/mean": 0.25})
    begun.close()
    resumed = tracker(tmp_path, fails_at="start")
    resumed.rewind(1)
    resumed.log(2, {"reward/mean": 0.5})
    resumed.close()
    assert "no route to the service" in caplog.text and calls[-1] == ("end", 0)


def test_a_sink_that_cannot_work_is_refused_before_anything_starts(tmp_path, calls):
    for name, problem in (
        ("own_service:Half", "has no method samples; it needs start, log, samples and end"),
        ("own_service:WithoutStep", "log: too many positional arguments; it gets step, values"),
        ("own_service:Async", "log is async, and nothing awaits it; put what takes long on a thread"),
        ("own_service:More", "missing a required argument: 'url'; it gets run_dir and config"),
        ("own_service:Owm", "own_service has no class Owm"),
        ("own_servce:Own", "cannot be imported"),
    ):
        with pytest.raises(UserError, match="logger.services") as refused:
            find_sink(name)
        assert problem in str(refused.value)
    with pytest.raises(UserError, match="own_service has no class Other"):
        prepare(compose([f"trainer.run_dir={tmp_path}/run", "logger.services=['own_service:Other']"]))
    assert not (tmp_path / "run").exists()
