"""The environment whose answers only a tool finds."""

from __future__ import annotations

import asyncio
import json

from trainer.config import compose
from trainer.data.datasets import load_rows, read_examples
from trainer.data.generators import generate
from trainer.environments import supervised_chat
from trainer.environments.questions import LookUp


def play(row, *replies: str):
    environment = LookUp()

    async def episode():
        messages = await environment.reset(row, 0)
        return messages, [await environment.step({"role": "assistant", "content": reply}) for reply in replies]

    return asyncio.run(episode())


def call(name: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'look_up', 'arguments': {'name': name}})}</tool_call>"


ROW = {"prompt": "qd", "answer": "47", "table": {"qd": "xk", "xk": "47"}}


def test_the_answer_is_found_by_looking_up_what_is_found():
    messages, (first, second, last) = play(ROW, call("qd"), call("xk"), "47")
    assert messages == [{"role": "user", "content": "qd"}], "the table is not shown"
    assert [m["content"] for m in (*first.messages, *second.messages)] == ["xk", "47"]
    assert (last.done, last.reward) == (True, 1.0)


def test_a_guess_ends_the_episode_and_an_unknown_name_is_an_error():
    _, (guessed,) = play(ROW, "46")
    assert (guessed.done, guessed.reward) == (True, 0.0)
    _, (unknown,) = play(ROW, call("zz"))
    assert "Error" in unknown.messages[0]["content"] and unknown.metrics["tool_errors"] == 1


def test_the_chats_of_the_generator_begin_and_call_as_episodes_do():
    """The warm start learns what the environment then plays."""
    data = compose(["data=look_up"]).data
    rows = load_rows(data, "val").prompts[:40]
    for prompt, example in zip(rows, read_examples(data, "val"), strict=False):
        row = dict(prompt.row)
        assert supervised_chat(LookUp, row, row["messages"])["messages"] == row["messages"]
        assert [*example["prompt"], {"role": "assistant", "content": example["answer"]}] == row["messages"]
        said = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        _, steps = play(row, *said)
        told = [m["content"] for step in steps for m in step.messages]
        assert told == [m["content"] for m in row["messages"] if m["role"] == "tool"]


def test_some_chats_give_up_so_that_there_is_something_to_learn():
    rows = generate("look_up", {}, 1000, "train")
    right = sum(row["messages"][-1]["content"] == row["answer"] for row in rows)
    assert 400 < right < 650
    assert {len(row["table"]) for row in rows} == {1, 2, 3}
    for row in rows:
        name = row["prompt"]
        for _ in row["table"]:
            name = row["table"][name]
        assert name == row["answer"]
