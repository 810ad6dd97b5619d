"""The process that forks workers: their environment, their messages, and the end of all of them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

from tests.cpu.unit.cluster.hosted import FailsToLoad, Host
from tests.support.jobs import left_running, wait_until
from trainer.cluster.fork_server import BUILD, ForkServer
from trainer.cluster.supervisor import is_running
from trainer.process import time_limits


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(["tests.cpu.unit.cluster.hosted"]) as server:
        yield server


def ended(*pids: int) -> bool:
    return not any(psutil.pid_exists(pid) and is_running(psutil.Process(pid)) for pid in pids)


def host(server: ForkServer, name: str, factory: Any = Host, env: dict[str, str] | None = None) -> Connection:
    """Start a worker that hosts `factory()`."""
    connection = server.start(name, env or {})
    connection.send({"gpus": []})
    connection.send_bytes(pickle.dumps((factory, ())))
    return connection


def call(connection: Connection, method: str, *args: Any, channel: str = "call", number: int = 1) -> Any:
    connection.send((number, channel, pickle.dumps((method, args, {}))))
    answered, has_failed, payload = connection.recv()
    assert answered == number
    return pickle.loads(payload)[0] if has_failed else pickle.loads(payload)


def both(connection: Connection) -> list[tuple[int, bool, bytes]]:
    """Return two answers, which come in any order."""
    return [connection.recv(), connection.recv()]


def test_a_worker_has_the_environment_and_directory_at_its_start(server, monkeypatch, tmp_path):
    """The fork server may have started earlier."""
    monkeypatch.setenv("WORD", "of now")
    monkeypatch.chdir(tmp_path)
    with host(server, "one", env={"OTHER": "own"}) as connection:
        assert call(connection, "environment", "WORD") == "of now"
        assert call(connection, "environment", "OTHER") == "own"
        assert os.readlink(f"/proc/{call(connection, 'pid')}/cwd") == str(tmp_path)


def test_a_fork_server_has_ended_before_and_after_it_is_waited_for():
    with ForkServer(["tests.cpu.unit.cluster.hosted"]) as server:
        with host(server, "one") as connection:
            pid = call(connection, "parent")
            assert server.is_running
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not server.is_running)
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # to ask did not wait for it
    assert not psutil.pid_exists(pid) and not server.is_running


def test_a_worker_imports_from_where_the_driver_imports_at_its_start(server, monkeypatch, tmp_path):
    """The driver adds the directory of a user's file when it imports it."""
    monkeypatch.syspath_prepend(tmp_path)
    with host(server, "one") as connection:
        assert call(connection, "import_path") == sys.path


def test_heartbeats_are_answered_during_a_call_and_say_that_the_object_is_built(server):
    with host(server, "one") as connection:
        pid = call(connection, "pid")
        connection.send((2, "call", pickle.dumps(("wait_for_open", (), {}))))
        assert call(connection, "heartbeat", channel="heartbeat", number=3) == (pid, "127.0.0.1", True)
        assert call(connection, "placements", channel="heartbeat", number=4) == {"gpus": []}
        connection.send((5, "background", pickle.dumps(("open", (), {}))))
        answers = {number: (has_failed, pickle.loads(payload)) for number, has_failed, payload in both(connection)}
        assert answers == {2: (False, True), 5: (False, None)}


def test_an_object_that_cannot_be_built_is_reported_and_ends_the_worker(server):
    with host(server, "one", FailsToLoad) as connection:
        number, has_failed, payload = connection.recv()
        error, trace = pickle.loads(payload)
        assert (number, has_failed, str(error)) == (BUILD, True, "cannot load") and "FailsToLoad" not in str(error)
        assert "ValueError: cannot load" in trace
        with pytest.raises(EOFError):
            connection.recv()


def test_an_error_that_cannot_be_unpickled_becomes_one_with_its_text(server):
    with host(server, "one") as connection:
        error = call(connection, "raise_odd_error")
        assert type(error) is RuntimeError and str(error) == "OddError: 1 and 2"


def test_a_worker_ends_when_its_driver_closes_the_connection(server):
    connection = host(server, "one")
    pid = call(connection, "pid")
    connection.close()
    wait_until(lambda: ended(pid))
    server.end("one")  # it has ended already
    server.end("no such worker")


def test_the_end_of_a_worker_takes_its_processes_along_and_no_other_worker(server):
    with host(server, "one") as first, host(server, "two") as second:
        pids = [call(first, "pid"), call(first, "child")]
        server.end("one")
        assert ended(*pids) and call(second, "echo", 3) == ((3,), {})
        server.end("two")


def test_closing_ends_all_workers():
    server = ForkServer()
    with host(server, "one") as connection:
        pids = [call(connection, "pid"), call(connection, "child")]
        assert server.is_running
        server.close()
        assert ended(*pids) and not server.is_running


ENDLESS = "tests.cpu.unit.cluster.endless"


def test_closing_ends_imports_that_last(tmp_path, monkeypatch):
    monkeypatch.setattr(time_limits, "PROCESS_EXIT_S", 3600)
    with ForkServer([ENDLESS], {"IMPORTING": f"{tmp_path}/begun"}) as server:
        wait_until((tmp_path / "begun").exists)
    assert not server.is_running


def test_a_driver_that_dies_while_modules_are_imported_leaves_no_process(tmp_path, marker):
    code = (
        "import time\n"
        "from trainer.cluster.fork_server import ForkServer\n"
        f"server = ForkServer(['{ENDLESS}'], {{'IMPORTING': '{tmp_path}/begun'}})\n"
        "time.sleep(600)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code])
    wait_until((tmp_path / "begun").exists)
    driver.kill()
    driver.wait()
    wait_until(lambda: left_running(marker) == [])


DRIVER = """
import os, signal, sys
from tests.cpu.unit.cluster.hosted import Host
from tests.support.inheriting_fork_server import InheritingForkServer
from trainer.cluster.fork_server import ForkServer
from trainer.cluster.process_cluster import ProcessCluster
from trainer.config import Config
with globals()[sys.argv[1]]() as server:
    with ProcessCluster(Config(), "cpu", server) as cluster:
        group = cluster.launch_ranks("rank", Host, {})
        print(os.getpgid(group.call("pid")[0]) == os.getpgid(0), group.call("child")[0], flush=True)
        group.call("waits")
"""


@pytest.mark.parametrize("kind", ["ForkServer", "InheritingForkServer"])
def test_the_death_of_the_driver_leaves_no_process(kind, marker):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, kind], stdout=subprocess.PIPE, text=True)
    shares_process_group, child = driver.stdout.readline().split()
    assert shares_process_group == str(kind == "InheritingForkServer")
    driver.kill()
    driver.wait()
    wait_until(lambda: left_running(marker) == [] and ended(int(child)))
