"""The directory for Ray's sockets, logs and, if shared memory is small, objects."""

from __future__ import annotations

import os
import tempfile

from trainer.errors import UserError
from trainer.files.shared_memory import SHARED_MEMORY

_SOCKET = "trainer-ray-01234567/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_SOCKET_BYTES = 107  # Linux's limit for the path of a socket


def check_tmpdir(object_store: int) -> str:
    """Return the directory for temporary files, after checking that Ray can start there.

    Args:
        object_store: size of Ray's object store in bytes. If neither shared memory nor this directory has that much
            free space, Ray starts anyway, and the job would fail when the first large batch is stored.

    Raises:
        UserError: the directory is not writable, its path is too long for a socket, or the free space is too small.
    """
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "TMPDIR")
    directory = os.environ.get(name, "/tmp")
    remedy = "set RAY_TMPDIR to another directory, for example one in /tmp"
    length = len(os.fsencode(os.path.join(directory, _SOCKET)))
    if length > _SOCKET_BYTES:
        raise UserError(
            f"{name}={directory}: the path is {length - _SOCKET_BYTES} characters too long for Ray's sockets; {remedy}"
        )
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"{name}={directory}: Ray writes its sockets and logs there, and the directory is not writable "
            f"({error.strerror}); {remedy}"
        ) from error
    free = {path: _free_space(path) for path in (SHARED_MEMORY, directory)}
    if max(free.values()) < object_store:
        has = " and ".join(f"{path} has {size / 1e6:.1f} MB free" for path, size in free.items())
        raise UserError(
            f"{name}={directory}: Ray needs {object_store / 1e6:.1f} MB for its objects, but {has}; make "
            f"shared memory larger (in a container: docker run --shm-size=1g), or {remedy}"
        )
    return directory


def _free_space(directory: str) -> int:
    try:
        space = os.statvfs(directory)
    except OSError:
        return 0
    return space.f_bavail * space.f_frsize
