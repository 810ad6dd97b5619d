"""Questions with tools, on rows of GSM8K."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from tests.support.gsm8k import REASON, find_gsm8k
from trainer.data.row_files import read_rows
from trainer.environments.base import check_options
from trainer.environments.questions import Questions, worked_chat
from trainer.errors import UserError

GSM8K = find_gsm8k()
NOT_HERE = pytest.mark.skipif(GSM8K is None, reason=REASON)


def play(environment: Questions, row: dict, *replies: str):
    async def episode():
        start = await environment.reset(row, 0)
        return start, [await environment.step({"role": "assistant", "content": reply}) for reply in replies]

    return asyncio.run(episode())


def call(tool: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def rows_of_gsm8k() -> list[dict]:
    assert GSM8K is not None
    (file,) = sorted(GSM8K.rglob("*test*"))[:1]
    return [row for _, row in read_rows(str(file), "data.val_files")]


@NOT_HERE
def test_problems_of_gsm8k_are_solved_by_their_own_calculations():
    """The solutions of the data set name each calculation: `<<48/2=24>>`."""
    rows = rows_of_gsm8k()
    assert len(rows) == 1319
    calculated = 0
    for row in rows[::5]:
        found = [c.partition("=") for c in re.findall(r"<<(.*?)>>", row["answer"])]
        usable = [
            (c, value) for c, _, value in found if re.fullmatch(r"[\d+*/().\s-]+", c) and re.fullmatch(r"[\d.]+", value)
        ]
        calls = "".join(call("calculator", expression=expression) for expression, _ in usable)
        _, steps = play(Questions(), row, *([calls] if calls else []), row["answer"])
        assert (steps[-1].done, steps[-1].reward) == (True, 1.0), row
        if calls:
            told = [float(message["content"]) for message in steps[0].messages]
            right = [abs(a - float(b)) <= 0.02 * max(1.0, abs(a)) for a, (_, b) in zip(told, usable, strict=True)]
            calculated += sum(right)
            assert sum(right) >= len(right) - 1, (row, told)  # a few are written wrongly, or rounded
    assert calculated > 700


@NOT_HERE
def test_a_problem_of_gsm8k_with_the_tool_python():
    row = rows_of_gsm8k()[0]
    environment = Questions(tools=["python", "calculator"], python={"time_s": 100.0})
    start, (told, done) = play(environment, row, call("python", code="print(16 - 3 - 4)\n9 * 2"), "#### 18")
    assert '"python"' in start[0]["content"] and start[1]["content"] == row["question"]
    assert told.messages == [{"role": "tool", "content": "9\n18"}] and told.metrics["tool_calls/python"] == 1
    assert done.reward == 1.0


def test_columns_tools_and_the_reward_can_be_chosen():
    environment = Questions(["builtins:len"], "arithmetic", prompt_key="prompt", answer_key="solution")
    assert environment.tools == (len,)
    assert Questions([], "arithmetic", "prompt").score("42", {"answer": 42}) == 1.0


def test_wrong_options_are_refused_before_the_first_episode():
    for options, problem in [
        ({"tools": ["abacus"]}, "tools=abacus: choose one of calculator, python, or an import path"),
        ({"reward": "luck"}, "reward=luck: choose one of gsm8k"),
        ({"tools": ["python"], "python": {"cpu": 1}}, "the tool python takes modules"),
        ({"tools": ["python"], "python": {"modules": ["no_such"]}}, "No module named 'no_such'"),
    ]:
        with pytest.raises(UserError, match=problem):
            check_options("trainer.environments.questions:Questions", options)


SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nThat is 48+24 = $<<48+24=72>>72.00 altogether.\n#### 72"


@pytest.mark.parametrize("with_text", [True, False])
def test_a_solution_of_gsm8k_becomes_a_chat_that_calls_the_calculator(with_text):
    first, told, second, told_then, last = worked_chat(SOLUTION, with_text)
    said = [first["content"], second["content"], last["content"]]
    texts = ["Natalia sold 48/2 =", "clips in May.\nThat is 48+24 = $", "altogether.\n#### 72"]
    assert said == (texts if with_text else ["", "", "#### 72"])
    calls = [json.loads(one["tool_calls"][0]["function"]["arguments"]) for one in (first, second)]
    assert calls == [{"expression": "48/2"}, {"expression": "48+24"}]
    assert [one["content"] for one in (told, told_then)] == ["24", "72"]


@pytest.mark.parametrize("solution", ["No calculation.\n#### 3", "x = <<x+1=3>>3\n#### 3", "<<1/0=3>>3\n#### 3"])
def test_a_solution_that_the_calculator_cannot_follow_gives_no_chat(solution):
    assert worked_chat(solution) is None


def test_calls_with_the_results_of_the_solution_get_their_own_term_of_the_reward():
    row = {"question": "How many clips?", "answer": SOLUTION}

    def terms(answer: str, *expressions: str) -> dict[str, float]:
        calls = [call("calculator", expression=expression) for expression in expressions]
        return dict(play(Questions(steps_reward=0.5), row, *calls, answer)[1][-1].rewards)

    assert terms("72", "96/4", "9*8") == {"right": 1.0, "steps": 0.5}
    assert terms("24", "12+12") == {"right": 0.0, "steps": 0.25}
    assert terms("72", "24", "1", "2", "72") == {"right": 1.0, "steps": 0.25}, "half of the calls"
    assert terms("72", "24", "24") == {"right": 1.0, "steps": 0.25}, "a result counts once"
    assert terms("72") == {"right": 1.0, "steps": 0.0}
    assert terms("72", "1/0") == {"right": 1.0, "steps": 0.0}
    assert play(Questions(), row, "72")[1][-1].rewards == {}


def test_other_instructions_take_the_place_of_the_description():
    row = {"question": "6*7?", "answer": "42"}
    assert play(Questions(instructions=""), row)[0] == [{"role": "user", "content": "6*7?"}]
    assert play(Questions(instructions="Tools: {tools}"), row)[0][0]["content"].startswith('Tools: {"type": "function"')
