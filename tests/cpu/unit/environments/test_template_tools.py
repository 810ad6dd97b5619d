"""Tools in the format of published chat templates."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu.unit.agents.test_call_tree import TOOL, Talk, user
from tests.support import tool_templates as same
from tests.support.chat_templates import LLAMA3
from tests.support.episodes import requests_of, run, runner_config
from tests.support.response_templates import CHANNELS, GLM_CALLS, JSON_CALLS, XML_CALLS
from tests.support.tool_templates import (
    LONG,
    QWEN25_SYSTEM,
    TEXTS,
    TOOLS,
    USER_ASKS,
    Qwen,
    fitting,
    make_tokenizer,
    rounds,
    sampled,
    tokenizer_of,
)
from trainer.agents.call_tree import call_id
from trainer.config import ModelConfig
from trainer.data.datasets import render_text
from trainer.environments.conversation import Conversation
from trainer.environments.episode_runner import EnvironmentRunner
from trainer.environments.template_tools import TemplateTools, _log_fallback, find_reader
from trainer.environments.tools import split_tools, with_tools
from trainer.errors import UserError

NATIVE: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "Qwen2.5": ("qwen2_5", None, {}),
    "Qwen3": ("qwen3", None, {}),
    "Qwen3 without thoughts": ("qwen3", None, {"enable_thinking": False}),
    "Qwen3-2507": ("qwen3_instruct_2507", None, {}),
    "Qwen2.5 by response_template": ("qwen2_5", JSON_CALLS, {}),
    "GLM-4.5": ("glm4moe", GLM_CALLS, {}),
}
"""Templates, the `response_template` of their tokenizers, and `model.chat_template_kwargs`."""
HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"x": "1"}}\n</tool_call>'


def native(name: str, response_template: Any = None, variables: Any = None) -> tuple[Any, TemplateTools]:
    """A tokenizer with the template of a model, and what reads its replies."""
    tokenizer = tokenizer_of(name, variables=variables)
    tokenizer.response_template = response_template
    found = find_reader(ModelConfig(path="mine/model"), tokenizer)
    assert isinstance(found, TemplateTools)
    return tokenizer, found


@pytest.fixture(scope="module", params=NATIVE)
def known(request) -> tuple[Any, TemplateTools]:
    return native(*NATIVE[request.param])


@settings(max_examples=12, deadline=None)
@given(
    system=TEXTS | st.none(),
    first=TEXTS,
    turns=st.lists(rounds(ends=False), max_size=3),
    has_tools=st.booleans(),
)
def test_a_prompt_has_the_tokens_that_the_template_gives(known, system, first, turns, has_tools):
    """Calls, answers and thoughts of its history included."""
    tokenizer, reader = known
    begin = [{"role": "system", "content": system}] if system else []
    turns = [fitting(tokenizer, *turn) for turn in turns]
    messages = [*begin, {"role": "user", "content": first}, *(one for reply, new in turns for one in (reply, *new))]
    text = render_text(tokenizer, messages, add_generation_prompt=True, tools=TOOLS if has_tools else None)
    prompt = Conversation(tokenizer, with_tools(messages, TOOLS) if has_tools else messages, reader=reader)
    assert prompt.token_ids == tokenizer.encode(text, add_special_tokens=False)


@settings(max_examples=12, deadline=None)
@given(turns=st.lists(rounds(), min_size=1, max_size=4))
def test_what_was_sampled_stays_and_is_followed_by_what_the_template_writes(known, turns):
    same.check_rounds(*known, turns)


@settings(max_examples=10, deadline=None)
@given(turns=st.lists(same.rounds().filter(lambda one: "tool_calls" in one[0]), min_size=1, max_size=3), text=TEXTS)
@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_5_nothink"])
def test_calls_of_qwen35_are_read_and_answered_until_the_user_speaks(name, turns, text):
    """Then its template drops the thoughts before that, so a new sample begins."""
    tokenizer, reader = native(name, XML_CALLS)
    same.check_rounds(tokenizer, reader, turns)
    conversation = ask(tokenizer, reader)
    for reply, new in [*turns, ({"role": "assistant", "content": same.END}, [{"role": "user", "content": text}])]:
        completion, _ = same.written(tokenizer, reply, new)
        conversation.add_reply(completion)
        assert conversation.add_messages(new, LONG)
    first, second = conversation.samples()
    assert first.mask.any() and not second.mask.any()
    whole = render_text(tokenizer, split_tools(conversation.messages)[0], True, tools=TOOLS)
    assert tokenizer.decode(second.token_ids) == whole


def ask(tokenizer: Any, reader: TemplateTools, tools: Any = TOOLS) -> Conversation:
    return Conversation(tokenizer, with_tools([USER_ASKS], tools), reader=reader)


@settings(max_examples=10, deadline=None)
@given(system=TEXTS.filter(str.strip) | st.none(), first=TEXTS)
def test_the_template_of_qwen25_adds_its_own_system_message(system, first):
    """As it does for tools that are given to it. The text of Hermes would take its place."""
    tokenizer, reader = native("qwen2_5")
    begin = [{"role": "system", "content": system}] if system else []
    messages = [*begin, {"role": "user", "content": first}]
    conversation = Conversation(tokenizer, with_tools(messages, TOOLS), reader=reader)
    text = tokenizer.decode(conversation.token_ids)
    assert text == render_text(tokenizer, messages, True, tools=TOOLS)
    assert text.startswith(f"<|im_start|>system\n{system or QWEN25_SYSTEM}\n\n# Tools")


@settings(max_examples=10, deadline=None)
@given(answers=st.lists(TEXTS, min_size=1, max_size=3), values=st.lists(TEXTS, min_size=3, max_size=3))
def test_calls_of_gpt_oss_are_read_and_answered_in_its_channels(answers, values):
    """Its calls end in another token than its answers, and it writes the name of the tool before a result."""
    tokenizer, reader = native("gptoss", CHANNELS)
    conversation = ask(tokenizer, reader)
    messages, expected = [USER_ASKS], list(conversation.token_ids)
    for answer, value in zip(answers, values, strict=False):
        call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"x": value}}}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        before = render_text(tokenizer, messages, True, tools=TOOLS)
        whole = render_text(tokenizer, [*messages, reply], False, tools=TOOLS)
        completion = sampled(tokenizer, whole.removeprefix(before))
        assert conversation.add_reply(completion)["tool_calls"] == [call]
        new = {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": answer}
        assert conversation.add_messages([new], LONG)
        messages += [reply, new]
        after = render_text(tokenizer, messages, True, tools=TOOLS).removeprefix(whole)
        expected += [*completion.token_ids.tolist(), *tokenizer.encode(after, add_special_tokens=False)]
    assert len(conversation.samples()) == 1
    assert conversation.token_ids == expected
    assert tokenizer.decode(expected).count("<|start|>functions.add to=assistant") == len(answers)


@pytest.mark.parametrize("stop", ["<|user|>", "<|assistant|>", "</tool_call>"])
def test_a_reply_with_calls_that_ends_in_another_token_begins_a_new_sample(stop):
    """Also in one that the template writes further on: what lies between must not get lost."""
    tokenizer, reader = native("glm4moe", GLM_CALLS)
    conversation = ask(tokenizer, reader)
    call = "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    completion = sampled(tokenizer, call.removesuffix(stop) + stop)
    said = conversation.add_reply(completion)
    new = [{"role": "tool", "content": "seven"}, {"role": "user", "content": "And?"}]
    assert conversation.add_messages(new, LONG)
    samples = conversation.samples()
    assert len(said["tool_calls"]) == 1 and len(samples) == 1 + (stop != "</tool_call>")
    assert samples[0].mask.sum() == len(completion.token_ids) == sum(sample.mask.sum() for sample in samples)
    last = tokenizer.decode(conversation.token_ids)
    assert last.count("seven") == last.count("And?") == 1


def test_a_call_that_cannot_be_read_is_named_and_its_answer_is_seen():
    """The template of gpt-oss refuses an answer without a call."""
    for call, known in [
        ("{broken", {"problem": "invalid json"}),
        ("[" * 2000, {"problem": "RecursionError"}),
        (f'{{"x": {"1" * 5000}}}', {"problem": "invalid json"}),
        ('{"x": NaN}', {"name": "add", "id": "call_0", "problem": "no readable arguments"}),
        ("[1]", {"name": "add", "id": "call_0", "problem": "no readable arguments"}),
    ]:
        tokenizer, reader = native("gptoss", CHANNELS)
        conversation = ask(tokenizer, reader)
        completion = sampled(tokenizer, f" to=functions.add<|channel|>commentary json<|message|>{call}<|call|>")
        said = conversation.add_reply(completion)
        assert "tool_calls" not in said and call in said["content"] and said["unread_calls"] == [known]
        assert conversation.add_messages([{"role": "tool", "content": "cannot be read"}], LONG)
        (sample,) = conversation.samples()
        assert sample.mask.sum() == len(completion.token_ids)
        text = tokenizer.decode(conversation.token_ids)
        assert text.count("cannot be read") == 1 and text.endswith("<|start|>assistant")


@pytest.mark.parametrize("call", ["{broken", '{"name": ["add"], "arguments": {}}', '{"name": "add", "arguments": 1}'])
def test_a_call_of_hermes_that_cannot_be_read_stays_in_the_text(call):
    tokenizer, reader = native("qwen2_5")
    text = f"{HERMES_CALL}<tool_call>\n{call}\n</tool_call>"
    assert ask(tokenizer, reader).add_reply(sampled(tokenizer, f"{text}<|im_end|>")) == {
        "role": "assistant",
        "content": text,
    }


@settings(max_examples=10, deadline=None)
@given(turns=st.lists(same.rounds(), min_size=1, max_size=3))
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_conversations_without_tools_stay_as_they_were(name, turns):
    """Also those whose environment has its own description of tools."""
    tokenizer, reader = native(name)
    begin = [{"role": "system", "content": "Call <tool_call>."}, USER_ASKS]
    ours, theirs = Conversation(tokenizer, begin, reader=reader), Conversation(tokenizer, begin)
    for reply, new in turns:
        for conversation in (ours, theirs):
            conversation.add_reply(sampled(tokenizer, f"{reply['content']}{HERMES_CALL}<|im_end|>"))
            conversation.add_messages([{"role": one["role"], "content": one["content"]} for one in new], LONG)
    assert ours.messages == theirs.messages
    assert [s.token_ids.tolist() for s in ours.samples()] == [s.token_ids.tolist() for s in theirs.samples()]


BARE = "{%- for m in messages %}{{ '[' + m.role + ']' + m.content }}<|im_end|>{%- endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LLAMA3, "describes no tools"),
        (BARE + "{{ tools[0].function.name if tools and messages | length == 1 }}", "describes no tools"),
        (BARE + "{{ tools[0].function.name if tools }}", "writes calls of tools in a format that cannot be read"),
        ("glm4moe", "writes calls of tools in a format that cannot be read"),
    ],
    ids=["no tools", "not beside a system message", "no calls", "another format"],
)
def test_otherwise_tools_have_the_format_of_hermes_and_the_log_says_so_once(caplog, template, reason):
    _log_fallback.cache_clear()
    caplog.set_level(logging.INFO)
    for _ in range(2):
        tokenizer = tokenizer_of(template) if template == "glm4moe" else make_tokenizer()
        tokenizer.chat_template = tokenizer.chat_template if template == "glm4moe" else template
        assert find_reader(ModelConfig(path="mine/model"), tokenizer) is None
    (line,) = [line for line in caplog.messages if "Hermes" in line]
    assert reason in line


def test_a_response_template_that_does_not_fit_the_chat_template_is_not_used():
    tokenizer = tokenizer_of("glm4moe")
    tokenizer.response_template = XML_CALLS
    assert find_reader(ModelConfig(path="mine/model"), tokenizer) is None
    _, reader = native("qwen3", GLM_CALLS)
    tokenizer = tokenizer_of("qwen3")
    assert ask(tokenizer, reader).add_reply(sampled(tokenizer, f"{HERMES_CALL}<|im_end|>"))["tool_calls"]


def test_the_built_in_model_keeps_the_format_of_hermes():
    assert find_reader(ModelConfig(path=None), tokenizer_of("qwen2_5")) is None


@pytest.mark.processes
def test_an_environment_gets_the_calls_of_a_format_that_is_not_hermes():
    tokenizer, _ = native("qwen3_5_think", XML_CALLS)
    call = "hm\n</think>\n\n<tool_call>\n<function=multiply>\n" + "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in (("a", 6), ("b", 7))
    )
    policy = Qwen(tokenizer, f"{call}</function>\n</tool_call>", "hm\n</think>\n\n42")
    cfg = runner_config(name="tests.cpu.unit.environments.test_tools:Calculator", max_prompt_tokens=2000)
    cfg.model = ModelConfig(path="mine/model")
    with EnvironmentRunner(cfg, tokenizer) as runner:
        (episode,) = run(runner, policy, requests_of({"prompt": "6*7?", "answer": "42"}))
    assert episode.reward == episode.metrics["tool_calls/multiply"] == 1.0, episode.failure
    assert episode.messages[2]["reasoning_content"] == "hm" and episode.messages[3]["content"] == "42"
    (sample,) = episode.samples
    assert "<tools>\n" in tokenizer.decode(sample.token_ids) and "json object" not in tokenizer.decode(sample.token_ids)


def test_an_agent_gets_calls_of_the_model_and_its_own_are_written_in_its_format():
    tokenizer, reader = native("qwen3_5_nothink", XML_CALLS)
    talk = Talk(tokenizer, 10_000, reader)
    call = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    (one,) = talk.ask([user("a")], f"{call}<|im_end|>", tools=[TOOL])
    assert one["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": "1"}'}
    answer = {"role": "tool", "tool_call_id": "x", "content": "7"}
    talk.ask([user("a"), one, answer], "It is 7.<|im_end|>", tools=[TOOL])
    talk.ask([user("a"), {**one, "content": "Other."}, answer], "8<|im_end|>", tools=[TOOL])
    talk.ask([user("a"), one, answer], "9<|im_end|>")  # without tools: calls are text
    first, second, third = talk.texts()
    assert call in first and first.count("<tool_response>") == 1
    assert f"Other.\n\n{call}" in second and second.count("<tool_response>") == 1
    assert '<tool_call>\n{"name": "add", "arguments": {"a": "1"}}\n</tool_call>' in third
    talk.check()


ANSWERS_CALLS = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{%- endif %}"
    "{%- set seen = namespace(calls=false) %}{%- for m in messages %}{%- if m.role == 'tool' %}{%- if seen.calls %}"
    "<|im_start|>user\n{{ m.content }}<|im_end|>\n{%- endif %}{%- else %}{%- set seen.calls = m.tool_calls %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{%- for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{%- endfor %}<|im_end|>\n"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
"""A template that writes answers of tools to calls alone."""


@pytest.mark.parametrize("stop", ["<|im_end|>", "<|endoftext|>"])
def test_the_answer_to_a_call_that_cannot_be_read_is_seen_where_templates_answer_calls_alone(stop):
    """Also if the reply ends as the template does not end it, so that the history is written again."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = ANSWERS_CALLS
    reader = find_reader(ModelConfig(path="mine/model"), tokenizer)
    assert isinstance(reader, TemplateTools)
    conversation = ask(tokenizer, reader)
    assert "tool_calls" not in conversation.add_reply(sampled(tokenizer, f"<tool_call>\n{{broken\n</tool_call>{stop}"))
    assert conversation.add_messages([{"role": "tool", "content": "cannot be read"}], LONG)
    assert tokenizer.decode(conversation.token_ids).count("cannot be read") == 1


