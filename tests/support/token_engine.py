"""A streaming engine without a model: its tokens come of seeds, and it takes weights between two of them."""

from __future__ import annotations

import dataclasses
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.engines import EngineSpec
from trainer.generation.engine import CUT, Completion, Request, RunningRequests
from trainer.generation.weight_sync import SharedMemory

ENGINE = EngineSpec(path=f"{__name__}:TokenEngine", unit="request")
JOINING = EngineSpec(path=f"{__name__}:StoppingEngine", unit="request")


class _Running:
    def __init__(self, request: Request):
        self.request = request
        self.tokens: list[int] = []
        self.versions: list[int] = []
        self.length = 1 + request.seed % request.sampling.max_tokens

    def completion(self) -> Completion:
        spans: list[list[int]] = []
        for version in self.versions:
            if not spans or spans[-1][0] != version:
                spans.append([version, 0])
            spans[-1][1] += 1
        versions = self.versions[0], self.versions[-1]
        pairs = tuple((version, count) for version, count in spans) if len(spans) > 1 else ()
        return Completion(self.tokens, [-3.0] * len(self.tokens), "length", versions, pairs)


class TokenEngine:
    """See `trainer.generation.engine.StreamingEngine`."""

    token_s = 0.004

    def __init__(self, model_path: str, **_: Any):
        self._version = 0
        self._running: dict[int, _Running] = {}
        self._interrupted = threading.Event()

    def step(self, requests: Mapping[int, Request]) -> dict[int, Completion]:
        self._running |= {number: _Running(request) for number, request in requests.items()}
        done: dict[int, Completion] = {}
        while self._running and not done and not self._interrupted.is_set():
            threading.Event().wait(self.token_s)
            for number, running in list(self._running.items()):
                position = len(running.tokens)
                running.tokens.append(zlib.crc32(f"{running.request.seed} {position}".encode()) % 200)
                running.versions.append(self._version)
                if len(running.tokens) == running.length:
                    done[number] = self._running.pop(number).completion()
        self._interrupted.clear()
        return done

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        raise AssertionError("the pool calls `step`")

    def interrupt(self) -> None:
        self._interrupted.set()

    def sync_weights(self, source: SharedMemory, version: int, running: RunningRequests = "abort") -> None:
        if running == "abort":
            self._running.clear()
        self._version = version

    def hand_back(self) -> dict[int, Completion]:
        running, self._running = self._running, {}
        return {
            number: dataclasses.replace(one.completion(), finish_reason=CUT)
            for number, one in running.items()
            if one.tokens
        }

    def set_version(self, version: int) -> None:
        self._version = version

    def sleep(self) -> int:
        return 0

    def wake(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class StoppingEngine(TokenEngine):
    """Ends each completion with a stop token. Requests may join at any time: they change no token of others."""

    def step(self, requests: Mapping[int, Request]) -> dict[int, Completion]:
        self._stops = {**getattr(self, "_stops", {}), **{n: r.sampling.stop_token_ids for n, r in requests.items()}}
        done = super().step(requests)
        for number, completion in done.items():
            stops = self._stops.pop(number)
            completion.token_ids[-1] = stops[int(completion.token_ids.sum()) % len(stops)]
            done[number] = dataclasses.replace(completion, finish_reason="stop")
        return done
