"""Chats of rows, and whether a template writes them. `test_datasets.py` and `test_turns.py` have whole rows."""

from __future__ import annotations

import pytest

from tests.support.chat_templates import TEMPLATES
from tests.support.tool_templates import tokenizer_of
from trainer.data.chats import PromptCheck, check_generation_prompt, read_chat, says, unsaid_field
from trainer.data.datasets import render_text
from trainer.errors import UserError

ASK = {"role": "user", "content": "How  much?\n"}


def test_a_chat_has_roles_and_texts():
    for chat, read in [
        ([ASK], [ASK]),
        ([{**ASK, "name": None}], [ASK]),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{}]}],
            [{"role": "assistant", "content": "", "tool_calls": [{}]}],
        ),
        ([{"role": "assistant", "tool_calls": [{}]}], [{"role": "assistant", "content": "", "tool_calls": [{}]}]),
        ([{"role": "assistant", "content": None}], None),
        ([{"role": "assistant", "content": None, "tool_calls": []}], None),
        ([{"content": "x"}], None),
        ([{"role": "user", "content": 1}], None),
        (["x"], None),
        ([], None),
        ("x", None),
    ]:
        assert read_chat(chat) == read


@pytest.mark.parametrize("part", ["How  much?\n", "how much", 'say "hi"\n', "é", "", " \n", "?"])
@pytest.mark.parametrize("text", ['[user] How much? SAY "HI" ?é', '"How  much?\\n say \\"hi\\"\\n \\u00e9 ?"'])
def test_blanks_case_and_escapes_do_not_count(text, part):
    assert says(text, part)


def test_what_a_text_does_not_say_is_found():
    assert not says("[user] How much?", "How many?") and not says("How much", "!")
    call = {"type": "function", "id": "c", "function": {"name": "find", "arguments": '{"x": ["Rome", 3.5], "y": true}'}}
    message = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes", "tool_calls": [call]}
    text = "<think>hm</think>yes<call>find(x=['Rome', 3.5], y=True)</call>"
    assert unsaid_field(text, message) == ""
    assert unsaid_field(text.replace("hm", ""), message) == "content"
    assert unsaid_field(text.replace("Rome", "Oslo"), message) == "tool_calls"
    assert unsaid_field(text, {**message, "reasoning": "so"}) == "reasoning"


@pytest.mark.parametrize("name", [*TEMPLATES, "qwen2_5", "glm4moe", "gptoss", "deepseek_r1_distill", "qwen3_5_think"])
def test_templates_of_models_lose_no_prompt(name, tokenizer, caplog):
    """Also those that write nothing before a reply, drop thoughts of the history, or trim texts."""
    if name in TEMPLATES:
        tokenizer.chat_template = TEMPLATES[name][0]
    else:
        tokenizer = tokenizer_of(name)
    check = PromptCheck(tokenizer)
    for word in ("one", "two"):
        reply = {"role": "assistant", "content": f"<think>\nso\n</think>\n\n{word}"}
        chat = [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": f" {word} "}, reply, ASK]
        text = render_text(tokenizer, chat, add_generation_prompt=True)
        check.add(chat, text, [1], lambda: "row 1")
    check.close()
    assert not caplog.messages


def test_a_template_that_writes_nothing_before_a_reply_needs_no_generation_prompt(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}] {% endfor %}"
    with pytest.raises(UserError, match=r"writes no generation prompt, and '\[' before a reply"):
        check_generation_prompt(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content if m.role == 'assistant' else '[' + m.content + ']' }}"
    )
    tokenizer.chat_template += " {% endfor %}"
    check_generation_prompt(tokenizer)


def test_characters_that_the_tokenizer_does_not_know_are_named(tokenizer, caplog):
    tokenizer.add_special_tokens({"unk_token": "<unk>"})
    check = PromptCheck(tokenizer)
    check.add([ASK], "How much?", [3, tokenizer.unk_token_id], lambda: "row 7")
    check.close()
    assert caplog.messages[0].endswith("a character that the tokenizer does not know is left out; the first is row 7")
