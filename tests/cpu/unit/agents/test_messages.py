"""Messages of the chat API: what is read, what is refused, and which text they become."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.agents.chat_wire import _function, parse_messages
from trainer.agents.messages import ApiError, ChatMessage, read_tools
from trainer.environments.tools import ToolCall, split_calls

CALL = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"b":1, "a": 2}'}}


def test_messages_of_all_roles_become_text():
    messages = parse_messages(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1?"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
            {"role": "tool", "tool_call_id": "x", "name": "add", "content": "3"},
            {"role": "assistant", "content": "3"},
        ]
    )
    assert [message.message for message in messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": '<tool_call>\n{"name": "add", "arguments": {"b": 1, "a": 2}}\n</tool_call>'},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]


def test_a_message_that_cannot_be_read_is_refused_by_its_field():
    for messages, field in [
        (None, "messages"),
        ([], "messages"),
        (["x"], "messages[0]"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "name": "me"}], "messages[0].name"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "audio": {"id": 1}}], "messages[1].audio"),
        ([{"role": "assistant", "tool_calls": {}}], None),
        ([{"role": "assistant", "tool_calls": [3]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ]:
        if field is None:
            parse_messages(messages)
            continue
        with pytest.raises(ApiError) as refusal:
            parse_messages(messages)
        assert refusal.value.param == field and field in refusal.value.message and refusal.value.status == 400


def test_a_reply_with_calls_is_told_from_its_text():
    text = 'Hm.\n<tool_call>\n{"name": "add", "arguments": {"a": 1.5}}\n</tool_call>\n<tool_call>{"name": "now"}'
    reply = ChatMessage("assistant", *split_calls(text))
    assert reply == ChatMessage("assistant", "Hm.", (ToolCall("add", '{"a": 1.5}'), ToolCall("now", "{}")))


def test_a_call_that_cannot_be_read_stays_text():
    for call in [
        "{",
        "3",
        '{"name": 3}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": {"a": NaN}}',
        "[" * 10_000,
    ]:
        text = f'<tool_call>{{"name": "f"}}</tool_call><tool_call>{call}</tool_call>'
        assert split_calls(text) == (text, ())


ARGUMENTS = st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=5))


@settings(max_examples=25)
@given(
    st.text(max_size=30), st.lists(st.tuples(st.text(max_size=8), ARGUMENTS), max_size=3), st.sampled_from([1, None])
)
def test_what_agents_make_of_a_reply_has_its_identity(text: str, calls: list[Any], indent: Any):
    """They send its fields back, write the arguments in their own way, and may strip the content."""
    written = [f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in calls]
    reply = ChatMessage("assistant", *split_calls("\n".join([text, *written])))
    returned: dict[str, Any] = {"role": "assistant", "content": reply.content.strip() or None}
    if reply.calls:
        returned["tool_calls"] = [
            {"id": "x", "type": "function", "function": {
                "name": call.name, "arguments": json.dumps(json.loads(call.arguments), indent=indent, sort_keys=True)}}
            for call in reply.calls
        ]  # fmt: skip
    (again,) = parse_messages([returned])
    assert again.identity == reply.identity


def test_tools_are_functions():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    assert read_tools([tool], _function) == (
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    )
    for wrong in ("f", {"f": 1}, [{"type": "web_search"}], [{"type": "function", "function": {}}]):
        with pytest.raises(ApiError, match="tools"):
            read_tools(wrong, _function)
