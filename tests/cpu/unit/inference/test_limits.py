"""What people may send to an inference server, and how long its engine may take for it. No vLLM is needed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import aiohttp

from trainer.generation.server_protocol import LEASE
from trainer.inference.backend import longest_pause_s
from trainer.inference.gateway import Gateway
from trainer.process import time_limits
from trainer.process.model_server import SCORE
from trainer.process.network import listen, start_server


def test_a_request_that_is_far_too_long_does_not_reach_the_engine():
    async def ask() -> list[int]:
        gateway = Gateway(None, 60.0, {"max_tokens": 8000}, {}, lambda: ("", {}))
        gateway.backend = SimpleNamespace(is_ready=False)
        listener = listen("127.0.0.1", 0, "")
        runner = await start_server(gateway.application(), listener)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        async with aiohttp.ClientSession() as session:
            statuses = []
            for size in (10, 2_000_000, 2_100_000):
                for body in (b" " * size, chunks(size)):
                    async with session.post(url, data=body) as answer:
                        statuses.append(answer.status)
        await runner.cleanup()
        return statuses

    assert asyncio.run(ask()) == [503, 503, 503, 503, 413, 413]


async def chunks(size: int) -> Iterator[bytes]:
    for start in range(0, size, 100_000):
        yield b" " * min(100_000, size - start)


def test_an_engine_may_take_longer_for_a_long_prompt():
    assert longest_pause_s({"prompt": 0}) == time_limits.SERVER_HANG_S
    assert longest_pause_s({"prompt": 8192}) == 3 * time_limits.SERVER_HANG_S


def test_an_engine_that_hangs_or_exits_is_started_again(tmp_path):
    """It makes no progress, or does not answer. Before, it is killed. One that makes progress is left alone."""
    command = [sys.executable, "-m", "tests.support.hanging_engine", str(tmp_path / "starts")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    engines = json.loads(done.stdout)
    assert len({one["process"] for one in engines}) == 4
    assert [one["lives"] for one in engines] == [False, False, False, True]
    assert done.stderr.count("; it is started again") == 3, done.stderr


def test_a_server_is_for_jobs_that_sample_or_for_runs_that_ask_a_frozen_model():
    """Whoever comes first. A request for other weights is refused, and so is a job, by the server of a reward model."""
    owner = {"run": "a", "start": 1, "name": "run a", "engine": 0, "owner": "x"}
    job = (LEASE, {"job": owner, "needs": {"tokens": 10}})
    question, stale = ((SCORE, {"weights": name, "token_ids": [[1]]}) for name in ("digest", "other"))

    async def ask(computes: str, requests: list[tuple[str, dict]]) -> list[tuple[int, str]]:
        gateway = Gateway(None, 60.0, {"max_tokens": 8000, "computes": computes}, {}, lambda: ("digest", {}))
        gateway.backend = SimpleNamespace(is_ready=False)
        listener = listen("127.0.0.1", 0, "")
        runner, found = await start_server(gateway.application(), listener), []
        async with aiohttp.ClientSession(f"http://127.0.0.1:{listener.getsockname()[1]}") as session:
            for path, body in requests:
                async with session.post(path, json=body) as answer:
                    found.append((answer.status, (await answer.json())["error"].partition(";")[0]))
        await runner.cleanup()
        return found

    starting, taken = (503, "its engine is starting"), (409, "serves a frozen model to a run")
    others = (409, "serves other weights than those that this run began with")
    assert asyncio.run(ask("logprobs", [stale, question, job])) == [others, starting, taken]
    of_job = (409, "has weights of a job that samples")
    assert asyncio.run(ask("logprobs", [job, question])) == [starting, of_job]
    assert asyncio.run(ask("scores", [job])) == [taken]
