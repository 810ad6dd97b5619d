"""Profiles of a process, and what is written when the memory of a GPU runs out."""

from __future__ import annotations

import gzip
import json
import pickle

import pytest
import torch

from trainer.cluster.worker_setup import failure_of
from trainer.parallel import profiling
from trainer.parallel.profiling import TorchProfiler, memory_snapshots, snapshot_path, step_directory

MESSAGE = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 3.00 GiB is "
    "free. Including non-PyTorch memory, this process has 76.00 GiB memory in use."
)


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


def test_the_memory_is_written_when_it_runs_out_and_the_message_names_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    path = snapshot_path(tmp_path.name, "policy_rank_0")
    assert path == str(tmp_path / "profile/out_of_memory/policy_rank_0.pickle"), "wherever the message is read"
    with pytest.raises(torch.OutOfMemoryError) as failed, memory_snapshots(path, lambda to: open(to, "w").close()):
        raise torch.OutOfMemoryError(MESSAGE)
    assert (tmp_path / "profile/out_of_memory/policy_rank_0.pickle").exists()
    error = pickle.loads(pickle.dumps(failed.value))  # it goes to the driver
    start, _, rest = MESSAGE.partition(" GPU 0")
    assert str(error) == f"{start} See {path}. GPU 0{rest}"
    shown = failure_of(error, "rank 0", "")
    assert "rank 0 has no memory left (CUDA out of memory. Tried to allocate 20.00 GiB. See " in str(shown)


def test_a_failure_is_what_it_was_if_nothing_can_be_written(tmp_path, caplog):
    def fail(path: str) -> None:
        raise OSError(28, "No space left on device")

    for dump in (fail, None):
        with pytest.raises(torch.OutOfMemoryError) as failed, memory_snapshots(str(tmp_path / "a/b"), dump):
            raise torch.OutOfMemoryError(MESSAGE)
        assert str(failed.value) == MESSAGE
    assert "no snapshot of the GPU's memory is written: [Errno 28]" in caplog.text
    with pytest.raises(ZeroDivisionError), memory_snapshots(str(tmp_path / "c"), fail):
        1 / 0  # noqa: B018
