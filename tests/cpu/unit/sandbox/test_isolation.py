"""Attempts to escape: code of the policy that tries to reach what is not its own."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.sandbox import isolation
from trainer.sandbox.code_runner import ISOLATIONS, CodeLimits, CodeRunner

TRY = """
import os, sys
def attempt():
{}
try:
    print('escaped:', attempt())
except BaseException as error:
    print('refused:', type(error).__name__)
"""


@pytest.fixture(scope="module", params=ISOLATIONS)
def runner(request) -> Iterator[CodeRunner]:
    os.environ["SECRET_OF_THE_JOB"] = "hunter2"
    runner = CodeRunner(CodeLimits(cpu_s=2, time_s=100.0), request.param)
    runner.start()
    yield runner
    del os.environ["SECRET_OF_THE_JOB"]
    runner.close()


def attempt(runner: CodeRunner, body: str) -> str:
    """What an attempt gives: what it returns, or the kind of its error."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    result = asyncio.run(runner.run(TRY.format(lines)))
    return result.problem or result.output.strip()


def call(number: int, *arguments: str) -> str:
    """Code that makes a system call by its number on x86-64, past Python's own functions."""
    return (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"r = libc.syscall({', '.join([str(number), *arguments])})\n"
        "if r < 0: raise OSError(ctypes.get_errno(), 'no')\nreturn r"
    )


NETWORK = [
    "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)",
    "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "import socket\nsocket.socket(socket.AF_INET6)",
    "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0trainer-test')",
    "import socket\nsocket.socketpair()",
    "import socket\nreturn socket.getaddrinfo('example.com', 80)",
    "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}')",
    "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    call(41, "2", "1", "0"),  # socket
    call(425, "8", "None"),  # io_uring_setup
]


@pytest.mark.parametrize("body", NETWORK)
def test_there_is_no_network(runner, body):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0trainer-test")
        abstract.listen()
        server.settimeout(0.1)
        abstract.settimeout(0.1)
        said = attempt(runner, body.replace("{port}", str(server.getsockname()[1])))
        assert said.startswith("refused: "), said
        for listening in (server, abstract):
            with pytest.raises(TimeoutError):
                listening.accept()


READING = [
    "return open({path!r}).read()",
    "return os.listdir({directory!r})",
    "return open('/proc/self/environ').read()",
    "return open('/proc/{parent}/environ').read()",
    "return open('/proc/{parent}/mem', 'rb').read(1)",
    "return os.listdir('/proc')",
    "return os.listdir('/home')",
    "return os.listdir(os.path.expanduser('~'))",
    "return open('/etc/passwd').read()",
    "return open('/dev/mem', 'rb').read(1)",
    "return os.listdir('/tmp')",
    "return os.listdir('/dev/shm')",
    "os.symlink({path!r}, 'link')\nreturn open('link').read()",
    "os.link({path!r}, 'link')\nreturn open('link').read()",
    "return open('../../../../../..' + {path!r}).read()",
    "os.chroot('.')",
    "os.mkdir('x'); os.chroot('x'); os.chdir('../../../..')\nreturn os.listdir('.')",
    "fds = [os.readlink(f'/proc/self/fd/{{i}}') for i in range(3, 9)]\nreturn fds",
    "return [os.read(i, 100) for i in range(3, 64)]",
    "return os.environ['SECRET_OF_THE_JOB']",
    "import ctypes\nctypes.CDLL(None).open_by_handle_at.restype\nreturn open('/proc/1/environ').read()",
]