def test_calls_in_a_reply_that_was_cut_are_not_read():
    tokenizer, reader = native("qwen2_5")
    completion = dataclasses.replace(sampled(tokenizer, HERMES_CALL), finish_reason="length")
    assert ask(tokenizer, reader).add_reply(completion) == {"role": "assistant", "content": HERMES_CALL}


def tells_whether_ids_agree() -> tuple[Any, int, TemplateTools]:
    """A tokenizer whose template writes whether an answer has the id of the call, a limit, and what reads replies."""
    tokenizer = make_tokenizer()
    begin = "'\\n<tool_response>\\n' + "
    assert begin in tokenizer.chat_template
    shown = "(messages[loop.index0 - 1].tool_calls or [{}])[0].id == message.tool_call_id"
    tokenizer.chat_template = tokenizer.chat_template.replace(begin, f"{begin}'[same: ' + ({shown}) | string + ']' + ")
    reader = find_reader(ModelConfig(path="mine/model"), tokenizer)
    assert isinstance(reader, TemplateTools)
    return tokenizer, 10_000, reader


def test_answers_of_an_agent_have_the_ids_that_their_calls_have_in_the_conversation():
    """Some templates find the name of the tool by it."""
    talk = Talk(*tells_whether_ids_agree())
    (one,) = talk.ask([user("a")], f"{HERMES_CALL}<|im_end|>", tools=[TOOL])
    answer = {"role": "tool", "tool_call_id": call_id(talk.tree.turns[0], 0), "content": "7"}
    talk.ask([user("a"), one, answer], "It is 7.<|im_end|>", tools=[TOOL])
    (text,) = talk.texts()
    assert "[same: True]7" in text


