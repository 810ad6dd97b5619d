"""What a call of the tool `python` costs: `python -m benchmarks.python_tool`.

For each kind of isolation: the start of the server, a call after another, and calls at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from statistics import median

from trainer.errors import UserError
from trainer.sandbox.code_runner import ISOLATIONS, CodeRunner


async def measure(runner: CodeRunner, calls: int) -> tuple[float, float]:
    """Return the median of the seconds of a call, and the calls a second if all are made at the same time."""
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        result = await runner.run("6 * 7")
        assert result.output == "42\n", result
        seconds.append(time.perf_counter() - started)
    started = time.perf_counter()
    await asyncio.gather(*(runner.run("6 * 7") for _ in range(calls)))
    return median(seconds), calls / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    calls = parser.parse_args().calls
    for kind in ISOLATIONS:
        runner = CodeRunner(kind=kind)
        started = time.perf_counter()
        try:
            runner.start()
        except UserError as error:
            print(error)
            continue
        start = time.perf_counter() - started
        call, rate = asyncio.run(measure(runner, calls))
        runner.close()
        print(f"{kind:>10}: start {1000 * start:.0f} ms, a call {1000 * call:.1f} ms, {rate:.0f} calls a second")


if __name__ == "__main__":
    main()
