"""An engine whose GPU memory is written to a file when it runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config import RolloutConfig
from trainer.config.engines import EngineSpec
from trainer.generation.engine import build_engine
from trainer.generation.memory_watch import watch_methods


class Engine:
    """Runs out of memory when it is told to."""

    version = 3

    def __init__(self, model_path: str, *, device: str):
        if model_path == "too large":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def generate(self, requests: list[int]) -> list[int]:
        if not requests:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return requests


@pytest.mark.parametrize("when", ["building", "generating"])
def test_an_engine_that_runs_out_of_memory_names_the_snapshot(tmp_path, monkeypatch, when):
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).touch())
    spec, profiled = EngineSpec(f"{__name__}:Engine"), ((), str(tmp_path))
    path = tmp_path / "profile/out_of_memory/engine_1.pickle"
    with pytest.raises(torch.OutOfMemoryError, match=f"See {path}"):
        engine: Any = build_engine(spec, {}, False, "too large" * (when == "building"), 1, profiled, device="cuda")
        assert engine.version == 3 and engine.generate([1]) == [1] and not path.exists()
        engine.generate([])
    assert path.exists()


class Divided(Engine):
    """An engine whose memory is that of other processes."""

    def __init__(self, model_path: str, *, device: str, rollout: RolloutConfig):
        super().__init__(model_path, device=device)
        self.watched: list[str] = []

    def watch_workers(self, path: str) -> None:
        self.watched.append(path)


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_of_several_processes_lets_them_watch_their_memory(tmp_path, size):
    spec, rollout = EngineSpec(f"{__name__}:Divided"), RolloutConfig(tensor_parallel_size=size)
    profiled = ((), str(tmp_path))
    engine: Any = build_engine(spec, {}, False, "", 1, profiled, device="cuda", rollout=rollout)
    assert engine.watched == [str(tmp_path / "profile/out_of_memory/engine_1.pickle")] * (size - 1)


def test_a_process_of_an_engine_names_its_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).touch())
    path, process = str(tmp_path / "rank_1.pickle"), Engine("", device="cuda")
    watch_methods(process, ["generate", "missing"], path)
    assert process.generate([1]) == [1]
    with pytest.raises(torch.OutOfMemoryError, match=f"See {path}"):
        process.generate([])


def test_an_engine_without_a_gpu_is_as_it_is(tmp_path):
    spec = EngineSpec(f"{__name__}:Engine")
    assert type(build_engine(spec, {}, False, "", 0, ((), str(tmp_path)), device="cpu")) is Engine
