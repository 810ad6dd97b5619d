"""One job to a directory."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

from tests.support.buckets import make_bucket, use_s3
from tests.support.jobs import wait_until
from tests.support.odd_files import ODD_JSON
from trainer.checkpoint.lock import RunLock
from trainer.errors import UserError
from trainer.process import time_limits


def test_two_jobs_cannot_have_one_run_directory(tmp_path):
    with RunLock(str(tmp_path), 60) as first:
        assert first.acquire() is None
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
            RunLock(str(tmp_path), 60).acquire()
        first.check()
    with RunLock(str(tmp_path), 60) as second:
        assert second.acquire() is None


def test_the_lock_of_a_dead_process_is_taken_over_immediately(tmp_path):
    child = os.fork()
    if child == 0:
        RunLock(str(tmp_path), 60).acquire()
        os._exit(0)
    os.waitpid(child, 0)
    with RunLock(str(tmp_path), 60) as lock:
        assert f"process {child} is gone" in lock.acquire()
        lock.check()


def test_a_waiting_job_recreates_a_directory_that_its_owner_removes(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    first, second = RunLock(str(run), 60), RunLock(str(run), 60)
    first.acquire()
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(second.acquire(wait=True)))
    waiting.start()
    while waiting.is_alive():  # at whatever moment the directory goes
        shutil.rmtree(run, ignore_errors=True)
        time.sleep(0.001)
    assert taken == [None]
    first.release()
    second.release()


def test_a_job_that_waits_for_another_says_so_once(tmp_path, caplog):
    with RunLock(str(tmp_path), 60) as first, RunLock(str(tmp_path), 60) as second:
        first.acquire()
        waiting = threading.Thread(target=second.acquire, args=(True,))
        waiting.start()
        wait_until(lambda: caplog.messages)
        time.sleep(0.5)  # several looks
        first.release()
        waiting.join()
        second.check()
    (message,) = caplog.messages
    assert f"{tmp_path}: in use by process {os.getpid()}" in message and "waiting for the end of that job" in message


def foreign_lock(directory: Path, **fields) -> Path:
    """The lock of a process that this machine cannot see."""
    owner = {"token": "x", "host": "elsewhere", "machine": "another", "pid": 1, "started": "1", "since": "then"}
    path = directory / ".lock"
    path.write_text(json.dumps(owner | fields))
    return path


@pytest.mark.parametrize("skew_s", [0, 3600, -3600])
def test_the_lock_of_another_machine_is_judged_by_its_heartbeat_and_not_by_its_clock(tmp_path, skew_s):
    path = foreign_lock(tmp_path)
    dated = time.time() + skew_s
    os.utime(path, (dated, dated))
    dead = threading.Event()

    def beat() -> None:
        while not dead.wait(0.1):
            now = time.time() + skew_s
            os.utime(path, (now, now))

    beating = threading.Thread(target=beat)
    beating.start()
    with pytest.raises(UserError, match="in use by process 1 on elsewhere"):
        RunLock(str(tmp_path), 30).acquire()
    dead.set()
    beating.join()
    with RunLock(str(tmp_path), 0.5) as lock:
        assert "took over the run directory from process 1 on elsewhere" in lock.acquire()
        lock.check()


def test_the_lock_of_a_dead_process_with_a_reused_id_is_taken_over_immediately(tmp_path):
    with RunLock(str(tmp_path), 60) as first:
        first.acquire()
        owner = json.loads(Path(first.path).read_text())
    path = foreign_lock(tmp_path, machine=owner["machine"], pid=os.getpid(), started="1")
    with RunLock(str(tmp_path), 1e6) as lock:
        assert f"its process {os.getpid()} is gone" in lock.acquire()
        lock.check()
    assert not path.exists() and os.listdir(tmp_path) == []


def test_a_damaged_lock_without_heartbeat_is_taken_over(tmp_path):
    (tmp_path / ".lock").write_text("torn")
    with RunLock(str(tmp_path), 0.5) as lock:
        assert "took over" in lock.acquire()


def test_a_lost_lock_is_not_released(tmp_path):
    with RunLock(str(tmp_path), 60) as lock:
        lock.acquire()
        other = {**json.loads((tmp_path / ".lock").read_text()), "token": "another job"}
        (tmp_path / ".lock").write_text(json.dumps(other))
        with pytest.raises(UserError, match="lost"):
            lock.check()
    assert json.loads((tmp_path / ".lock").read_text()) == other
    (tmp_path / ".lock").unlink()
    with RunLock(str(tmp_path), 60) as lock:
        lock.acquire()
    assert not (tmp_path / ".lock").exists()


def test_a_disk_that_hangs_does_not_hold_up_the_end_of_a_job(tmp_path, monkeypatch, caplog):
    """Another process holds a lock of the file system and never releases it, so `release` would wait for ever."""
    monkeypatch.setattr(time_limits, "LOCK_RELEASE_S", 0.2)
    lock = RunLock(str(tmp_path), 60)
    lock.acquire()
    with open(f"{lock.path}.guard", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        lock.release()
    assert caplog.messages == [
        f"{lock.path}: the run directory is still locked by this job (the storage has not answered for 0.2 s); another "
        "job can take it when this process has ended, on another machine 60 s after that"
    ]
    wait_until(lambda: not os.path.exists(lock.path))  # the disk answers again


def test_a_release_that_fails_in_any_way_is_reported_and_does_not_hide_how_the_job_ends(tmp_path, caplog):
    """The lock is larger than the memory that this process may have, so reading it raises MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    lock = RunLock(str(tmp_path), 60)
    try:
        with pytest.raises(ZeroDivisionError), lock:
            lock.acquire()
            os.truncate(lock.path, 64 << 30)
            resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 30), before[1]))
            raise ZeroDivisionError
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        os.truncate(lock.path, 0)
    (told,) = caplog.messages
    assert f"{lock.path}: the run directory is still locked by this job (MemoryError" in told


