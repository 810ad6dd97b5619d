"""The tool `python`: what the policy sees of its programs."""

from __future__ import annotations

import asyncio

import pytest

from trainer.environments.python_tool import PythonTool
from trainer.environments.tools import ToolFailure, tool_schema
from trainer.errors import UserError


def answers(tool: PythonTool, *codes: str) -> list[str]:
    async def together() -> list[str]:
        return await asyncio.gather(*map(tool.python, codes))

    return asyncio.run(together())


@pytest.fixture(scope="module")
def tool():
    tool = PythonTool(cpu_s=1, time_s=100.0, output=50)
    yield tool
    tool.close()


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print(1)\n2", "1\n2"),
        ("x = 1", "(no output)"),
        ("print('x' * 100)", "x" * 50 + "… (51 more characters)"),
        ("while True: pass", "Error: the program took more than 1 s of processor time"),
        ("import ctypes\nctypes.string_at(0)", "Error: the program was ended by SIGSEGV"),
        ("#" * ((1 << 20) + 1), "Error: the program has more than 1,048,576 characters"),
    ],
)
def test_the_policy_sees_what_the_program_printed_and_why_it_was_ended(tool, code, answer):
    assert answers(tool, code) == [answer]


def test_environments_of_a_process_share_one_server(tool):
    assert PythonTool(cpu_s=1, time_s=100.0, output=50)._runner is tool._runner
    other = PythonTool(cpu_s=1, time_s=1.0)
    assert other._runner is not tool._runner
    code = "import time\nprint('a', flush=True)\ntime.sleep(9)"
    assert answers(other, code) == ["a\nError: the program took more than 1 s"]
    other.close()


def test_the_policy_is_told_what_it_takes(tool):
    function = tool_schema(tool.python)["function"]
    assert function["name"] == "python" and function["parameters"]["required"] == ["code"]


def test_a_server_that_is_lost_fails_the_environment_and_not_the_program():
    tool = PythonTool(cpu_s=3, time_s=30.0)

    async def lost() -> None:
        waiting = asyncio.create_task(tool.python("import time\ntime.sleep(9)"))
        await asyncio.sleep(0.2)
        tool.close()
        with pytest.raises(ToolFailure, match="the tool python failed: the server that runs code has ended"):
            await waiting

    asyncio.run(lost())


def test_an_unknown_option_is_refused():
    with pytest.raises(UserError, match="the tool python takes isolation, modules, cpu_s.*memory"):
        PythonTool(memory=1)
