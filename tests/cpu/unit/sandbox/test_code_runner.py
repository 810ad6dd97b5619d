"""Code of the policy: what it may do, what it prints, and how it is ended."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from trainer.errors import UserError
from trainer.sandbox import code_runner
from trainer.sandbox.call_clock import CallClock
from trainer.sandbox.code_runner import ISOLATIONS, MAX_CODE, CodeLimits, CodeResult, CodeRunner

LIMITS = CodeLimits(cpu_s=1, time_s=100.0, memory_mb=128, files_mb=4, files=16, output=400)


@pytest.fixture(scope="module", params=ISOLATIONS)
def runner(request) -> Iterator[CodeRunner]:
    runner = CodeRunner(LIMITS, request.param)
    runner.start()
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def closed_in() -> Iterator[CodeRunner]:
    """With namespaces."""
    runner = CodeRunner(LIMITS)
    yield runner
    runner.close()


def run(runner: CodeRunner, *codes: str) -> list[CodeResult]:
    async def together() -> list[CodeResult]:
        return await asyncio.gather(*map(runner.run, codes))

    return asyncio.run(together())


def output(runner: CodeRunner, code: str) -> str:
    (result,) = run(runner, code)
    assert not result.problem, result
    return result.output


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(6 * 7)", "42\n"),
        ("x = 6\nx * 7", "42\n"),
        ("'é'", "'é'\n"),
        ("None", ""),
        ("import sys; sys.exit('enough')", "enough\n"),
        ("import sys\nprint(1)\nprint(2, file=sys.stderr)\nprint(3)", "1\n2\n3\n"),
        ("if __name__ == '__main__':\n    print('main')", "main\n"),
        ("input()", 'Traceback (most recent call last):\n  File "<code>", line 1, in <module>\n    input()\n'
                    'EOFError: EOF when reading a line\n'),
        ("import json\njson.loads('{')", 'Traceback (most recent call last):\n  File "<code>", line 2, in <module>\n'
         "    json.loads('{')\njson.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: "
         "line 1 column 2 (char 1)\n"),
        ("1 +", '  File "<code>", line 1\n    1 +\n       ^\nSyntaxError: invalid syntax\n'),
        ("import sympy", 'Traceback (most recent call last):\n  File "<code>", line 1, in <module>\n'
                         "    import sympy\nModuleNotFoundError: No module named 'sympy'\n"),
        ("import sqlite3, csv\nprint(csv.__name__)", "csv\n"),
    ],
)  # fmt: skip
def test_code_prints_what_a_program_would_print(runner, code, printed):
    assert output(runner, code) == printed


def test_a_program_is_the_same_each_time(runner):
    """Hashes and the default generator of random numbers are fixed, and nothing stays from an earlier program."""
    code = "import random\nprint(random.random(), hash('x'), {'a', 'b', 'c', 'd'}, dir())"
    first = output(runner, code)
    output(runner, "import builtins, random\nrandom.seed(7)\nbuiltins.left = mine = 1")
    assert output(runner, code) == first
    assert "left" not in output(runner, "import builtins\nprint(dir(builtins), dir())")


def test_programs_run_at_the_same_time_and_each_gets_its_own_answer(runner):
    code = "import time\ntime.sleep(0.3)\nprint({})"
    assert [r.output for r in run(runner, *(code.format(i) for i in range(12)))] == [f"{i}\n" for i in range(12)]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("while True: pass", "cpu"),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "cpu"),
        ("while True: print('x' * 1000)", "output"),
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    ],
)  # fmt: skip
def test_a_program_that_does_not_end_is_ended(runner, code, problem):
    (result,) = run(runner, code)
    assert result.problem == problem
    assert output(runner, "1") == "1\n"


def test_a_program_that_waits_is_ended():
    """Whatever it does with signals and with its output."""
    codes = (
        "import time\ntime.sleep(100)",
        "import os\nos.close(1); os.close(2)\nimport time\ntime.sleep(100)",
        "import time, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\ntime.sleep(100)",
    )
    runner = CodeRunner(CodeLimits(time_s=1.0), at_once=3)
    try:
        assert [result.problem for result in run(runner, *codes)] == ["time"] * 3
    finally:
        runner.close()


def test_the_output_is_cut(runner):
    (result,) = run(runner, "print('é' * 1000)")
    assert (result.output, result.left_out, result.problem) == ("é" * 400, 601, "")


def test_a_program_that_is_too_long_is_not_run(runner):
    (result,) = run(runner, "#" * (MAX_CODE + 1))
    assert (result.output, result.problem) == ("", "size")


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(200 << 20)",
        "x = [0] * 10**9",
        "x = []\nwhile True: x.append('y' * 10**6)",
        "x = 10 ** 10 ** 10",
        "import mmap\nmmap.mmap(-1, 200 << 20)",
    ],
)
def test_memory_is_limited(runner, code):
    (result,) = run(runner, code)
    assert (
        result.problem in ("cpu", "SIGKILL", "SIGSEGV") or "MemoryError" in result.output or "memory" in result.output
    )


def test_with_namespaces_files_live_in_an_empty_directory_of_limited_size(closed_in):
    assert output(closed_in, "import os\nprint(os.getcwd(), os.listdir('.'))") == "/program []\n"
    assert output(closed_in, "open('a', 'w').write('x')\nprint(open('a').read())") == "x\n"
    assert output(closed_in, "import os\nprint(os.listdir('.'))") == "[]\n", "a file of an earlier program is left"
    assert output(closed_in, "import tempfile\nprint(tempfile.TemporaryFile('w+').write('x'))") == "1\n"
    table = "import sqlite3\nc = sqlite3.connect('t.db')\nprint(c.execute('create table t(x)').fetchall())"
    assert output(closed_in, table) == "[]\n", "a database cannot lock its file"
    fill = (
        "import os\nn = 0\ntry:\n    while True:\n        {}\n        n += 1\nexcept OSError as e: print(n, e.strerror)"
    )
    assert output(closed_in, fill.format("open(str(n), 'w').close()")) == "16 No space left on device\n"
    many = fill.format("open(str(n), 'wb').write(b'x' * (1 << 20))")
    assert output(closed_in, many) == "4 No space left on device\n"
    one = "f = open('a', 'wb')\ntry:\n    while True: f.write(b'x' * (1 << 20))\nexcept OSError as e: print(e.strerror)"
    assert output(closed_in, one) in ("No space left on device\n", "File too large\n")


def test_packages_are_available_if_they_are_named():
    runner = CodeRunner(CodeLimits(memory_mb=512), modules=["numpy"])
    try:
        assert (
            output(runner, "import numpy as np\nprint(np.arange(4).sum(), np.linalg.inv(np.eye(2))[0, 0])") == "6 1.0\n"
        )
        code = "import numpy as np\nprint(np.random.rand())"
        assert output(runner, code) == output(runner, code)
    finally:
        runner.close()


def test_packages_are_hidden_unless_modules_need_them(tmp_path):
    system, library = tmp_path / "lib", tmp_path / "python3.11"
    for path in (system / "python3" / "dist-packages", library / "site-packages", library / "json", tmp_path / "other"):
        path.mkdir(parents=True)
    (library / "more-packages").symlink_to(tmp_path / "other")
    directories = [str(system), str(library), str(tmp_path / "none")]
    packages = [str(system / "python3" / "dist-packages"), str(library / "site-packages")]
    assert code_runner._hidden(directories, []) == packages
    assert code_runner._hidden(directories, packages[1:]) == packages[:1]


def test_a_module_that_there_is_not_is_refused():
    with pytest.raises(UserError, match="isolation=landlock: No module named 'no_such_module'"):
        CodeRunner(kind="landlock", modules=["no_such_module"]).start()


def test_a_server_that_does_not_start_in_time_is_ended(monkeypatch):
    monkeypatch.setattr(code_runner, "_START_S", 0.0)
    runner = CodeRunner(modules=["numpy"])
    with pytest.raises(UserError, match=r"its server did not start within 0 s, with the imports of \['numpy'\]"):
        runner.start()
    assert runner._server is None


def test_an_unknown_isolation_is_refused():
    with pytest.raises(UserError, match="isolation=hope: choose namespaces or landlock"):
        CodeRunner(kind="hope")


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"cpu_s": 0.5}, "cpu_s=0.5: give a whole number above 0"),
        ({"files": 0}, "files=0: give a whole number above 0"),
        ({"output": True}, "output=True: give a whole number above 0"),
        ({"memory_mb": "512"}, "memory_mb='512': give a whole number above 0"),
        ({"time_s": float("nan")}, "time_s=nan: give a number above 0"),
    ],
)
def test_a_limit_that_is_none_is_refused(limits, said):
    with pytest.raises(UserError, match=f"^{said}$"):
        CodeLimits(**limits)


@pytest.mark.parametrize("kind", ISOLATIONS)
def test_where_an_empty_program_fails_the_start_is_refused(kind):
    runner = CodeRunner(CodeLimits(cpu_s=1 << 70), kind)
    with pytest.raises(UserError, match=f"isolation={kind}: an empty program failed: .* closed in: OverflowError"):
        runner.start()


def test_a_program_that_cannot_be_closed_in_has_failed_and_printed_nothing(runner):
    runner = CodeRunner(LIMITS, runner._settings["isolation"])

    async def failed() -> None:
        assert (await runner.run("1")).output == "1\n"
        assert runner._server is not None
        (server,) = psutil.Process(runner._server.pid).children()
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (32, 32))  # less than a program gets
        with pytest.raises(RuntimeError, match="a program could not be closed in: ValueError: not allowed to raise"):
            await runner.run("1")

    try:
        asyncio.run(failed())
    finally:
        runner.close()


def test_a_server_that_was_killed_is_replaced_and_what_ran_has_failed():
    runner = CodeRunner(LIMITS)

    async def lost() -> None:
        waiting = asyncio.create_task(runner.run("import time\ntime.sleep(60)"))
        while not runner._awaited or not runner._awaited[0].begun.is_set():
            await asyncio.sleep(0.01)
        assert runner._server is not None
        os.kill(runner._server.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="has ended"):
            await waiting
        assert (await runner.run("1")).output == "1\n"

    try:
        asyncio.run(lost())
    finally:
        runner.close()


def test_programs_that_nobody_waits_for_end_or_never_begin():
    """The time in which they wait for others does not count."""
    runner = CodeRunner(CodeLimits(cpu_s=3600, time_s=3600.0), at_once=1)

    async def call(limit_s: float | None) -> None:
        async with CallClock(limit_s, lambda: None):
            await runner.run("while True: pass")

    async def abandoned() -> str:
        waiting = [asyncio.create_task(call(None))]
        while not runner._awaited or not runner._awaited[0].begun.is_set():
            await asyncio.sleep(0.01)
        waiting += [asyncio.create_task(call(0.1)) for _ in range(8)]
        ended, _ = await asyncio.wait(waiting, timeout=0.5)
        assert not ended and sum(program.begun.is_set() for program in runner._awaited.values()) == 1
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert not runner._awaited
        return (await asyncio.wait_for(runner.run("1"), 60)).output

    try:
        assert asyncio.run(abandoned()) == "1\n"
    finally:
        runner.close()


def test_a_server_that_waits_until_its_answer_is_read_gets_the_next_programs():
    """Both pipes are full."""
    runner = CodeRunner(CodeLimits(output=500_000), at_once=1)

    async def together() -> list[str]:
        first = asyncio.create_task(runner.run("print('é' * 400_000)"))
        while not runner._awaited or not runner._awaited[0].begun.is_set():
            await asyncio.sleep(0.01)
        assert runner._server is not None and runner._server.stdout is not None
        answers = select.poll()
        answers.register(runner._server.stdout, select.POLLIN)
        answers.poll()  # the server writes, and nobody reads
        long = f"print(1)  # {'x' * (MAX_CODE - 100)}"
        return [one.output for one in await asyncio.gather(first, runner.run(long), runner.run(long))]

    try:
        assert asyncio.run(together()) == ["é" * 400_000 + "\n", "1\n", "1\n"]
    finally:
        runner.close()


def test_a_program_that_a_stopped_server_does_not_begin_has_failed(monkeypatch):
    """Although the wait does not count as time of the call."""
    runner = CodeRunner(CodeLimits(time_s=5.0), at_once=1)

    async def call() -> None:
        async with CallClock(3600.0, lambda: None):
            await runner.run("1")

    try:
        runner.start()
        assert runner._server is not None
        (server,) = psutil.Process(runner._server.pid).children()
        server.suspend()
        monkeypatch.setattr(code_runner, "_SPARE_S", -9.0)  # two rounds of five seconds before
        monkeypatch.setattr(code_runner, "_OVERHEAD_S", 0.0)
        with pytest.raises(RuntimeError, match=r"has not begun a program within 1 s"):
            asyncio.run(call())
    finally:
        runner.close()


def test_nothing_runs_on_after_the_server(runner):
    """The end of the server is the end of all its processes, also if it is killed."""
    runner = CodeRunner(LIMITS, runner._settings["isolation"])

    async def started() -> list[psutil.Process]:
        running = asyncio.create_task(runner.run("import time\ntime.sleep(60)"))
        while not runner._awaited or not runner._awaited[0].begun.is_set():
            await asyncio.sleep(0.01)
        server = psutil.Process(runner._server.pid)
        while len(children := server.children(recursive=True)) < 2:
            await asyncio.sleep(0.02)
        assert not running.done()
        return [server, *children]

    processes = asyncio.run(started())
    assert len(processes) == 3
    runner.close()
    end = time.monotonic() + 120
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
