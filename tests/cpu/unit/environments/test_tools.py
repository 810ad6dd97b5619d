"""Tools that are plain Python functions."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import json
import re
from collections.abc import Coroutine
from datetime import date
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from trainer.environments import Environment
from trainer.environments.tools import ToolEnvironment, ToolFailure, tool_schema


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


def on_day(day: int) -> Any:
    """Return what is on a day.

    Args:
        day: The day; 0 for a plain text.
    """
    return [date(2026, 11, day)] if day else 'a "word"'


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
    run(environment.reset({"prompt": "6 * 7?", "answer": "42"}, seed=0))
    return environment


def test_the_first_messages_describe_the_tools():
    system, question = run(Calculator().reset({"prompt": "6 * 7?"}, seed=0))
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

    system, _ = run(Own().reset({"prompt": "x"}, seed=0))
    assert system["content"].startswith("Be short.\n\n# Tools")


def test_the_system_message_can_be_changed_or_left_out():
    class Own(Calculator):
        instructions = "Tools, one {line} each:\n{tools}"

    system, _ = run(Own().reset({"prompt": "x"}, seed=0))
    assert system["content"].startswith('Tools, one {line} each:\n{"type": "function"')
    Own.instructions = ""
    assert run(Own().reset({"prompt": "x"}, seed=0)) == [{"role": "user", "content": "x"}]


def test_the_question_may_choose_the_tools_of_an_episode():
    class Desk(Calculator):
        def prompt(self, row):
            self._balance = row["balance"]
            self.tools = (self.balance,)
            return row["prompt"]

        def balance(self) -> int:
            """Return the balance of the account."""
            return self._balance

    desk = Desk()
    system, _ = run(desk.reset({"prompt": "How much?", "balance": 7}, seed=0))
    assert '"balance"' in system["content"] and "multiply" not in system["content"]
    assert step(desk, '<tool_call>{"name": "balance"}</tool_call>').messages == [{"role": "tool", "content": "7"}]


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


def call_of(a: str) -> str:
    return f'{{"name": "multiply", "arguments": {{"a": {a}, "b": 7}}}}'


@pytest.mark.parametrize("day, answer", [(3, '["2026-11-03"]'), (0, 'a "word"')])
def test_a_text_is_answered_as_it_is_and_other_values_as_json(started, day, answer):
    started.tools = (on_day,)
    (message,) = step(started, f'<tool_call>{{"name": "on_day", "arguments": {{"day": {day}}}}}</tool_call>').messages
    assert message["content"] == answer


@pytest.mark.parametrize(
    "text, error",
    [
        ("6 * 7", "JSONDecodeError"),
        ("[1]", "TypeError"),
        ('{"arguments": {}}', "KeyError: 'name'"),
        ('{"name": "divide", "arguments": {}}', "there is no tool divide"),
        ('{"name": "multiply", "arguments": {"a": 1}}', "missing a required argument: 'b'"),
        ('{"name": "multiply", "arguments": [1, 2]}', "TypeError"),
        ('{"name": "look_up", "arguments": {"word": "x"}}', "KeyError: 'x'"),
        ('{"name": "multiply", "arguments": {"a": "6", "b": 7}}', "TypeError: a: Input should be a valid integer"),
        ('{"name": "multiply", "arguments": {"a": 6, "b": 7, "c": 8}}', "unexpected keyword argument 'c'"),
        (call_of("9" * 10**6), "ValueError: Exceeds the limit"),
        (call_of("[" * 10**5), "RecursionError"),
        (call_of("[" * 60 + "]" * 60), "nested too deeply"),
        ('{"name": "multiply", "arguments": {"a": NaN, "b": 7}}', "NaN is not a finite number"),
        ('{"name": "multiply", "arguments": {"a": 1e999, "b": 7}}', "1e999 is not a finite number"),
        ('{"name": ["multiply"], "arguments": {}}', "TypeError"),
    ],
)
def test_a_wrong_call_is_answered_with_its_error(started, text, error):
    (message,) = step(started, f"<tool_call>{text}").messages
    assert message["role"] == "tool" and message["content"].startswith("Error: ") and error in message["content"]


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int


class Own:
    """A type that is not checked: JSON has nothing like it."""


TYPES = [
    (int, [1, -(10**30)], [1.0, True, "1", None, [1]]),
    (float, [1, 1.5], [True, "1.5", None]),
    (str, ["x", ""], [1, None, ["x"]]),
    (bool, [True], [1, "true", None]),
    (list, [[], [1, "x"]], [{}, "x"]),
    (list[int], [[], [1]], [[1.5], ["1"], "12"]),
    (dict, [{}, {"a": [1]}], [[], "x"]),
    (dict[str, float], [{"a": 1}], [{"a": "1"}, [["a", 1]]]),
    (Optional[int], [1, None], ["1"]),  # noqa: UP045 - users write this, too
    (int | str, [1, "1"], [1.5, None]),
    (Literal["a", 2], ["a", 2], ["b", 1, None]),
    (tuple[int, str], [[1, "x"]], [[1], [1, 2], ["x", 1]]),
    (Color, ["red"], ["blue", "RED"]),
    (Point, [{"x": 1}], [{"x": "1"}, {}, 3]),
    (Own, [1, "x", None], []),
    (Any, [1, None, [1, {"x": 2}]], []),
    ("int", [1], ["x"]),
    ("NoSuchName", [1, "x"], []),
]


@pytest.mark.parametrize("hint, right, wrong", TYPES, ids=lambda value: None if isinstance(value, list) else str(value))
def test_arguments_are_checked_by_their_hints_and_given_as_they_are(hint, right, wrong):
    got = []

    def tool(value):
        got.append(value)
        return "called"

    tool.__annotations__ = {"value": hint}
    environment = Calculator()
    environment.tools = (tool,)

    def call(value: Any) -> str:
        text = json.dumps({"name": "tool", "arguments": {"value": value}})
        return run(environment.step({"role": "assistant", "content": f"<tool_call>{text}"})).messages[0]["content"]

    assert [call(value) for value in right] == ["called"] * len(right)
    assert [(type(value), value) for value in got] == [(type(value), value) for value in right]
    assert all(call(value).startswith("Error: TypeError: value") for value in wrong)
    assert len(got) == len(right), "no tool is called with what its hints exclude"


def test_defaults_and_further_arguments_of_a_tool_are_checked():
    class Own(Calculator):
        def tool(self, a: int = None, *, b: list[int] = (), **more: str) -> str:
            return repr((a, b, more))

    own = Own()
    own.tools = (own.tool,)

    def call(**arguments: Any) -> str:
        text = json.dumps({"name": "tool", "arguments": arguments})
        return run(own.step({"role": "assistant", "content": f"<tool_call>{text}"})).messages[0]["content"]

    assert call() == "(None, (), {})" and call(a=None, c="x") == "(None, (), {'c': 'x'})"
    assert call(b=["x"]).startswith("Error: TypeError: b.0: ") and call(c=1).startswith("Error: TypeError: c: ")


def test_a_tool_that_does_not_work_fails_the_environment(started):
    def broken() -> str:
        raise ToolFailure("the service is down")

    started.tools = (broken,)
    with pytest.raises(ToolFailure, match="the service is down"):
        step(started, '<tool_call>{"name": "broken"}</tool_call>')


def test_of_many_calls_the_first_are_made(started):
    text = '<tool_call>{"name": "multiply", "arguments": {"a": 1, "b": 2}}</tool_call>'
    answers = [message["content"] for message in step(started, text * 5000).messages]
    assert answers == ["2"] * 64 + ["Error: 5000 calls; only the first 64 of a reply are made"]


def test_the_example_of_the_page():
    page = (Path(__file__).parents[4] / "docs/environments.md").read_text()
    given: dict[str, Any] = {}
    (example,) = (b for b in re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S) if "class Calculator" in b)
    exec(example, given)
    environment = given["Calculator"]()
    system, _ = run(environment.reset({"prompt": "6 * 7?", "answer": "42"}, seed=0))
    assert "Multiply two numbers." in system["content"]
    (message,) = step(
        environment, '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    ).messages
    assert step(environment, message["content"]).reward == 1.0


def test_a_reply_without_a_call_is_the_answer(started):
    assert step(started, " 42\n").reward == 1.0
    last = step(started, "43")
    assert (last.reward, last.done) == (0.0, True)


def test_calls_and_errors_are_counted_by_tool(started):
    """Every step names every tool, so that an episode without calls counts as 0."""
    call = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'
    none = {"tool_calls/multiply": 0, "tool_calls/look_up": 0, "tool_errors": 0}
    text = call.format("multiply", '{"a": 6, "b": 7}') + call.format("look_up", '{"word": "?"}')
    text += call.format("unknown", "{}") + "<tool_call>{no json</tool_call>"
    assert step(started, text).metrics == {"tool_calls/multiply": 1, "tool_calls/look_up": 1, "tool_errors": 3}
    assert step(started, "42").metrics == none


def test_a_call_that_a_renderer_cannot_read_is_answered_with_its_problem(started):
    """In a format whose texts do not show calls to this environment."""
    unread = [{"name": "multiply", "problem": "invalid json"}]
    result = run(started.step({"role": "assistant", "content": "hm", "unread_calls": unread}))
    answer = "Error: this call cannot be read (invalid json); no call of the reply was made"
    assert result.messages == [{"role": "tool", "content": answer, "name": "multiply"}]
    assert result.metrics["tool_errors"] == 1 and not result.done


def test_an_answer_may_earn_named_terms():
    class Named(Calculator):
        def score(self, answer, row):
            return {"right": float(answer == row["answer"]), "brief": 0.5}

    environment = Named()
    run(environment.reset({"prompt": "6 * 7?", "answer": "42"}, seed=0))
    done = step(environment, "42")
    assert (done.reward, done.rewards, done.done) == (0.0, {"right": 1.0, "brief": 0.5}, True)
