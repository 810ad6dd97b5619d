"""Profiles of a process, and what is written when the memory of a GPU runs out."""

from __future__ import annotations

import gzip
import json

import torch

from trainer.parallel import profiling
from trainer.parallel.profiling import TorchProfiler, step_directory


def test_a_profile_has_the_operators_between_start_and_stop(tmp_path):
    directory = step_directory(str(tmp_path), 3)
    profiler = TorchProfiler("cpu")
    profiler.stop()  # there is none
    for name in ("rank_0", "again_0"):
        profiler.start(directory, name)
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.stop()
        with gzip.open(tmp_path / f"profile/step_3/{name}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        assert any(event["name"] == "aten::mm" for event in events)


def test_a_profile_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    profiler = TorchProfiler("cpu")
    profiler.start(str(tmp_path), "rank_0")
    (tmp_path / "rank_0.json.gz").mkdir()
    profiler.stop()
    assert "trainer.profile" in caplog.text


def test_a_profile_that_cannot_begin_or_end_costs_a_warning(tmp_path, monkeypatch, caplog):
    class Failing(torch.profiler.profile):
        def stop(self) -> None:
            super().stop()
            raise RuntimeError("CUPTI_ERROR_UNKNOWN")

    profiler = TorchProfiler("cpu")
    (tmp_path / "file").touch()
    profiler.start(str(tmp_path / "file"), "rank_0")
    assert f"trainer.profile: {tmp_path}/file/rank_0 is not written ([Errno 17]" in caplog.text
    profiler.stop()  # there is none
    with monkeypatch.context() as patched:
        patched.setattr(profiling, "profile", Failing)
        profiler.start(str(tmp_path), "rank_1")
    profiler.stop()
    assert f"trainer.profile: {tmp_path}/rank_1 is not written (CUPTI_ERROR_UNKNOWN)" in caplog.text
    profiler.start(str(tmp_path), "rank_2")
    profiler.stop()
    assert (tmp_path / "rank_2.json.gz").exists() and len(caplog.records) == 2
