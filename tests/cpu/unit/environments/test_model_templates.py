"""Conversations under the templates that models are published with, by the library `renderers` and without it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu.unit.environments.test_rendering import LONG, TEXT, TOOLS, USER_ASKS, make_tokenizer, sampled
from trainer.config import ModelConfig
from trainer.data.datasets import render_text
from trainer.environments.conversation import Conversation
from trainer.environments.rendering import ChatRenderer, find_renderer
from trainer.environments.tools import with_tools
from trainer.errors import UserError
from trainer.generation.engine import Completion
from trainer.models.tokenizer import _with_fixed_date, _with_variables

TEMPLATES = Path(__file__).resolve().parents[3] / "support" / "model_templates"
RENDERED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("qwen3", "Qwen/Qwen3-0.6B", {}),
    "qwen3 without thoughts": ("qwen3", "Qwen/Qwen3-0.6B", {"enable_thinking": False}),  # conf/model/qwen3_0.6b.yaml
    "qwen3_instruct_2507": ("qwen3_instruct_2507", "Qwen/Qwen3-4B-Instruct-2507", {}),
    "qwen3_5_think": ("qwen3_5_think", "Qwen/Qwen3.5-4B", {}),
    "qwen3_5_think without thoughts": ("qwen3_5_think", "Qwen/Qwen3.5-4B", {"enable_thinking": False}),
    "qwen3_5_nothink": ("qwen3_5_nothink", "Qwen/Qwen3.5-0.8B", {}),
    "glm4moe": ("glm4moe", "zai-org/GLM-4.5-Air", {}),
}
"""Templates, models whose format the library knows, and `model.chat_template_kwargs`."""
SPECIAL = r"<\|[\w ]+\|>|<｜[^｜<>]+｜>|</?arg_\w+>|<\|[\w\"]+>|<[\w\"]+\|>"
MORE = [
    *("[gMASK]", "<sop>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<|end_of_text|>", "<|eom_id|>", "<|python_tag|>", "<bos>", "<eos>", "<pad>", "<|think|>"),  # Llama 3, Gemma 4
    *("<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>", "<|video>", "<|video|>", "<video|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),  # gpt-oss
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),  # DeepSeek
]
"""Tokens of models that their templates do not name, but their renderers do."""
END = "zq7"
"""The last thing that a reply says."""
ARGUMENT = TEXT | st.integers(-3, 99) | st.booleans() | st.lists(st.integers(0, 3), max_size=2)
TEXTS = TEXT | st.just("日本 ñ🙂")


def tokenizer_of(name: str, folder: Path = TEMPLATES, variables: Mapping[str, Any] | None = None) -> Any:
    """A small tokenizer with the template of a model, its variables and the special tokens that it writes."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text()
    special = re.findall(SPECIAL, tokenizer.chat_template)
    tokenizer.add_tokens(sorted({*special, *MORE}), special_tokens=True)
    if "bos_token" in tokenizer.chat_template:
        begins = {"llama": "<|begin_of_text|>", "deeps": "<｜begin▁of▁sentence｜>"}
        tokenizer.bos_token = begins.get(name[:5], "<bos>")
    tokenizer.chat_template = _with_variables(_with_fixed_date(tokenizer.chat_template), variables or {})
    return tokenizer


def known_format(name: str, path: str, variables: Mapping[str, Any], folder: Path = TEMPLATES) -> tuple[Any, Any]:
    """A tokenizer, and the renderer of its model."""
    tokenizer = tokenizer_of(name, folder, variables)
    tokenizer.name_or_path = path
    renderer = find_renderer(ModelConfig(path=path, chat_template_kwargs=dict(variables)), tokenizer, LONG)
    assert isinstance(renderer, ChatRenderer)
    return tokenizer, renderer


@pytest.fixture(scope="module", params=RENDERED)
def known(request) -> tuple[Any, Any]:
    return known_format(*RENDERED[request.param])


def call(number: int, name: str, x: Any) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": {"x": x}}}


