"""What goes wrong, in the words a user reads."""


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
