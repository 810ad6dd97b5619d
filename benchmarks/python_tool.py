"""What a call of the tool `python` costs: `python -m benchmarks.python_tool`.

A call after another, and calls at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from statistics import median

from trainer.sandbox.programs import ProgramSandbox


async def measure(sandbox: ProgramSandbox, calls: int) -> tuple[float, float]:
    """Return the median of the seconds of a call, and the calls a second if all are made at the same time."""
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        result = await sandbox.run("6 * 7")
        assert result.output == "42\n", result
        seconds.append(time.perf_counter() - started)
    started = time.perf_counter()
    await asyncio.gather(*(sandbox.run("6 * 7") for _ in range(calls)))
    return median(seconds), calls / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=50)
    calls = parser.parse_args().calls
    sandbox = ProgramSandbox()
    sandbox.check()
    call, rate = asyncio.run(measure(sandbox, calls))
    print(f"a call {1000 * call:.1f} ms, {rate:.0f} calls a second")


if __name__ == "__main__":
    main()