@st.composite
def rounds(draw: Any, ends: bool = True) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A reply, whose last word is `END`, and the messages that follow it."""
    content, thought = draw(TEXTS), draw(TEXTS)
    values = draw(st.lists(st.tuples(st.sampled_from(["search", "add"]), TEXTS if ends else ARGUMENT), max_size=2))
    if ends and values:
        values[-1] = (values[-1][0], draw(TEXTS) + END)
    reply: dict[str, Any] = {"role": "assistant", "content": content + END if ends and not values else content}
    calls = [call(number, *one) for number, one in enumerate(values)]
    if thought.strip():
        reply["reasoning_content"] = thought
    if not calls:
        return reply, [{"role": "user", "content": draw(TEXTS)}]
    answers = [
        {"role": "tool", "tool_call_id": one["id"], "name": one["function"]["name"], "content": draw(TEXTS)}
        for one in calls
    ]
    return {**reply, "tool_calls": calls}, answers


def fitting(tokenizer: Any, reply: Any, new: Any) -> tuple[Any, Any]:
    """Return a round as the format of a model can have it."""
    calls = reply.get("tool_calls")
    if calls and "<|tool_response>" in tokenizer.chat_template:  # Gemma 4 moves such a text behind the answers
        return {**reply, "content": ""}, new
    if calls and "single tool-calls" in tokenizer.chat_template:  # Llama 3.2 has one call, and no text beside it
        return {**reply, "content": "", "tool_calls": calls[-1:]}, new[-1:]
    if calls and "<|tool_call_start|>" in tokenizer.chat_template:  # LFM2.5 writes text between quotes as it is
        for one in calls:
            arguments = one["function"]["arguments"].items()
            one["function"]["arguments"] = {key: str(value).replace("'", "") for key, value in arguments}
    return reply, new


@settings(max_examples=60, deadline=None)
@given(
    system=TEXTS | st.none(),
    first=TEXTS,
    turns=st.lists(rounds(ends=False), max_size=3),
    has_tools=st.booleans(),
)
def test_a_prompt_has_the_tokens_that_the_template_gives(known, system, first, turns, has_tools):
    """Calls, answers and thoughts of its history included."""
    tokenizer, renderer = known
    begin = [{"role": "system", "content": system}] if system else []
    turns = [fitting(tokenizer, *turn) for turn in turns]
    messages = [*begin, {"role": "user", "content": first}, *(one for reply, new in turns for one in (reply, *new))]
    text = render_text(tokenizer, messages, add_generation_prompt=True, tools=TOOLS if has_tools else None)
    prompt = Conversation(tokenizer, with_tools(messages, TOOLS) if has_tools else messages, renderer=renderer)
    assert prompt.token_ids == tokenizer.encode(text, add_special_tokens=False)


STOPS = ("<|im_end|>", "<|user|>", "<|observation|>", "<|eot_id|>", "<|eom_id|>", "<turn|>", "<|tool_response>")


def stops_of(tokenizer: Any, renderer: Any) -> set[int]:
    """Return the tokens that end a reply."""
    if isinstance(renderer, ChatRenderer):
        return renderer.stops()
    return {tokenizer.convert_tokens_to_ids(stop) for stop in STOPS if stop in tokenizer.chat_template}


def written(tokenizer: Any, renderer: Any, reply: Any, new: Any) -> tuple[Completion, list[int]]:
    """Return a reply as the policy samples it in the template's format, and the tokens that the template adds."""
    prompt = render_text(tokenizer, [USER_ASKS], add_generation_prompt=True, tools=TOOLS)
    if prompt.rstrip().endswith("</think>"):  # it does not think
        reply = {name: value for name, value in reply.items() if name != "reasoning_content"}
    whole = render_text(tokenizer, [USER_ASKS, reply, *new], add_generation_prompt=True, tools=TOOLS)
    said, end, rest = whole.rpartition(END)
    begin = os.path.commonprefix([tokenizer.encode(text, add_special_tokens=False) for text in (said, prompt)])
    says = said[len(tokenizer.decode(begin)) :] + end
    if prompt.endswith("<think>\n") and "</think>" not in says:
        says = f"hm\n</think>\n\n{says}"
    after = tokenizer.encode(rest, add_special_tokens=False)
    stop = next(index for index, token in enumerate(after) if token in stops_of(tokenizer, renderer))
    return sampled(tokenizer, says + tokenizer.decode(after[: stop + 1])), after[stop + 1 :]


def calls_of(message: Any, tokenizer: Any) -> list[Any]:
    """Return the names and arguments of calls; formats without JSON lose the blanks around an argument."""
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])]
    if '"arguments": ' in tokenizer.chat_template:
        return calls
    return [(name, {key: value.strip() for key, value in arguments.items()}) for name, arguments in calls]


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(rounds(), min_size=1, max_size=4))
def test_what_was_sampled_stays_and_is_followed_by_what_the_template_writes(known, turns):
    check_rounds(*known, turns)


def check_rounds(tokenizer: Any, renderer: Any, turns: Any) -> None:
    """Check the tokens of a conversation with tools, round by round."""
    conversation = Conversation(tokenizer, with_tools([USER_ASKS], TOOLS), renderer=renderer)
    total = 0
    for reply, new in turns:
        reply, new = fitting(tokenizer, reply, new)
        completion, following = written(tokenizer, renderer, reply, new)
        before = conversation.token_ids.copy()
        said = conversation.add_reply(completion)
        assert calls_of(said, tokenizer) == calls_of(reply, tokenizer)
        assert conversation.add_messages(new, LONG)
        assert conversation.token_ids == [*before, *completion.token_ids.tolist(), *following]
        total += len(completion.token_ids)
    (sample,) = conversation.samples()
    assert sample.mask.sum() == total


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("gptoss", "openai/gpt-oss-20b"),
        ("deepseek_r1_distill", "deepseek-ai/DeepSeek-R1"),
        ("glm4moe", "Qwen/Qwen3-0.6B"),
        ("qwen3_5_think", "Qwen/Qwen3.5-0.8B"),
    ],
    ids=["writes the next turn's channel", "drops calls", "of another model", "of another size"],
)
def test_a_renderer_that_writes_or_reads_otherwise_is_not_used(name, path):
    tokenizer = tokenizer_of(name)
    tokenizer.name_or_path = path
    assert find_renderer(ModelConfig(path=path), tokenizer, LONG) is None


