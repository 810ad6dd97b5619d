"""Calls of tools in replies."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from trainer.environments.tools import ToolCall, normal_arguments, read_calls, split_calls

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text('aé<"\n'),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab"), inner, max_size=2),
    max_leaves=4,
)
CALL = st.builds(
    lambda name, arguments: ToolCall(name, json.dumps(arguments, ensure_ascii=False)),
    st.text("ab_", min_size=1),
    st.dictionaries(st.text("xy", min_size=1), JSON, max_size=2),
)


@given(calls=st.lists(CALL, max_size=3), text=st.sampled_from(["", "So:", "é {}"]))
def test_calls_that_are_written_are_read(calls, text):
    calls = [call for call in calls if "</tool_call>" not in call.arguments]
    assert split_calls("\n".join([text, *map(str, calls)]).strip()) == (text, tuple(calls))


def test_a_reply_with_a_call_that_cannot_be_read_is_all_text():
    for call in ["{", '{"name": "a", "arguments": [1]}', '{"name": 1}', '{"name": "a", "arguments": NaN}']:
        good = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
        assert split_calls(f"{good}<tool_call>{call}</tool_call>") == (f"{good}<tool_call>{call}</tool_call>", ())


def test_calls_of_a_renderer_are_read_unless_they_cannot_be_sent_back():
    def reply(arguments):
        return {"tool_calls": [{"function": {"name": "a", "arguments": arguments}}]}

    assert read_calls(reply({"x": 1})) == (ToolCall("a", '{"x": 1}'),)
    assert read_calls({"content": "no call"}) == ()
    assert read_calls(reply({"x": float("nan")})) is None


def test_equal_arguments_have_one_text():
    assert normal_arguments('{"x":1,\n"y":"\\u00e9"}') == '{"x": 1, "y": "é"}'
    assert normal_arguments("[1]") is normal_arguments("{") is None
