"""What of a running job another machine can reach: tried from a network namespace of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

import pytest

from tests.cpu.jobs.test_closed_jobs import BASE, reach
from tests.support.jobs import command, environment, family, kill_all, left_running
from tests.support.namespaces import TwoNetworks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCAN = """
import errno, json, select, socket, sys
found = []
for host in sys.argv[1:]:
    for first in range(1, 65536, 500):
        tries = {}
        for port in range(first, min(first + 500, 65536)):
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            end = socket.socket(family, socket.SOCK_STREAM)
            end.setblocking(False)
            if end.connect_ex(address) == errno.EINPROGRESS:
                tries[end.fileno()] = end, port
            else:
                end.close()
        poll = select.epoll()
        for number in tries:
            poll.register(number, select.EPOLLOUT)
        while tries and (events := poll.poll(5)):
            for number, _ in events:
                end, port = tries.pop(number)
                poll.unregister(number)
                if end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    found.append([host, port])
                end.close()
        found += [[host, f"{port}: no answer"] for _, port in tries.values()]
print(json.dumps(found))
"""
LISTENS = """
import socket, time
server = socket.create_server(("::", 4711), family=socket.AF_INET6, dualstack_ipv6=True)
time.sleep(600)
"""


def scan(networks: TwoNetworks) -> list[list]:
    """TCP ports that answer a stranger, over both protocols."""
    listed = subprocess.run(networks.inside("ip", "-json", "address", "show", "inside"), capture_output=True, text=True)
    link_local = next(a["local"] for a in json.loads(listed.stdout)[0]["addr_info"] if a["family"] == "inet6")
    hosts = [networks.INSIDE, f"{link_local}%outside"]
    done = subprocess.run(networks.outside(sys.executable, "-c", SCAN, *hosts), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BROADCAST = ["trainer.num_workers=2", "rollout=vllm", "rollout.weight_sync=broadcast"]


def test_no_port_of_a_job_answers_another_machine(tmp_path, marker):
    """With everything that can listen: Ray, the process group of the ranks, and the broadcast of the weights."""
    with TwoNetworks() as networks:
        job = subprocess.Popen(
            networks.inside(*command(*BASE, *BROADCAST)), cwd=tmp_path, text=True, env=environment(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        control = subprocess.Popen(networks.inside(sys.executable, "-c", LISTENS))
        output = ""
        try:
            output = reach(job, "step 1/500")
            found = scan(networks)
            assert {port for _, port in found} == {4711} and len(found) == 2, "the test's own port, over IPv4 and IPv6"
        finally:
            control.kill()
            control.wait()
            job.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                output += job.communicate(timeout=300)[0]
            if job.poll() is None:
                kill_all(family(job.pid))
        assert job.returncode == 75, output
    assert left_running(marker) == []
