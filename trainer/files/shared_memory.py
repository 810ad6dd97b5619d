"""Private directories of one process, mostly in shared memory.

Every user of a machine can write to `/dev/shm` and `/tmp`, and containers may share them. A name that other users can
guess is not safe, because they could create a link or a directory with that name. `PrivateDirectory` creates a
directory with a random name that only this user can enter. Files in it need no further protection.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from typing import Any

from trainer.errors import UserError

SHARED_MEMORY = "/dev/shm"
PREFIX = "trainer-weights-"
"""Of the directories that hold states of models. Each start deletes those of dead processes."""
_OTHERWISE = ", or choose rollout=vllm with rollout.weight_sync=broadcast"
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateDirectory(contextlib.AbstractContextManager[Any]):
    """A new directory below `base`, which exists until `close` or the exit of this process. A context manager.

    Its name is `prefix` and `random_bytes` random bytes in hexadecimal. This process holds a lock (flock) on the
    directory. The kernel releases the lock when the process dies, and all containers that share the file system see
    the lock. A directory without a lock is therefore abandoned, and `clear_abandoned` deletes it. A process id would
    prove nothing, because each container numbers its own processes.

    Raises:
        FileExistsError: a directory with the random name exists.
    """

    def __init__(self, base: str, prefix: str, random_bytes: int):
        clear_abandoned(base, prefix)
        while True:
            self.path = os.path.join(base, prefix + secrets.token_hex(random_bytes))
            os.mkdir(self.path, 0o700)
            handle = _lock_new(self.path)
            if handle is not None:
                self._handle = handle
                return

    def close(self) -> None:
        if self._handle >= 0:
            shutil.rmtree(self.path, ignore_errors=True)  # under the lock, or `clear_abandoned` could interfere
            os.close(self._handle)
            self._handle = -1

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedDirectory(PrivateDirectory):
    """A private directory for weights in shared memory. Raises UserError: `base` does not exist, or does not protect
    the entries of one user from other users."""

    def __init__(self, base: str = SHARED_MEMORY):
        _check_base(base)
        super().__init__(base, PREFIX, 16)


class NodeDirectory:
    """A directory in shared memory that processes of one user use together, until the last of them ends.

    Each of them holds a shared lock on it, so `clear_abandoned` leaves it alone. The name comes from a secret.

    Raises:
        UserError: see `SharedDirectory`; or the directory belongs to another user.
    """

    def __init__(self, secret: str, base: str = SHARED_MEMORY):
        _check_base(base)
        clear_abandoned(base)
        self.path = os.path.join(base, PREFIX + hashlib.sha256(secret.encode()).hexdigest()[:32])
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
            if (handle := _lock_new(self.path, fcntl.LOCK_SH)) is not None:
                check_owner(self.path)
                self._handle = handle
                return

    def close(self) -> None:
        """Leave the directory, and delete it if no other process uses it."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)


def clear_abandoned(base: str = SHARED_MEMORY, prefix: str = PREFIX) -> list[str]:
    """Delete this user's private directories below `base` whose process is dead. Return their paths. Links, directories
    of other users and locked directories are not touched."""
    cleared = []
    with contextlib.suppress(FileNotFoundError):
        for path in [os.path.join(base, name) for name in os.listdir(base) if name.startswith(prefix)]:
            try:
                handle = os.open(path, _OPEN_DIRECTORY)
            except OSError:  # a link, a file, a directory of another user, or already removed
                continue
            try:
                if os.fstat(handle).st_uid == os.geteuid():
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                    cleared.append(path)
            except BlockingIOError:  # the process of the directory is alive
                pass
            finally:
                os.close(handle)
    return cleared


def check_free_space(needed: int, reserved: int, base: str = SHARED_MEMORY) -> None:
    """Check that the policy's weights, `needed` bytes, fit below `base`.

    Args:
        reserved: size of Ray's object store in bytes. Ray puts it there if that much is free, else in its temporary
            directory. It allocates the memory when objects arrive: if none is left then, the kernel kills the process.

    Raises:
        UserError: the weights do not fit.
    """
    free = free_space(base)
    for_ray = reserved if free >= reserved else 0
    if needed + for_ray > free:
        size_gib = -(-(needed + reserved) // 2**30)  # rounded up
        besides = f" in addition to {for_ray / 1e6:.1f} MB for Ray's objects" if for_ray else ""
        raise _refusal(
            f"{base} has {free / 1e6:.1f} MB free, but the policy's weights need {needed / 1e6:.1f} MB{besides}; make "
            f"it larger (in a container: docker run --shm-size={size_gib}g){_OTHERWISE}"
        )


def free_space(base: str = SHARED_MEMORY) -> int:
    """Return the bytes that are free below `base`. Raises UserError: weights cannot be written there: it does not
    exist, is not writable, or does not protect them."""
    _check_base(base)
    return shutil.disk_usage(base).free


def choose_directory(size: int) -> str:
    """Return shared memory if it has twice `size` bytes free, otherwise the directory for temporary files. Raises
    OSError: neither has space for `size` bytes."""
    with contextlib.suppress(OSError):
        if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) and shutil.disk_usage(SHARED_MEMORY).free > 2 * size:
            return SHARED_MEMORY
    directory = tempfile.gettempdir()
    if (free := shutil.disk_usage(directory).free) < size:
        raise OSError(errno.ENOSPC, f"{size / 1e6:.0f} MB, and {directory} has {free / 1e6:.0f} MB free")
    return directory


def check_owner(path: str) -> None:
    """Check that `path` is a directory of this user, not a link. Raises UserError: it is not."""
    try:
        info = os.lstat(path)
    except FileNotFoundError as error:
        text = f"an engine does not see {path}, to which the ranks wrote; share {SHARED_MEMORY} between the containers"
        raise _refusal(text + _OTHERWISE) from error
    if not (stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()):
        raise _refusal(f"{path} is a link or belongs to another user; its weights are not used")


def _refusal(text: str) -> UserError:
    return UserError(f"rollout.weight_sync=shared_memory: {text}")


def _check_base(base: str) -> None:
    try:
        mode = os.stat(base).st_mode
    except FileNotFoundError as error:
        raise _refusal(f"there is no {base}; mount a tmpfs there{_OTHERWISE}") from error
    if not os.access(base, os.W_OK | os.X_OK):
        raise _refusal(f"{base} is not writable; mount it writable{_OTHERWISE}")
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise _refusal(f"other users can rename the files of this run in {base}; run `chmod +t {base}` there")


def _lock_new(path: str, kind: int = fcntl.LOCK_EX) -> int | None:
    """Lock a new directory. Return None if another process removed the directory as abandoned before the lock."""
    try:
        handle = os.open(path, _OPEN_DIRECTORY)
    except FileNotFoundError:
        return None
    fcntl.flock(handle, kind)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.lstat(path), os.fstat(handle)):
            return handle
    os.close(handle)
    return None
