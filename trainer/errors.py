"""Exceptions of the project, and the format of their messages: one line, lists, sizes, suggested names."""

import errno
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LONGEST_TEXT = 200
_NO_ACCESS = (errno.EACCES, errno.EPERM)
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
RESTART_HINT = "restart the job with the same command"


class UserError(ValueError):
    """An error that the user can fix: bad input, a missing file, a setting that cannot work.

    The message is one sentence that names the problem, its location and the remedy, or a list of such sentences, one
    line each (see `as_list`). The command line prints it without a traceback and exits with status 2. Every other
    exception is a bug or a broken machine and keeps its traceback.
    """


class TrialError(UserError):
    """Rewards or an environment fail when they are tried before anything expensive starts. A service that they ask may
    be down, so it is a warning for a run that has trained before."""


class WorkerError(RuntimeError):
    """A process of the job died, does not answer, takes too long, or has no memory left.

    Args:
        message: what happened.
        hint: what the user can do if the job does not recover by itself.
        cause: `killed`, `heartbeat_timeout`, `rpc_timeout`, `memory`, `gpu_memory_in_use` (other programs hold the
            GPU's memory), `gpu` (the message contains a GPU error), `node` (its machine failed), `cluster` (a process
            of Ray died), `server` (an inference server does not serve), `server_absent` (it has not come back in time),
            `left` (an engine leaves the fleet), `weights` (the initial weights did not reach the engines) or
            `restart_limit` (the config allows no further restart). Empty: another cause.
    """

    def __init__(self, message: str, hint: str = "", cause: str = ""):
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message, self.hint, self.cause = message, hint, cause

    def __reduce__(self) -> tuple:
        return WorkerError, (self.message, self.hint, self.cause)


@dataclass(frozen=True, order=True)
class FailureSource:
    """The process of the job that raised an exception, or whose death the exception reports."""

    name: str  # role and index, such as `rank 1`
    node: str = ""  # address of its machine, or empty if it is not known

    @property
    def role(self) -> str:
        """Role of the process: `rank`, `critic rank`, `engine`."""
        return self.name.rstrip(" 0123456789")


def set_failure_source(error: Exception, source: FailureSource) -> None:
    error._failure_source = source  # type: ignore[attr-defined]


def failure_source_of(error: BaseException) -> FailureSource | None:
    """Return the process that raised `error`, or None if the driver raised it."""
    return getattr(error, "_failure_source", None)


class NonRetryableError(RuntimeError):
    """The run itself is at fault: it failed again in the same way when its step was repeated. The command line exits
    with status 3. The same command would fail again."""


class DivergedError(NonRetryableError):
    """A metric of the run has stayed above its limit (`trainer.divergence_limits`)."""


class LogprobMismatchError(DivergedError):
    """Engines and ranks disagree about the policy (`rollout.max_logprob_diff`). The weights were not updated."""


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is NaN or infinite. The weights were not updated."""


class NotSavedError(RuntimeError):
    """The last save of a process failed, so the steps since the last checkpoint must be trained again."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` reports that the machine or the GPU is out of memory."""
    # By name, because this module does not import torch.
    from_torch = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator: can't allocate" in str(error)
    from_vllm = "CUDA Error: out of memory" in str(error)  # while an engine that shares its GPU wakes up
    return isinstance(error, MemoryError) or from_torch or from_vllm


def is_unreachable(text: str) -> bool:
    """Return whether the text of a failure reports that a service could not be reached."""
    return re.search(r"Connect(ion)?\w{0,40}Error|ConnectTimeout|gaierror|Connection refused", text) is not None


def remedy_of(failure: str, usual: str) -> str:
    """Return what a user can do about a failure of a reward or an environment: `usual`, or to start a service."""
    return "start the service that it asks, or correct its address" if is_unreachable(failure) else usual


def text_of(error: BaseException) -> str:
    """Return the text of an error, without the number with which an OSError that names no file begins."""
    if isinstance(error, OSError) and error.strerror and error.filename is None:
        return error.strerror
    return str(error) or repr(error)


