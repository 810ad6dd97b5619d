"""Engines that share the GPUs of ranks: who holds the memory when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer.config import Config
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.launch import Rollout

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4, stop_token_ids=())


class Recorder:
    """A group of one actor that writes down what it is called for."""

    def __init__(self, log: list[str], name: str):
        self._log, self._name = log, name
        self._version = 0

    def __len__(self) -> int:
        return 1

    def call(self, method: str, *args: Any) -> list[Any]:
        self._log.append(f"{self._name} {method}")
        if method in ("set_version", "sync_weights"):
            self._version = args[-1]
        return [None]

    def start(self, method: str, *args: Any) -> SimpleNamespace:
        results = self.call(method, *args)
        return SimpleNamespace(result=lambda: results)

    def call_each(self, method: str, args: list[tuple]) -> list[Any]:
        self._log.append(f"{self._name} {method}")
        return [[Completion([1], [0.0], "length", self._version) for _ in requests] for requests, _ in args]

    def where(self) -> list[dict[str, Any]]:
        return [{"host": "127.0.0.1"}]


@pytest.fixture
def log() -> list[str]:
    return []


def rollout_on(device: str, colocate: bool, log: list[str]) -> Rollout:
    cfg = Config()
    cfg.rollout.share_gpus = colocate
    ranks = SimpleNamespace(
        policy=Recorder(log, "ranks"),
        share_weights=lambda *_: log.append("ranks share"),
        drop_shared=lambda *_: log.append("ranks drop"),
        check_shared=lambda *_: log.append("ranks check"),
    )
    cluster = SimpleNamespace(device=device, launch_engines=lambda *_: Recorder(log, "engines"))
    return Rollout(cfg, cluster, ranks, "model")


def taken(log: list[str]) -> list[str]:
    entries = list(log)
    log.clear()
    return entries


def test_engines_hold_memory_only_while_they_generate(log):
    rollout = rollout_on("cuda", True, log)
    assert taken(log) == ["engines sleep"]  # and only then the ranks load
    rollout.start(version=1, fresh=True)
    assert taken(log) == ["ranks check", "engines set_version"]
    assert [c.weight_version for c in rollout.generate([Request([1], 2)], SAMPLING)] == [1]
    assert taken(log) == ["ranks apply", "engines wake", "engines generate", "engines sleep"]
    rollout.sync_weights(2)
    assert taken(log) == ["ranks apply", "ranks share", "engines sync_weights", "ranks drop"]


@pytest.mark.parametrize(("device", "colocate"), [("cuda", False), ("cpu", True), ("cpu", False)])
def test_engines_with_memory_of_their_own_stay_awake(device, colocate, log):
    rollout = rollout_on(device, colocate, log)
    rollout.start(version=1, fresh=False)
    rollout.generate([Request([1], 2)], SAMPLING)
    shared = ["ranks share", "engines sync_weights", "ranks drop"]
    assert taken(log) == ["ranks check", *shared, "engines generate"]
