"""The directory in which Ray keeps its sockets, its logs and, if shared memory is small, its objects."""

from __future__ import annotations

import os
import tempfile

from trainer.errors import UserError
from trainer.files.shared_memory import SHARED_MEMORY

_SOCKET = "trainer-ray-01234567/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_SOCKET_BYTES = 107  # what Linux allows for the path of a socket


def temporary_directory(object_store: int) -> str:
    """Return the directory for temporary files, after checking that Ray can start there.

    Args:
        object_store: size of Ray's object store in bytes. If neither shared memory nor this directory has that much
            room, Ray starts all the same, and the job would end when the first large batch is stored.

    Raises:
        UserError: the directory cannot be written, its path is too long for a socket, or there is no room.
    """
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "TMPDIR")
    directory = os.environ.get(name, "/tmp")
    remedy = "set RAY_TMPDIR to another directory, for example one in /tmp"
    length = len(os.fsencode(os.path.join(directory, _SOCKET)))
    if length > _SOCKET_BYTES:
        raise UserError(
            f"{name}={directory}: the path is {length - _SOCKET_BYTES} characters too long for the sockets "
            f"that Ray keeps there; {remedy}"
        )
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"{name}={directory}: Ray keeps its sockets and logs there, and it cannot be written "
            f"({error.strerror}); {remedy}"
        ) from error
    free = {place: _free(place) for place in (SHARED_MEMORY, directory)}
    if max(free.values()) < object_store:
        has = " and ".join(f"{place} has {size / 1e6:.1f} MB free" for place, size in free.items())
        raise UserError(
            f"{name}={directory}: Ray needs {object_store / 1e6:.1f} MB for its objects, but {has}; make "
            f"shared memory larger (a container's: docker run --shm-size=1g), or {remedy}"
        )
    return directory


def _free(directory: str) -> int:
    try:
        space = os.statvfs(directory)
    except OSError:
        return 0
    return space.f_bavail * space.f_frsize