@pytest.mark.parametrize("name", ["qwen3", "qwen3_instruct_2507", "qwen3_5_think", "gptoss"])
def test_without_a_renderer_sampled_tokens_stay_too(name):
    """Thoughts that the template would drop from earlier turns, between text of its own."""
    tokenizer = tokenizer_of(name)
    conversation = Conversation(tokenizer, [USER_ASKS])
    prompt = list(conversation.token_ids)
    stop = "<|return|>" if name == "gptoss" else "<|im_end|>"
    reply = sampled(tokenizer, f"hm\n</think>\n\n4 {stop}")
    conversation.add_reply(reply)
    assert conversation.add_messages([{"role": "user", "content": "and 3?"}], LONG)
    first, *more = conversation.samples()
    assert first.token_ids[: len(prompt) + len(reply.token_ids)].tolist() == [*prompt, *reply.token_ids.tolist()]
    assert first.mask.sum() == len(reply.token_ids) and not any(sample.mask.any() for sample in more)


QWEN25_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
"""What the template of Qwen2.5 writes where a conversation has no system message."""


@settings(max_examples=60, deadline=None)
@given(
    system=TEXTS.filter(str.strip) | st.none(),
    first=TEXTS,
    described=TEXTS,
    rounds=st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), max_size=3),
)
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_as_text_of_hermes_tools_and_answers_are_written_as_by_the_template(name, system, first, described, rounds):
    """With `model.tool_format=hermes`. It is the format of these models: the tokens are those of `tools`, but for the
    system message that Qwen2.5 adds."""
    tokenizer = tokenizer_of(name, variables={"enable_thinking": False})
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "description": described}}, TOOLS[1]]
    if system is None and name == "qwen2_5":
        system = QWEN25_SYSTEM
    begin = [{"role": "system", "content": system}] if system else []
    messages = [*begin, {"role": "user", "content": first}]
    conversation = Conversation(tokenizer, with_tools(messages, tools))
    expected = tokenizer.encode(render_text(tokenizer, messages, True, tools=tools), add_special_tokens=False)
    for text, answer, calls in rounds:
        said = f'{text}<tool_call>\n{{"name": "add", "arguments": {{"x": "1"}}}}\n</tool_call>' if calls else text
        reply, new = sampled(tokenizer, f"{said}<|im_end|>"), [{"role": "tool" if calls else "user", "content": answer}]
        conversation.add_reply(reply)
        assert conversation.add_messages(new, LONG)
        messages += [{"role": "assistant", "content": END}, *new]
        after = render_text(tokenizer, messages, True, tools=tools).rpartition(f"{END}<|im_end|>")[2]
        expected += [*reply.token_ids.tolist(), *tokenizer.encode(after, add_special_tokens=False)]
    assert len(conversation.samples()) == 1
    assert conversation.token_ids == expected


DROPS = (
    "{%- for m in messages %}{%- if m.role != 'ROLE' %}{{ '[' + m.role + ']' + m.content }}{%- endif %}{%- endfor %}"
)


@pytest.mark.parametrize("role", ["tool", "system"])
def test_a_template_that_drops_messages_is_refused(role):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = DROPS.replace("ROLE", role)
    message = {"role": role, "content": "7"}
    with pytest.raises(UserError, match=f"drops messages of the role {role}, which the policy would not see"):
        Conversation(tokenizer, [message, USER_ASKS])
    conversation = Conversation(tokenizer, [USER_ASKS])
    conversation.add_reply(sampled(tokenizer, "call<|im_end|>"))
    with pytest.raises(UserError, match=f"drops messages of the role {role}"):
        conversation.add_messages([message], LONG)


@pytest.mark.parametrize("role", ["User", "function"])
def test_a_renderer_does_not_let_messages_of_an_unknown_role_vanish(known, role):
    """The templates of Qwen3 and GLM write nothing of them."""
    tokenizer, renderer = known
    message = {"role": role, "content": "7"}
    with pytest.raises(UserError, match="role"):
        Conversation(tokenizer, [USER_ASKS, message], LONG, renderer)
    conversation = Conversation(tokenizer, [USER_ASKS], LONG, renderer)
    conversation.add_reply(sampled(tokenizer, "4<|im_end|>" if "<|im_end|>" in tokenizer.get_vocab() else "4<|user|>"))
    with pytest.raises(UserError, match="role"):
        conversation.add_messages([message], LONG)