@pytest.mark.parametrize("said", ["as the policy did", "Other."])
def test_ids_of_the_agent_s_own_belong_to_its_calls(said):
    """Those of a reply that equals one of the policy, and those of a history that it has made."""
    talk = Talk(*tells_whether_ids_agree())
    (one,) = talk.ask([user("a")], f"{HERMES_CALL}<|im_end|>", tools=[TOOL])
    own = {**one, "tool_calls": [{**one["tool_calls"][0], "id": "mine"}]}
    own |= {} if said.startswith("as") else {"content": said}
    answer = {"role": "tool", "tool_call_id": "mine", "content": "7"}
    talk.ask([user("a"), own, answer], "It is 7.<|im_end|>", tools=[TOOL])
    assert "[same: True]7" in talk.texts()[-1]


def test_sampled_tokens_stay_without_tools_too():
    """Thoughts that the template would drop from earlier turns, between text of its own."""
    for name in ["qwen3", "qwen3_instruct_2507", "qwen3_5_think", "gptoss"]:
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


@settings(max_examples=12, deadline=None)
@given(
    system=TEXTS.filter(str.strip) | st.none(),
    first=TEXTS,
    described=TEXTS,
    rounds=st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), max_size=3),
)
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_as_text_of_hermes_tools_and_answers_are_written_as_by_the_template(name, system, first, described, rounds):
    """Hermes is the format of these models: the tokens are those of `tools`, but for the system message that Qwen2.5
    adds."""
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
        messages += [{"role": "assistant", "content": same.END}, *new]
        after = render_text(tokenizer, messages, True, tools=tools).rpartition(f"{same.END}<|im_end|>")[2]
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