def test_a_disk_that_fails_at_the_release_is_reported(tmp_path, caplog):
    lock = RunLock(str(tmp_path), 60)
    lock.acquire()
    os.remove(f"{lock.path}.guard")
    os.mkdir(f"{lock.path}.guard")
    lock.release()
    (told,) = caplog.messages
    assert "still locked by this job (IsADirectoryError" in told


def functions_of(thread: threading.Thread) -> list[str]:
    """The functions that a thread is in."""
    return [frame.name for frame in traceback.extract_stack(sys._current_frames()[thread.ident])]


def test_a_store_that_hangs_at_a_heartbeat_does_not_hold_up_the_end_of_a_job(tmp_path, monkeypatch, caplog):
    code = (
        "import signal\n"
        "from tests.support.buckets import s3_server\n"
        "with s3_server() as url:\n"
        "    print(url, flush=True)\n"
        "    signal.pause()"
    )
    store = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        use_s3(monkeypatch, store.stdout.readline().strip())
        lock = RunLock(make_bucket("runs"), 0.6)
        lock.acquire()
        store.send_signal(signal.SIGSTOP)
        wait_until(lambda: "_renew" in functions_of(lock._thread))
        monkeypatch.setattr(time_limits, "LOCK_RELEASE_S", 0.5)
        lock.release()
    finally:
        store.kill()
        store.communicate()
    assert "s3://runs/.lock: the run directory is still locked by this job" in caplog.text


def test_a_held_lock_has_a_heartbeat(tmp_path):
    with RunLock(str(tmp_path), lease_s=0.6) as lock:
        lock.acquire()
        first = os.stat(tmp_path / ".lock").st_mtime_ns
        deadline = time.monotonic() + 60
        while os.stat(tmp_path / ".lock").st_mtime_ns == first:
            assert time.monotonic() < deadline, "no heartbeat came"
            time.sleep(0.05)


def test_a_heartbeat_finds_that_the_lock_is_another_s_and_does_not_keep_it_alive(tmp_path):
    with RunLock(str(tmp_path), lease_s=0.6, trusts_heartbeat=True) as lock:
        lock.acquire()
        lock.check()
        other = tmp_path / "other"  # replaced by one rename, as the other job does
        other.write_text(json.dumps({**json.loads((tmp_path / ".lock").read_text()), "token": "x", "pid": 7}))
        os.utime(other, (1e9, 1e9))
        os.replace(other, tmp_path / ".lock")

        def is_lost() -> bool:
            try:
                lock.check()
            except UserError as error:
                assert "lost the run directory to process 7" in str(error)
                return True
            return False

        wait_until(is_lost)
        assert os.stat(tmp_path / ".lock").st_mtime == 1e9


def test_a_heartbeat_does_not_touch_a_lock_that_is_taken_after_it_has_read_it(tmp_path):
    with RunLock(str(tmp_path), lease_s=60) as lock:
        lock.acquire()
        seen = lock._fetch()
        lock._fetch = lambda: seen  # what it has read. Then another job takes the lock
        assert lock._storage.put_if(".lock", json.dumps({"token": "x"}).encode(), seen[1])
        os.utime(tmp_path / ".lock", (1e9, 1e9))
        lock._renew()
        assert os.stat(tmp_path / ".lock").st_mtime == 1e9


def test_a_heartbeat_outlives_a_moment_without_its_lock_file(tmp_path):
    with RunLock(str(tmp_path), lease_s=0.6) as lock:
        lock.acquire()
        owner = (tmp_path / ".lock").read_text()
        (tmp_path / ".lock").unlink()
        time.sleep(0.3)  # beats without the file
        (tmp_path / "again").write_text(owner)
        os.utime(tmp_path / "again", (1e9, 1e9))
        os.replace(tmp_path / "again", tmp_path / ".lock")  # a beat must not read half of it
        wait_until(lambda: os.stat(tmp_path / ".lock").st_mtime > 1e9)
        lock.check()


HOLDS = """
import sys, time
from trainer.checkpoint.lock import RunLock
with RunLock(sys.argv[1], 3) as lock:
    lock.acquire()
    print("held", flush=True)
    time.sleep(600)
"""


def test_an_owner_in_another_time_namespace_does_not_count_as_dead(tmp_path):
    """In a time namespace, every process seems to have started at another time."""
    command = ["unshare", "--time", "--boottime", "100000", "--fork", "--kill-child", sys.executable, "-c", HOLDS]
    holder = subprocess.Popen([*command, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        if holder.stdout.readline() != "held\n":
            pytest.skip(f"no time namespace here: {holder.stderr.read().strip()}")
        with pytest.raises(UserError, match="in use by process"):
            RunLock(str(tmp_path), 30).acquire()
    finally:
        holder.kill()
        holder.wait()


def test_a_lock_that_is_garbage_is_taken_over_when_it_is_old(tmp_path):
    """No process renews it."""
    for content in ODD_JSON:
        lock = RunLock(str(tmp_path), 0.1)
        Path(lock.path).write_bytes(content)
        assert "took over the run directory from an unknown process" in lock.acquire(), content[:20]
        lock.release()
