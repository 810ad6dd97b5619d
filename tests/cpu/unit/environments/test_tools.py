"""Tools that are plain Python functions."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from trainer.environments import Environment
from trainer.environments.tools import ToolEnvironment, tool_schema


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


async def look_up(word: str) -> dict:
    """Look a word up.

    Args:
        word: What to look up.
    """
    await asyncio.sleep(0)
    return {"means": {"hé": "hello"}[word]}


class Calculator(ToolEnvironment):
    tools = (multiply, look_up)

    def score(self, answer, row):
        return float(answer == row["answer"])


def run(call: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(call)


def step(environment: Environment, text: str) -> Any:
    return run(environment.step({"role": "assistant", "content": text}))


@pytest.fixture
def started() -> Calculator:
    environment = Calculator()
    run(environment.start({"prompt": "6 * 7?", "answer": "42"}, seed=0))
    return environment


def test_the_first_messages_describe_the_tools():
    system, question = run(Calculator().start({"prompt": "6 * 7?"}, seed=0))
    assert system["role"] == "system" and question == {"role": "user", "content": "6 * 7?"}
    tools = system["content"].partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in tools] == [tool_schema(multiply), tool_schema(look_up)]
    function = tool_schema(multiply)["function"]
    assert (function["name"], function["parameters"]["required"]) == ("multiply", ["a", "b"])
    assert function["parameters"]["properties"]["b"] == {"type": "integer", "description": "The second."}


def test_a_system_message_of_the_row_stays_before_the_tools():
    class Own(Calculator):
        def prompt(self, row):
            return [{"role": "system", "content": "Be short."}, {"role": "user", "content": row["prompt"]}]

    system, _ = run(Own().start({"prompt": "x"}, seed=0))
    assert system["content"].startswith("Be short.\n\n# Tools")


def test_calls_are_answered_in_their_order(started):
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    answered = step(
        started, "Hm. " + call.format("multiply", '{"a": 6, "b": 7}') + call.format("look_up", '{"word": "hé"}')
    )
    assert (answered.done, answered.reward) == (False, 0.0)
    assert answered.messages == [
        {"role": "tool", "content": "42"},
        {"role": "tool", "content": '{"means": "hello"}'},
    ]


@pytest.mark.parametrize(
    "text, error",
    [
        ("6 * 7", "JSONDecodeError"),
        ("[1]", "TypeError"),
        ('{"arguments": {}}', "KeyError: 'name'"),
        ('{"name": "divide", "arguments": {}}', "there is no tool divide"),
        ('{"name": "multiply", "arguments": {"a": 1}}', "missing 1 required positional argument: 'b'"),
        ('{"name": "multiply", "arguments": [1, 2]}', "TypeError"),
        ('{"name": "look_up", "arguments": {"word": "x"}}', "KeyError: 'x'"),
    ],
)
def test_a_wrong_call_is_answered_with_its_error(started, text, error):
    (message,) = step(started, f"<tool_call>{text}").messages
    assert message["role"] == "tool" and message["content"].startswith("Error: ") and error in message["content"]


def test_the_example_of_the_page():
    page = (Path(__file__).parents[4] / "docs/environments.md").read_text()
    given: dict[str, Any] = {}
    exec(re.search(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[1], given)
    environment = given["Calculator"]()
    system, _ = run(environment.start({"prompt": "6 * 7?", "answer": "42"}, seed=0))
    assert "Multiply two numbers." in system["content"]
    (message,) = step(
        environment, '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    ).messages
    assert step(environment, message["content"]).reward == 1.0


def test_a_reply_without_a_call_is_the_answer(started):
    assert step(started, " 42\n").reward == 1.0
    last = step(started, "43")
    assert (last.reward, last.done) == (0.0, True)
