"""Chats to learn from begin, and call tools, as episodes do."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from tests.cpu.unit.environments.test_conversation import tokenizer, with_template  # noqa: F401 - fixture
from tests.cpu.unit.environments.test_tools import Calculator
from tests.support.chat_templates import TEMPLATES
from trainer.config import SFTConfig, compose
from trainer.data.datasets import read_examples
from trainer.data.examples import Stops, encode
from trainer.environments import StepResult, supervised_chat
from trainer.environments.conversation import Conversation
from trainer.errors import UserError
from trainer.generation.engine import Completion
from trainer.models.tokenizer import stop_token_ids

ROW = {"prompt": "What is 6 times 7?", "answer": "42"}
CALL = {"role": "assistant", "content": None, "tool_calls": [
    {"type": "function", "function": {"name": "multiply", "arguments": '{"a": 6, "b": 7}'}}]}  # fmt: skip
CHAT = [
    {"role": "system", "content": "Tools of another format."},
    {"role": "user", "content": "What is 6 times 7?"},
    CALL,
    {"role": "tool", "content": "42", "tool_call_id": "1"},
    {"role": "assistant", "content": "42"},
]


def ends_of(tokenizer) -> Stops:  # noqa: F811
    return Stops(tokenizer, stop_token_ids(tokenizer.name_or_path, tokenizer))


@pytest.mark.parametrize("name", ["embedded", *TEMPLATES])
def test_the_tokens_before_the_first_reply_are_those_of_the_episode(tokenizer, name, tmp_path):  # noqa: F811
    with_template(tokenizer, name)
    episode = Conversation(tokenizer, asyncio.run(Calculator().reset(ROW, 0)))
    rows = [supervised_chat(Calculator, ROW, CHAT[:2] + CHAT[4:]), supervised_chat(Calculator, ROW, CHAT[4:])]
    assert rows[0] == rows[1]
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(rows[0]) + "\n")
    words = ["data=files", f"data.train_files=[{file}]", "data.messages_key=messages", "trainer.val_interval=-1"]
    [example] = read_examples(compose(words).data, "train")
    [sample] = encode(example, tokenizer, None, SFTConfig(max_length=100_000), ends_of(tokenizer))
    prompt = len(episode.token_ids)
    assert sample.token_ids[:prompt].tolist() == episode.token_ids and not sample.mask[:prompt].any()
    said = tokenizer.decode(sample.token_ids[prompt:], skip_special_tokens=True)
    assert said.endswith("42") and sample.mask[prompt:].all()


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("multply", {"a": 6, "b": 7}, "there is no tool multply"),
        ("multiply", {"a": 6, "b": "7"}, "b: Input should be a valid integer"),
        ("multiply", {"a": 6}, "missing a required argument: 'b'"),
    ],
)
def test_a_call_that_the_environment_would_not_take_is_refused(name, arguments, problem):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
    with pytest.raises(UserError, match=f"supervised_chat: a call of {name}: .*{problem}"):
        supervised_chat(Calculator, ROW, [call, *CHAT[3:]])


def test_a_chat_with_calls_is_what_the_episode_would_be(tokenizer):  # noqa: F811
    with_template(tokenizer, "embedded")
    messages = supervised_chat(Calculator, ROW, CHAT)["messages"]

    async def play() -> Conversation:
        environment = Calculator()
        conversation = Conversation(tokenizer, await environment.reset(ROW, 0))
        for reply in (message for message in messages if message["role"] == "assistant"):
            tokens = [*tokenizer.encode(reply["content"], add_special_tokens=False), tokenizer.eos_token_id]
            step = await environment.step(conversation.add_reply(Completion(tokens, [0.0] * len(tokens), "stop", 1)))
            assert step.messages or (step.done and step.reward == 1)
            conversation.add_messages(step.messages, 10_000) if step.messages else None
        return conversation

    conversation = asyncio.run(play())
    assert [dict(message) for message in conversation.messages] == messages
    example = {"prompt": messages[:-1], "answer": messages[-1]["content"]}
    [sample] = encode(example, tokenizer, None, SFTConfig(max_length=100_000), ends_of(tokenizer))
    [played] = conversation.samples()
    assert sample.token_ids.tolist() == played.token_ids.tolist() and sample.mask.tolist() == played.mask.tolist()


def now() -> str:
    """Return the time."""
    return "12:00"


class Clock(Calculator):
    tools = (*Calculator.tools, now)


def test_calls_may_have_any_form_of_the_api():
    calls = [
        {"function": {"name": "multiply", "arguments": {"a": 1, "b": 2}}},
        {"name": "look_up", "arguments": '{"word": "hé"}'},
        {"function": {"name": "now"}},
    ]
    chat = [{"role": "assistant", "content": "Both.", "tool_calls": calls}]
    reply = supervised_chat(Clock, ROW, chat)["messages"][-1]
    assert set(reply) == {"role", "content"}
    said, *found = re.split(r"\n?<tool_call>\n|\n</tool_call>\n?", reply["content"])
    assert said == "Both." and [json.loads(text) for text in found if text] == [
        {"name": "multiply", "arguments": {"a": 1, "b": 2}},
        {"name": "look_up", "arguments": {"word": "hé"}},
        {"name": "now", "arguments": {}},
    ]


class World:
    closed = 0

    def __init__(self, most: int = 1):
        self.most = most

    def reset(self, row, seed):
        return [{"role": "user", "content": f"{row['word']} {seed} {self.most}"}]

    def step(self, reply):
        return StepResult(done=True)

    def close(self):
        World.closed += 1


def test_any_environment_gives_the_beginning_and_is_closed():
    chat = [{"role": "assistant", "content": "x"}]
    made = supervised_chat(World, {"word": "a"}, chat, seed=3, most=5)
    assert made == {"messages": [{"role": "user", "content": "a 3 5"}, *chat]} and World.closed == 1


@pytest.mark.parametrize("chat", [[], CHAT[:2], CHAT[:4]])
def test_a_chat_without_a_reply_at_its_end_is_refused(chat):
    with pytest.raises(UserError, match="the chat must end with a reply"):
        supervised_chat(Calculator, ROW, chat)


def test_it_works_where_an_event_loop_runs():
    async def notebook() -> dict:
        return supervised_chat(Calculator, ROW, CHAT)

    assert asyncio.run(notebook()) == supervised_chat(Calculator, ROW, CHAT)


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    docs = Path(__file__).parents[4] / "docs"
    blocks = {name: re.findall(r"```python\n(.*?)```", (docs / name).read_text(), re.S) for name in
              ("environments.md", "supervised.md")}  # fmt: skip
    [calculator] = [text for text in blocks["environments.md"] if "class Calculator" in text]
    [example] = [text for text in blocks["supervised.md"] if "supervised_chat(" in text]
    (tmp_path / "calculator.py").write_text(calculator)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "calculator", raising=False)
    exec(example, {})
    messages = json.loads((tmp_path / "chats.jsonl").read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert "multiply" in messages[0]["content"] and "<tool_call>" in messages[2]["content"]
