"""File systems of a test's own: commands in a private mount namespace, where the machine permits one."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence

import pytest

_UNSHARE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


@functools.cache
def _refusal() -> str:
    try:
        tried = subprocess.run([*_UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    except FileNotFoundError as error:
        return str(error)
    return tried.stderr.strip() if tried.returncode else ""


def with_mounts(mounts: Sequence[str], command: Sequence[str]) -> list[str]:
    """A command line that runs `command` where the `mounts` (arguments of `mount`) are made, for itself alone."""
    if _refusal():
        pytest.skip(f"no mount namespace here: {_refusal()}")
    script = "".join(f"mount {mount} && " for mount in mounts) + f"exec {shlex.join(command)}"
    return [*_UNSHARE, "sh", "-c", script]


@contextlib.contextmanager
def small_disk(size: str, *options: str) -> Iterator[str]:
    """A file system of this size, such as `1m`, for as long as the block runs. Returns its path, for any process."""
    mount = shlex.join(["-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs", "/mnt"])
    command = with_mounts([mount], ["sh", "-c", "echo mounted && exec cat"])
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "mounted\n"
        yield f"/proc/{holder.pid}/root/mnt"
    finally:
        holder.kill()
        holder.wait()


class TwoNetworks:
    """Two network namespaces with a link between them, for as long as the block runs. They end with their processes."""

    INSIDE, OUTSIDE = "10.213.77.1", "10.213.77.2"

    def __enter__(self) -> TwoNetworks:
        self._holders: list[subprocess.Popen] = []
        try:
            own = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
            inner = self._hold(["unshare", *own, "--net"])
            self._enter = [
                "nsenter",
                f"--target={inner}",
                "--net",
                *(["--user", "--preserve-credentials"] if own else []),
            ]
            outer = self._hold([*self._enter, "unshare", "--net"])
            self._enter_outer = [*self._enter[:1], f"--target={outer}", *self._enter[2:]]
            script = f"ip link add inside type veth peer name outside netns {outer}"
            self._run(self._enter, script, f"ip address add {self.INSIDE}/24 dev inside", "ip link set inside up")
            self._run(self._enter_outer, f"ip address add {self.OUTSIDE}/24 dev outside", "ip link set outside up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def inside(self, *command: str) -> list[str]:
        """A command line that runs `command` in the first of them."""
        return [*self._enter, *command]

    def outside(self, *command: str) -> list[str]:
        """The same for the second."""
        return [*self._enter_outer, *command]

    def _hold(self, prefix: list[str]) -> int:
        """Start a process in a new namespace, with a loopback interface; returns its id."""
        script = "ip link set lo up && echo up && exec sleep 3600"
        holder = subprocess.Popen(
            [*prefix, "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._holders.append(holder)
        if holder.stdout.readline() != "up\n":
            raise OSError(holder.stderr.read().strip())
        return holder.pid

    @staticmethod
    def _run(enter: list[str], *scripts: str) -> None:
        for script in scripts:
            subprocess.run([*enter, *script.split()], check=True, capture_output=True, text=True)
