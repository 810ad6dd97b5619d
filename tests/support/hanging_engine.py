"""`python -m tests.support.hanging_engine DIRECTORY`: an inference server whose engine hangs twice and exits once.

It prints the process of each engine that has served, and whether it still lives when the next one serves. The engine is
no vLLM: it says that it generates. Its first start makes no progress, the second one stops answering, and the third one
exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from trainer.inference import backend
from trainer.process import time_limits


def serve(_: Any, socket: str, settings: dict[str, str]) -> None:
    """Be the engine."""
    directory = Path(settings["directory"])
    with contextlib.suppress(FileExistsError):
        directory.mkdir()
    number = len(list(directory.iterdir()))
    (directory / str(os.getpid())).touch()
    counts = itertools.count()

    async def alive(_: web.Request) -> web.Response:
        if number == 1 and next(counts) > 2:
            await asyncio.sleep(3600)
        if number == 2 and next(counts) > 2:
            os._exit(7)
        return web.json_response({"busy": True, "prompt": 0, "progress": next(counts) * min(number, 1)})

    application = web.Application()
    application.router.add_get("/trainer/alive", alive)
    web.run_app(application, path=socket, print=None)


async def _watch(directory: str) -> list[dict[str, int]]:
    """Run the server until the fourth engine has served for longer than one may hang."""
    served: list[dict[str, int]] = []
    one = backend.Backend({"directory": directory}, lambda: None)

    def note() -> None:
        for earlier in served:
            earlier["lives"] = os.path.exists(f"/proc/{earlier['process']}")
        newest = max(Path(directory).iterdir(), key=lambda path: path.stat().st_mtime)
        served.append({"process": int(newest.name), "lives": True})

    running = asyncio.create_task(one.run(note))
    while len(served) < 4 and not running.done():
        await asyncio.sleep(0.05)
    await asyncio.sleep(4 * time_limits.SERVER_HANG_S)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return served


if __name__ == "__main__":
    time_limits.SERVER_HANG_S, time_limits.SERVER_POLL_S = 1.0, 0.1
    backend._SERVE = "tests.support.hanging_engine:serve"
    print(json.dumps(asyncio.run(_watch(sys.argv[1]))))