@pytest.mark.parametrize("body", READING)
def test_nothing_of_the_job_can_be_read(runner, body, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    said = attempt(runner, body.format(path=str(secret), directory=str(tmp_path), parent=os.getpid()))
    assert said.startswith("refused: "), said
    assert "hunter2" not in said


def test_packages_of_the_interpreter_cannot_be_read(runner):
    hidden = runner._settings["hidden"]
    files = [os.path.join(root, name) for path in hidden for root, _, names in os.walk(path) for name in names]
    for path in files[:3]:
        assert attempt(runner, f"return open({path!r}).read()").startswith("refused: ")


@pytest.mark.parametrize("kind", ISOLATIONS)
def test_what_is_hidden_within_a_library_cannot_be_read(kind, tmp_path):
    library = tmp_path / "lib"
    (library / "parts").mkdir(parents=True)
    (library / "site-packages").mkdir()
    for path in ("plain.py", "parts/other.py", "site-packages/secret.py", "../outside.py"):
        (library / path).write_text("found = 'hunter2'")
    (library / "link.py").symlink_to(tmp_path / "outside.py")
    runner = CodeRunner(CodeLimits(time_s=100.0), kind)
    runner._settings["directories"].append(str(library))
    runner._settings["hidden"].append(str(library / "site-packages"))
    try:
        for path in ("site-packages/secret.py", "link.py", "../outside.py"):
            assert attempt(runner, f"return open({str(library / path)!r}).read()").startswith("refused: "), path
        body = f"sys.path.append({str(library / 'site-packages')!r})\nimport secret\nreturn secret.found"
        assert attempt(runner, body).startswith("refused: ")
        body = f"sys.path += [{str(library)!r}, {str(library / 'parts')!r}]\nimport plain, other\nreturn other.found"
        assert attempt(runner, body) == "escaped: hunter2"
    finally:
        runner.close()


def test_other_programs_cannot_be_seen(runner):
    """Neither those that run, nor those that wait: not in memory, and not in the list of processes."""

    async def together() -> list[str]:
        spy = (
            "import gc\nmark = str(4700 + 11)\n"
            "print([type(o) for o in gc.get_objects() if o is not globals() and mark in repr(o)])"
        )
        slow = "import time\nprint(4711, flush=True)\ntime.sleep(1)"
        runs = [runner.run(code) for code in (*[slow] * 4, spy, *[slow] * 4)]
        return [result.output for result in await asyncio.gather(*runs)]

    assert asyncio.run(together())[4] == "[]\n"


WRITING = [
    "open({path!r}, 'w').write('x')",
    "open({path!r}, 'a').write('x')",
    "os.remove({path!r})",
    "os.rename({path!r}, {path!r} + '2')",
    "os.truncate({path!r}, 0)",
    "os.symlink({path!r}, 'link')\nopen('link', 'w').write('x')",
    "os.mkdir({directory!r} + '/x')",
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


@pytest.mark.parametrize("body", WRITING)
def test_nothing_outside_can_be_written(runner, body, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    said = attempt(runner, body.format(path=str(secret), directory=str(tmp_path)))
    assert said.startswith("refused: "), said
    assert secret.read_text() == "hunter2" and [*tmp_path.iterdir()] == [secret]
    assert not Path("/x").exists() and not Path("/tmp/x").exists() and os.path.getsize(os.__file__) > 1000


PROCESSES = [
    "os.fork()",
    "while True: os.fork()",
    "import subprocess\nreturn subprocess.run(['/bin/ls'])",
    "os.execv('/bin/sh', ['sh'])",
    "return os.posix_spawn('/bin/sh', ['sh'], {{}})",
    "import threading\nthreading.Thread(target=print).start()",
    "import multiprocessing\nmultiprocessing.get_context('fork').Process(target=print).start()",
    "os.setsid()\nif os.fork(): os._exit(0)",
    "os.kill(-1, 9)",
    "os.kill(1, 9)",
    "os.kill(0, 9)",
    "os.kill({parent}, 9)",
    "os.kill(os.getppid(), 9)",
    "os.killpg(0, 9)",
    call(56, "17", "0", "0", "0", "0"),  # clone
    call(58),  # vfork
    call(435, "None", "0"),  # clone3
    call(101, "16", "{parent}", "0", "0"),  # ptrace: attach
    call(310, "{parent}", "None", "0", "None", "0", "0"),  # process_vm_readv
    call(434, "{parent}", "0"),  # pidfd_open
    call(272, "0x10000000"),  # unshare: a namespace in which it would have rights
    call(308, "0", "0"),  # setns
    call(165, "b'x'", "b'/'", "b'tmpfs'", "0", "None"),  # mount
    call(166, "b'/work'", "2"),  # umount2
    call(155, "b'.'", "b'.'"),  # pivot_root
    call(105, "0"),  # setuid
    call(317, "1", "0", "None"),  # seccomp
    call(157, "4", "1"),  # prctl
    call(253),  # inotify_init
    call(319, "b'x'", "0"),  # memfd_create
    call(29, "0", "1 << 20", "0o1666"),  # shmget
    call(240, "b'/x'", "0o102", "0o600", "None"),  # mq_open
    call(248, "b'user'", "b'x'", "b'y'", "1", "-3"),  # add_key
    call(321, "0", "None", "0"),  # bpf
    call(298, "None", "0", "-1", "-1", "0"),  # perf_event_open
    call(323, "0"),  # userfaultfd
    call(304, "-1", "None", "0"),  # open_by_handle_at
    "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "r = libc.syscall(0x40000000 | 41, 2, 1, 0)\nassert r >= 0",  # socket, in the numbers of x32
    "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (100, 100))",
    "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "import resource\nreturn resource.prlimit({parent}, resource.RLIMIT_NOFILE)",
    "import resource\nreturn resource.prlimit(os.getppid() or {parent}, resource.RLIMIT_CPU, (1, 1))",
    "import fcntl\nreturn fcntl.fcntl(1, fcntl.F_SETOWN, {parent})",
    "import fcntl\nreturn fcntl.fcntl(1, 15, bytes(8))",  # F_SETOWN_EX
    "import fcntl\nreturn fcntl.fcntl(1, 10, 35)",  # F_SETSIG
    "import fcntl\nreturn fcntl.fcntl(1, fcntl.F_SETFL, os.O_ASYNC)",
    "os.nice(-5)",
    "return [os.dup(0) for _ in range(1000)]",
]  # fmt: skip


@pytest.mark.parametrize("body", PROCESSES)
def test_no_process_can_be_made_reached_or_given_more_rights(runner, body):
    if "{" in body:
        body = body.format(parent=os.getpid())
    said = attempt(runner, body)
    assert said.startswith("refused: ") or said in ("SIGSYS", "SIGKILL"), said
    assert attempt(runner, "return 1") == "escaped: 1", "the server is gone"


@pytest.mark.parametrize("version", [1, 2])
def test_a_landlock_that_lets_files_be_emptied_is_refused(version, monkeypatch):
    monkeypatch.setattr(isolation, "_call", lambda *_: version)  # an older kernel
    with pytest.raises(isolation.IsolationError, match="Linux 6.2 or later, or choose isolation=namespaces"):
        isolation.Landlock([]).enter()


def test_where_namespaces_are_not_allowed_that_is_said(tmp_path):
    """In a user namespace that allows no others, as in many containers."""
    code = (
        "import ctypes, os\nfrom trainer.errors import UserError\n"
        "from trainer.sandbox.code_runner import CodeRunner\n"
        "user = os.geteuid()\n"
        "assert ctypes.CDLL(None).unshare(0x10000000) == 0\n"
        "open('/proc/self/setgroups', 'w').write('deny'); open('/proc/self/uid_map', 'w').write(f'0 {user} 1')\n"
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "try:\n    CodeRunner().start()\nexcept UserError as error:\n    print(error)\n"
        "runner = CodeRunner(kind='landlock')\nrunner.start()\nrunner.close()\nprint('landlock runs')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    refused, other = done.stdout.splitlines()
    assert "isolation=namespaces: this kernel or container allows no namespaces (unshare: " in refused, done.stderr
    assert "or choose isolation=landlock" in refused and other == "landlock runs"
