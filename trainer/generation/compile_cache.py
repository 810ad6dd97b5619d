"""A directory for compiled code that no other process uses at the same time."""

from __future__ import annotations

import fcntl
import itertools
import os

_VARIABLE = "VLLM_CACHE_ROOT"
_claims: list[int] = []


def use_own_cache() -> None:
    """Let vLLM, which must not be imported yet, keep its compiled code in a directory of this process.

    vLLM writes its list of compiled code in place. An engine that starts could read the half-written list of another
    engine, and fail.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = claim_directory(os.environ.get(_VARIABLE) or os.path.join(caches, "vllm"))
    if path is not None:
        os.environ[_VARIABLE] = path


def claim_directory(root: str) -> str | None:
    """Return the first directory below `root` that no running process has claimed; None: it cannot be claimed.

    The claim ends with this process. The directory and its files stay for the next one.
    """
    try:
        for number in itertools.count():
            path = os.path.join(root, f"engine-{number}")
            os.makedirs(path, exist_ok=True)
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                continue
            _claims.append(handle)
            return path
    except OSError:  # it cannot be written, or the file system has no locks
        return None
    raise AssertionError("there are more numbers")