def is_disk_unwritable(error: BaseException) -> bool:
    """Return whether `error` says that a disk, a quota or `ulimit -f` is full, or a file system read-only."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


def format_size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def as_list(headline: str, sentences: Sequence[str]) -> str:
    """Return the sentences below `headline`, one line each. A single sentence is returned without the headline."""
    return "\n  ".join([headline, *sentences]) if len(sentences) > 1 else sentences[0]


def sentences_of(error: UserError) -> list[str]:
    """Return the sentences of a list (see `as_list`) without its headline, or the only sentence."""
    headline, *sentences = str(error).split("\n  ")
    return sentences or [headline]


def sentence_of(error: UserError | OSError) -> str:
    """Return the message that a command line prints about invalid input."""
    if isinstance(error, UserError) or error.filename is None:
        return str(error)
    remedy = "give the command as its owner, or ask for access" if error.errno in _NO_ACCESS else "correct that path"
    return f"{os.fspath(error.filename)}: {error.strerror}; {remedy}"


def describe_error(error: BaseException) -> str:
    """Return `Type: text` as one short printable line. The error may come from user code, whose `__str__` may raise."""
    try:
        # The slice turns a subclass of str into a plain str, because methods of the subclass could do anything.
        text = str.__getitem__(str(error), slice(10 * _LONGEST_TEXT))
    except BaseException:
        text = "its text cannot be read"
    return one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def describe_with_place(error: BaseException) -> str:
    """Return `Type: text (file:line, in function)`: the error, and the innermost line of the user's own code in it. The
    tracebacks of workers in its notes count, too. Code of this package and of installed ones is not the user's."""
    import sysconfig  # seldom needed, and this module is imported before signals are handled
    import traceback

    trace = [*traceback.format_tb(error.__traceback__), *getattr(error, "__notes__", ())]
    libraries = sysconfig.get_paths()
    others = [os.path.dirname(__file__), *(libraries[name] for name in ("stdlib", "purelib", "platlib"))]
    frames = re.findall(r'File "([^"\n]++)", line (\d++), in (\S++)', "\n".join(trace))
    own = [frame for frame in frames if not frame[0].startswith(("<", *(path + os.sep for path in others)))]
    place = " ({}:{}, in {})".format(*own[-1]) if own else ""
    return describe_error(error) + place


def one_line(text: str) -> str:
    """Return `text` as one printable line of at most 200 characters."""
    words = " ".join(text[: 10 * _LONGEST_TEXT].split())
    line = "".join(letter if letter.isprintable() else "?" for letter in words)
    return line if len(line) <= _LONGEST_TEXT else line[: _LONGEST_TEXT - 1] + "…"


_MAX_SUGGESTIONS = 3
_MIN_SIMILARITY = 0.75
"""Least similarity of a suggestion, where 1 is equality. Names below it have little to do with the wrong name."""

_MARGIN = 0.1  # a name is suggested only if its similarity is at most this much below the best one


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """Return `did you mean NAME, or NAME?` with the names most similar to `wrong`. Empty if no name is similar. Names
    are plain, or keys with their sections. `wrong` may lack the section, or have a wrong one."""
    from difflib import SequenceMatcher  # seldom needed, and this module is imported before signals are handled

    def ratio(a: str, b: str) -> float:
        return SequenceMatcher(None, a.lower(), b.lower(), autojunk=False).ratio()

    section, _, last = wrong.rpartition(".")
    scores = {}
    for name in names:
        parts = name.split(".")
        endings = ["_".join(parts[i:]) for i in range(len(parts))]  # model_path: model.path
        has_all_words = set(last.split("_")) < set(parts[-1].split("_"))  # train_batch_size for batch_size
        scores[name] = 0.9 if has_all_words else max(ratio(last, one) for one in (endings[-1:] if section else endings))
    least = max([_MIN_SIMILARITY, *(score - _MARGIN for score in scores.values())])
    alike = {name: ratio(section, name.rpartition(".")[0]) if section else 0.0 for name in scores}
    similar = sorted((n for n in scores if scores[n] >= least), key=lambda n: (-alike[n], -scores[n]))
    return f"did you mean {', or '.join(similar[:_MAX_SUGGESTIONS])}?" if similar else ""
