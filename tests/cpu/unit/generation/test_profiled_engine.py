"""An engine that is profiled while it has the weights of some steps."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.config import RolloutConfig
from trainer.config.engines import EngineSpec
from trainer.generation import profiled_engine
from trainer.generation.engine import build_engine
from trainer.generation.profiled_engine import OwnProfiler, ProfiledEngine


class Engine:
    """Notes its calls, and profiles itself."""

    def __init__(self, model_path: str = "", *, profile_dir: str | None = None, **_: Any):
        self.calls: list[Any] = []
        self.profile_dir = profile_dir

    def sync_weights(self, source: Any, version: int, running: str = "abort") -> None:
        self.calls.append((source, version, running))

    def set_version(self, version: int) -> None:
        self.calls.append(version)

    def generate(self, requests: list[int]) -> list[int]:
        return requests

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def start_profile(self, name: str) -> None:
        self.calls.append(f"start {name}")

    def stop_profile(self, directory: str) -> None:
        self.calls.append(f"stop {directory}")


def profiled(steps: tuple[int, ...]) -> tuple[Engine, Any]:
    engine = Engine()
    profiler = SimpleNamespace(
        start=lambda directory, name: engine.calls.append(f"start {directory} {name}"),
        stop=lambda: engine.calls.append("stop"),
        wait=lambda: None,
    )
    return engine, ProfiledEngine(engine, profiler, steps, "step_{}".format, "engine_0")


def test_the_profile_begins_and_ends_with_the_weights_of_a_step():
    inner, engine = profiled((2, 3, 5))
    engine.set_version(-1)
    engine.set_version(1)
    for version in range(2, 6):
        engine.sync_weights("source", version, "keep")
        assert engine.generate([version]) == [version]
    engine.set_version(5)
    engine.shutdown()
    synced = [("source", version, "keep") for version in range(2, 6)]
    assert inner.calls == [
        *(-1, 1, synced[0], "start step_2 engine_0"),
        *("stop", synced[1], "start step_3 engine_0"),
        *("stop", synced[2]),
        *(synced[3], "start step_5 engine_0", 5, "stop", "shutdown"),
    ]


@pytest.mark.parametrize("method", ["generate", "step"])
def test_the_profile_ends_when_the_engine_has_generated_for_a_while(monkeypatch, method):
    inner, engine = profiled((4, 5))
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(profiled_engine, "time", clock)

    def generate(seconds: float) -> str:
        clock.now += seconds
        inner.calls.append(method)
        return "completions"

    monkeypatch.setattr(inner, method, generate, raising=False)
    for version in (3, 4):
        engine.set_version(version)
        clock.now += 1000  # it waits
        for _ in range(3):
            assert getattr(engine, method)(0.6 * profiled_engine.PROFILED_S) == "completions"
    engine.set_version(4)  # the profile does not begin again
    engine.set_version(5)
    engine.shutdown()
    assert inner.calls == [
        *(3, method, method, method),
        *(4, "start step_4 engine_0", method, method, "stop", method, 4),
        *(5, "start step_5 engine_0", "stop", "shutdown"),
    ]


def test_a_call_that_would_last_longer_is_interrupted(monkeypatch):
    """A call may generate for minutes before its first completion."""
    monkeypatch.setattr(profiled_engine, "PROFILED_S", 0.2)
    interrupted = threading.Event()
    inner = Engine()
    inner.interrupt = interrupted.set
    inner.step = lambda _: inner.calls.append(interrupted.wait(60))
    profiler = SimpleNamespace(start=lambda *_: None, stop=lambda: inner.calls.append("stop"), wait=lambda: None)
    engine: Any = ProfiledEngine(inner, profiler, (4,), str, "engine_0")
    engine.set_version(4)
    engine.step({})
    interrupted.clear()
    inner.step = lambda _: inner.calls.append(interrupted.is_set())
    engine.step({})
    assert inner.calls == [4, True, "stop", False]


def test_weights_do_not_wait_for_the_files(tmp_path, monkeypatch):
    may_write = threading.Event()

    def export(ended: Any, path: str) -> None:
        assert may_write.wait(60)
        Path(path).touch()

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    spec = EngineSpec(f"{__name__}:Engine", profiles=True)
    engine: Any = build_engine(spec, {}, False, "", 0, ((4,), str(tmp_path)), device="cpu", rollout=RolloutConfig())
    engine.set_version(4)
    engine.sync_weights("source", 5)
    assert engine.calls == [4, ("source", 5, "abort")] and not [*tmp_path.rglob("*.gz")]
    may_write.set()
    engine.shutdown()
    assert (tmp_path / "profile/step_4/engine_0.json.gz").exists()


def test_an_engine_profiles_itself_if_it_can(tmp_path):
    spec = EngineSpec(f"{__name__}:Engine", profiles=True)
    rollout = RolloutConfig(tensor_parallel_size=2)
    engine: Any = build_engine(spec, {}, False, "", 1, ((4,), str(tmp_path)), device="cpu", rollout=rollout)
    assert engine.profile_dir == str(tmp_path)
    engine.set_version(4)
    engine.sync_weights("source", 5)
    directory = tmp_path / "profile/step_4"
    assert engine.calls == [4, "start engine_1", f"stop {directory}", ("source", 5, "abort")] and directory.is_dir()


def test_an_engine_whose_own_profiler_fails_goes_on_without_a_profile(tmp_path, caplog):
    class Failing(Engine):
        """Whose profiler raises what vLLM raises for a failure in one of its processes."""

        def stop_profile(self, directory: str) -> None:
            raise Exception("Call to profile method failed")

    inner = Failing()
    engine = ProfiledEngine(inner, OwnProfiler(inner), (4, 5), str(tmp_path / "step_{}").format, "engine_1")
    (tmp_path / "step_4").touch()
    for version in (4, 5, 6):
        engine.set_version(version)
    assert inner.calls == [4, 5, "start engine_1", 6], "a profile that did not begin does not end"
    begun, ended = caplog.messages
    assert begun.startswith(f"trainer.profile: {tmp_path}/step_4/engine_1 is not written ([Errno 17]")
    assert ended == f"trainer.profile: {tmp_path}/step_5/engine_1 is not written (Call to profile method failed)"


def test_torch_profiles_an_engine_in_one_process(tmp_path):
    spec = EngineSpec(f"{__name__}:Engine", profiles=True)
    engine: Any = build_engine(spec, {}, False, "", 0, ((4,), str(tmp_path)), device="cpu", rollout=RolloutConfig())
    engine.set_version(4)
    engine.set_version(5)
    engine.shutdown()
    assert engine.profile_dir is None and engine.calls == [4, 5, "shutdown"]
    assert (tmp_path / "profile/step_4/engine_0.json.gz").stat().st_size > 0


def test_an_engine_is_as_it_is_if_no_step_is_profiled(tmp_path):
    spec = EngineSpec(f"{__name__}:Engine", profiles=True)
    assert type(build_engine(spec, {}, False, "", 0, ((), str(tmp_path)), device="cpu")) is Engine
    served = EngineSpec(f"{__name__}:Engine", served=True)
    assert type(build_engine(served, {}, False, "", 0, ((1,), str(tmp_path)), device="cpu")) is Engine
