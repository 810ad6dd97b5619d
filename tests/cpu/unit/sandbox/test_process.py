"""A process of the sandbox: its messages, what it prints, and how it ends. Rewards test it with hostile code."""

from __future__ import annotations

import json
import os
import time
from multiprocessing.connection import Connection

import psutil
import pytest

from trainer.sandbox.process import OutputCapture, ProcessDied, SandboxedProcess, encode, end_all
from trainer.sandbox.worker import send

SERVE = f"{__name__}:echo"


def echo(pipe: Connection, greeting: str, options: dict) -> None:
    """The function that serves in the process: it does what a message says."""
    send(pipe, [greeting, options])
    while True:
        match json.loads(pipe.recv_bytes()):
            case ["print", text]:
                print(text, flush=True)
                send(pipe, "printed")
            case ["raw", text]:
                pipe.send_bytes(text.encode())
            case ["memory"]:
                with open("/proc/self/oom_score_adj") as file:
                    send(pipe, int(file.read()))
            case ["exit", code]:
                os._exit(code)
            case ["daemon"]:
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(1000)
                send(pipe, [child.pid for child in psutil.Process().children()])
            case message:
                send(pipe, message)


@pytest.fixture
def process():
    process = SandboxedProcess(SERVE, ['it\'s "me"', {"n": 1, "all": True}], os.environ)
    assert process.receive() == ['it\'s "me"', {"n": 1, "all": True}]
    yield process
    end_all([process])


def test_messages_go_both_ways(process):
    process.send(encode({"text": "ä", "number": 0.1}))
    assert process.receive() == {"text": "ä", "number": 0.1}
    process.send(encode("x" * 100_000))
    assert process.receive(largest=1 << 20) == "x" * 100_000


def test_a_message_that_is_too_long_means_that_the_process_died(process):
    process.send(encode("x" * 100_000))
    with pytest.raises(ProcessDied):
        process.receive(largest=1 << 16)


@pytest.mark.parametrize("text", ["[" * 60_000, "9" * 5000, "{"])
def test_a_message_that_cannot_be_read_means_that_the_process_died(process, text):
    process.send(encode(["raw", text]))
    with pytest.raises(ProcessDied):
        process.receive()


def test_when_memory_runs_out_the_kernel_takes_user_code_first(process):
    process.send(encode(["memory"]))
    assert process.receive() == 1000
    with open("/proc/self/oom_score_adj") as file:
        assert int(file.read()) < 1000, "the driver is worth more"


def test_the_end_of_a_process_says_how_it_ended(process):
    process.send(encode(["exit", 3]))
    with pytest.raises(ProcessDied):
        process.receive()
    assert process.end(died=True) == "exit status 3"


def test_what_a_process_prints_is_kept_up_to_a_limit(process):
    printed = OutputCapture("echo")
    for text in ("one\x1b", "y" * 5000):
        process.send(encode(["print", text]))
        assert process.receive() == "printed"
        printed.read(process)
    assert printed.last_line().startswith("yyy")
    first, _, rest = printed.take()
    assert first == "[echo] one?"
    assert rest.endswith("more bytes of output are not shown")
    assert printed.take() == []


def test_processes_that_user_code_started_end_with_it(process):
    process.send(encode(["daemon"]))
    (daemon,) = [psutil.Process(pid) for pid in process.receive()]
    process.end()
    psutil.wait_procs([daemon], timeout=120)
    assert not daemon.is_running()


def test_arguments_have_any_length_and_stand_in_no_command_line():
    secret = "sk-" + "of the judge " * 20_000
    process = SandboxedProcess(SERVE, [secret, {"api_key": secret}], os.environ)
    try:
        assert process.receive(largest=1 << 22) == [secret, {"api_key": secret}]
        reaper = psutil.Process(process.process.pid)
        family = [reaper, *reaper.children(recursive=True)]
        assert len(family) == 2 and not any("of the judge" in " ".join(one.cmdline()) for one in family)
        files = [f"/proc/{one.pid}/fd/{name}" for one in family for name in os.listdir(f"/proc/{one.pid}/fd")]
        assert not any("memfd" in os.readlink(file) for file in files), "what user code starts cannot read them"
    finally:
        end_all([process])
