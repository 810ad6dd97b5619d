"""Run one program of the policy: the script that `trainer.sandbox.programs` starts in its sandbox.

It runs in a bare Python and uses the standard library alone. Its first argument is JSON: `rlimits` (a list of name,
soft and hard limit), `path` (directories to append to `sys.path`) and `modules` (to import). Standard input holds the
program.
"""

import ast
import importlib
import io
import json
import linecache
import random
import resource
import signal
import sys
import traceback
import types

FILE = "<code>"  # the file name of the program in its tracebacks


def main() -> int:
    """Limit this process for good, and run the program. Return its exit status."""
    settings = json.loads(sys.argv[1])
    for name, soft, hard in settings["rlimits"]:
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (soft, hard))
    sys.path += settings["path"]
    for module in settings["modules"]:
        importlib.import_module(module)
    if "numpy" in settings["modules"]:
        importlib.import_module("numpy.random").seed(0)
    random.seed(0)
    code = sys.stdin.buffer.read().decode()
    sys.argv = [""]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return execute(code)


def execute(code: str) -> int:
    """Run a program; print the value of an expression at its end. Return the exit status."""
    stream = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", errors="backslashreplace")
    sys.stdout = sys.stderr = stream
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    status = 0
    try:
        tree = ast.parse(code, FILE)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, FILE, "exec"), module.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), FILE, "eval"), module.__dict__)
            if value is not None:
                print(repr(value))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if status and not isinstance(error.code, int):
            print(error.code)
    except BaseException as error:
        status = 1
        stream.write("".join(_own_frames(traceback.TracebackException.from_exception(error)).format()))
    stream.flush()
    return status & 0x7F  # above: the sandbox reports a signal


def _own_frames(error: traceback.TracebackException) -> traceback.TracebackException:
    """Return an error with the lines of the program alone, without those of libraries on this machine."""
    error.stack = traceback.StackSummary.from_list(frame for frame in error.stack if frame.filename == FILE)
    for other in (error.__cause__, error.__context__):
        if other is not None:
            _own_frames(other)
    return error


if __name__ == "__main__":
    sys.exit(main())
