"""The tool `python`: it runs programs that the policy writes, closed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.environments.tools import ToolFailure
from trainer.errors import UserError
from trainer.sandbox.programs import MAX_CODE, CodeLimits, CodeResult, shared_sandbox


class PythonTool:
    """Gives an environment the tool `python`. Each call runs a program in a sandbox of its own.

    Args:
        modules: packages beside the standard library that programs may import, such as `numpy`.
        limits: fields of `trainer.sandbox.programs.CodeLimits`.

    Raises:
        UserError: an argument is none of these, or programs cannot be closed in on this machine.
    """

    def __init__(self, modules: Sequence[str] = (), **limits: Any):
        try:
            self._limits = CodeLimits(**limits)
        except TypeError as error:
            names = ", ".join(CodeLimits.__dataclass_fields__)
            raise UserError(f"the tool python takes modules, {names} ({error})") from error
        self._sandbox = shared_sandbox(self._limits, tuple(modules))

    async def python(self, code: str) -> str:
        """Run a Python program, and return what it prints. Nothing stays for the next one.

        Args:
            code: The program. If it ends with an expression, its value is printed.
        """
        try:
            return self._answer(await self._sandbox.run(code))
        except (RuntimeError, UserError, OSError) as error:
            raise ToolFailure(f"the tool python failed: {error}") from error

    def _answer(self, result: CodeResult) -> str:
        limits = self._limits
        text = result.output
        if result.left_out:
            text += f"… ({result.left_out:,} more characters)"
        if result.problem:
            reasons = {
                "cpu": f"took more than {limits.cpu_s} s of processor time",
                "time": f"took more than {limits.time_s:g} s",
                "output": "printed too much",
                "size": f"has more than {MAX_CODE:,} characters",
            }
            reason = reasons.get(result.problem, f"was ended by {result.problem}")
            text += f"{chr(10) if text and not text.endswith(chr(10)) else ''}Error: the program {reason}"
        return text.strip() or "(no output)"
