"""The calls of an episode where a renderer writes and reads in place of the chat template."""

from __future__ import annotations

import pytest

from tests.cpu.unit.agents.test_call_tree import TOOL, Talk, user
from tests.cpu.unit.environments.test_rendering import renderer, tokenizer  # noqa: F401 - fixtures


def test_a_renderer_writes_tools_and_reads_calls_in_the_format_of_its_model(tokenizer, renderer):  # noqa: F811
    """Also calls of the history that the policy has not written."""
    talk = Talk(tokenizer, 10_000, renderer)
    call = '<tool_call>\n{"name": "add",  "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    (one,) = talk.ask([user("a")], f"Hm.\n{call}", tools=[TOOL])
    assert one["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    answer = {"role": "tool", "tool_call_id": "x", "content": "7"}
    (two,) = talk.ask([user("a"), one, answer], "<think>\n7?\n</think>\n\nIt is 7.<|im_end|>", tools=[TOOL])
    talk.ask([user("a"), one, answer, two, user("sure?")], "Yes.<|im_end|>", tools=[TOOL])
    changed = {**one, "content": "Other."}
    talk.ask([user("a"), changed, answer], "8<|im_end|>", tools=[TOOL])
    first, second = talk.texts()
    assert call in first and first.count("<tool_response>") == 1 and first.startswith("<|im_start|>system\n# Tools")
    assert 'Other.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in second
    talk.check()


@pytest.mark.parametrize(
    "call",
    [
        '{"name": 5, "arguments": {}}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": "\\ud800"}}',
        '{"name": "add\\ud800", "arguments": {}}',
        '{"name": "add", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}",
    ],
)
def test_a_call_that_an_agent_could_not_send_back_is_text(tokenizer, renderer, call):  # noqa: F811
    talk = Talk(tokenizer, 10_000, renderer)
    said = f"<tool_call>\n{call}\n</tool_call>"
    (one,) = talk.ask([user("a")], f"{said}<|im_end|>", tools=[TOOL])
    assert one == {"role": "assistant", "content": said}
    talk.ask([user("a"), one, user("what?")], "Nothing.<|im_end|>", tools=[TOOL])
    assert len(talk.texts()) == 1
    messages, _ = talk.tree.transcript()
    assert "tool_calls" not in messages[1]
    talk.check()
