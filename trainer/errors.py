"""What goes wrong, in the words a user reads."""

_LONGEST_TEXT = 200


class UserError(ValueError):
    """Something the user can mend: bad input, a missing file, a setting that cannot work.

    The command line prints its message as one sentence (what is wrong, where, what to do) without a
    traceback and exits with status 2. Every other exception is a bug or a broken machine and keeps its
    traceback.
    """


class WorkerError(RuntimeError):
    """A worker process died without an exception of its own (killed, out of memory, node lost)."""


class NonFiniteError(RuntimeError):
    """Loss or gradient norm became NaN or infinite. The weights were not updated with it."""


class NotSavedError(RuntimeError):
    """The last state of a process could not be saved: its steps since the last checkpoint must be trained again."""


def memory_ran_out(error: BaseException) -> bool:
    """Whether `error` says that a process could not get the memory of the machine or of the GPU that it asked for."""
    is_torchs = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator: can't allocate" in str(error)
    return isinstance(error, MemoryError) or is_torchs  # by name: this module does not import torch


def describe_error(error: BaseException) -> str:
    """Return `Type: text` as one short printable line. Made for errors of user code, whose text may itself raise."""
    try:
        # The slice also makes a plain str of a subclass, whose methods could do anything.
        text = str.__getitem__(str(error), slice(10 * _LONGEST_TEXT))
    except BaseException:
        text = "its text cannot be read"
    return one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def one_line(text: str) -> str:
    """Return `text` as one printable line of at most 200 characters."""
    words = " ".join(text[: 10 * _LONGEST_TEXT].split())
    line = "".join(letter if letter.isprintable() else "?" for letter in words)
    return line if len(line) <= _LONGEST_TEXT else line[: _LONGEST_TEXT - 1] + "…"
