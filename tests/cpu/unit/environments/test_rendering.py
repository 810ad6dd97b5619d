"""Conversations by the library `renderers`, compared with the chat template of the same model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.chat_templates import LLAMA3, QWEN3, QWEN25, SPECIAL
from tests.support.episodes import Policy, requests_of, run, runner_config
from trainer.config import ModelConfig
from trainer.data.limits import TextTooLong
from trainer.environments.conversation import Conversation
from trainer.environments.episode_runner import EnvironmentRunner
from trainer.environments.rendering import ChatRenderer, find_renderer
from trainer.environments.template_tools import TemplateTools
from trainer.environments.tools import with_tools
from trainer.errors import UserError
from trainer.generation.engine import Completion, Request

DOCS = Path(__file__).resolve().parents[4] / "docs"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use {name}.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
    for name in ("search", "add")
]
LONG = 100_000
USER_ASKS = {"role": "user", "content": "2+2?"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def make_tokenizer() -> Any:
    """A byte-level BPE of 2,000 tokens with the special tokens of Qwen3, which merges letters, blanks and signs."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    bpe.train([str(path) for path in sorted(DOCS.glob("*.md"))[:6]], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    special = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    made.add_tokens([*SPECIAL], special_tokens=True)
    made.add_tokens(special)
    made.chat_template = QWEN3
    return made


@pytest.fixture(scope="module")
def renderer(tokenizer) -> ChatRenderer:
    found = find_renderer(ModelConfig(path="Qwen/Qwen3-0.6B"), tokenizer, LONG)
    assert found is not None
    return found


TEXT = st.text(st.sampled_from("ab .\n{}\"<>é'1"), max_size=12)
SAID = TEXT.filter(str.strip)
CALL = st.builds(
    lambda name, x: {"id": "call_0", "type": "function", "function": {"name": name, "arguments": {"x": x}}},
    st.sampled_from(["search", "add"]),
    TEXT,
)
USER = st.builds(lambda text: {"role": "user", "content": text}, SAID)
TOOL = st.builds(lambda text: {"role": "tool", "content": text}, TEXT)
SYSTEM = st.builds(lambda text: {"role": "system", "content": text}, SAID)
REPLY = st.builds(
    lambda text, thought, calls: {
        "role": "assistant",
        "content": text.strip("\n"),
        **({"reasoning_content": thought} if thought else {}),
        **({"tool_calls": calls} if calls else {}),
    },
    SAID,
    SAID.map(lambda text: text.strip("\n")) | st.just(""),
    st.lists(CALL, max_size=2),
)
TURN = st.lists(USER, min_size=1, max_size=1) | st.lists(TOOL, min_size=1, max_size=2)


@st.composite
def conversations(draw: Any) -> list[dict[str, Any]]:
    messages = [draw(USER)]
    for _ in range(draw(st.integers(0, 3))):
        messages += [draw(REPLY), *draw(TURN)]
    return [*([draw(SYSTEM)] if draw(st.booleans()) else []), *messages]


def written(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)


@settings(max_examples=150, deadline=None)
@given(messages=conversations(), has_tools=st.booleans())
def test_a_conversation_has_the_tokens_that_the_template_gives(tokenizer, renderer, messages, has_tools):
    text = written(tokenizer, messages, TOOLS if has_tools else None)
    given_messages = with_tools(messages, TOOLS) if has_tools else messages
    assert tokenizer.decode(renderer.prompt(given_messages)) == text
    assert renderer.prompt(given_messages) == tokenizer.encode(text, add_special_tokens=False)


def sampled(tokenizer: Any, text: str) -> Completion:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return Completion(tokens, [-0.5] * len(tokens), "stop", 1)


@settings(max_examples=100, deadline=None)
@given(
    system=SYSTEM | st.none(),
    first=USER,
    rounds=st.lists(st.tuples(REPLY, TURN), min_size=1, max_size=4),
    has_tools=st.booleans(),
)
def test_history_stays_as_it_was_sampled_and_is_continued_as_by_the_template(
    tokenizer, renderer, system, first, rounds, has_tools
):
    """With a renderer, and by the template alone: both give the same samples."""
    begin = [*([system] if system else []), first]
    begin = with_tools(begin, TOOLS) if has_tools else begin
    ours, theirs = Conversation(tokenizer, begin, renderer=renderer), Conversation(tokenizer, begin)
    for reply, turn in rounds:
        thought = f"<think>\n{reply['reasoning_content']}\n</think>\n\n" if "reasoning_content" in reply else ""
        calls = [json.dumps(call["function"]) for call in reply.get("tool_calls", ())]
        called = "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)
        completion = sampled(tokenizer, f"{thought}{reply['content']}{called}<|im_end|>")
        for conversation in (ours, theirs):
            before = list(conversation.token_ids)
            conversation.add_reply(completion)
            assert conversation.add_messages([dict(message) for message in turn], LONG)
            history = [*before, *completion.token_ids.tolist()]
            assert conversation.token_ids[: len(history)] == history
    (one,), (other,) = ours.samples(), theirs.samples()
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.mask.tolist() == other.mask.tolist()
    assert has_tools or ours.messages == theirs.messages


@settings(max_examples=100, deadline=None)
@given(question=USER, reply=REPLY)
def test_calls_are_read_as_the_template_writes_them(tokenizer, renderer, question, reply):
    prompt = with_tools([question], TOOLS)
    before = written(tokenizer, [question], TOOLS)
    whole = tokenizer.apply_chat_template([question, reply], tools=TOOLS, tokenize=False)
    assert whole.startswith(before)
    conversation = Conversation(tokenizer, prompt, renderer=renderer)
    said = conversation.add_reply(sampled(tokenizer, whole[len(before) :].removesuffix("\n")))
    ours = [call["function"] for call in said.get("tool_calls", [])]
    assert ours == [call["function"] for call in reply.get("tool_calls", [])]
    assert said["content"].strip() == reply["content"].strip()
    assert said.get("reasoning_content", "").strip() == reply.get("reasoning_content", "").strip()


@pytest.mark.parametrize(
    "call",
    [
        "{broken",
        "[" * 2000,
        f'{{"name": "add", "arguments": {{"x": {"1" * 5000}}}}}',
        f'{{"name": "add", "arguments": {{"x": {"[" * 200}1{"]" * 200}}}}}',
        '{"name": ["add"], "arguments": {"x": 1}}',
    ],
    ids=["no JSON", "endless", "a long number", "nested deeply", "no name"],
)
def test_a_call_that_cannot_be_read_stays_in_the_text(tokenizer, renderer, call):
    conversation = Conversation(tokenizer, with_tools([{"role": "user", "content": "2+2?"}], TOOLS), renderer=renderer)
    text = f"hm <tool_call>\n{call}\n</tool_call>"
    said = conversation.add_reply(sampled(tokenizer, f"{text}<|im_end|>"))
    assert said == {"role": "assistant", "content": text}


def test_calls_that_cannot_be_read_are_named_where_the_text_does_not_show_them(tokenizer, renderer):
    history = with_tools([USER_ASKS], TOOLS)

    def said(*calls: str) -> Any:
        tokens = tokenizer.encode("hm" + "".join(calls) + "<|im_end|>", add_special_tokens=False)
        return renderer.reply(tokens, renderer.prompt(history), "as another format shows it", history)

    good = '<tool_call>\n{"name": "add", "arguments": {"x": "1"}}\n</tool_call>'
    assert said(good)["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": "1"}}
    bad = said(good, "<tool_call>\n{broken\n</tool_call>", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>')
    assert "tool_calls" not in bad and bad["content"] == "as another format shows it"
    assert bad["unread_calls"] == [
        {"name": "add", "problem": ""},
        {"problem": "invalid json"},
        {"name": "add", "problem": "no readable arguments"},
    ]
    assert said("<tool_call>\n{cut")["unread_calls"] == [{"problem": "unclosed block"}]
    assert said(f"<tool_call>{'[' * 2000}</tool_call>")["unread_calls"] == [{"problem": "RecursionError"}]
    assert "unread_calls" not in said(" no call")


def test_a_reply_without_its_stop_token_or_messages_that_are_too_long(tokenizer, renderer):
    conversation = Conversation(tokenizer, [{"role": "user", "content": "x"}], renderer=renderer)
    conversation.add_reply(sampled(tokenizer, "<think>\nhm<|im_end|>"))  # a thought without an end: written anew
    assert conversation.add_messages([{"role": "user", "content": "y"}], LONG)
    first, second = conversation.samples()
    assert first.mask.any() and not second.mask.any()
    with pytest.raises(TextTooLong):
        ChatRenderer(None, None, 3).prompt([{"role": "user", "content": "long"}])


def chosen(tokenizer: Any, template: str, **model: Any) -> Any:
    was, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        return find_renderer(ModelConfig(**model), tokenizer, LONG)
    finally:
        tokenizer.chat_template = was


@pytest.mark.parametrize(
    ("template", "model"),
    [
        (QWEN3, {"path": "Qwen/Qwen3-0.6B", "renderer": "template"}),
        (QWEN3, {"path": "Qwen/Qwen3-0.6B", "chat_template": "own.jinja"}),
        (QWEN3, {"path": "mine/Qwen3-like"}),
        (QWEN3, {"path": None}),
        (QWEN25, {"path": "Qwen/Qwen3-0.6B"}),
        (LLAMA3, {"path": "meta-llama/Llama-3.2-1B-Instruct"}),
    ],
    ids=["template", "own template", "unknown", "built-in", "another template", "older template"],
)
def test_otherwise_the_template_writes_conversations(tokenizer, template, model):
    assert not isinstance(chosen(tokenizer, template, **model), ChatRenderer)


def test_a_renderer_is_chosen_by_name_for_models_of_other_names(tokenizer):
    assert isinstance(chosen(tokenizer, QWEN3, path="mine/Qwen3-like", renderer="qwen3"), ChatRenderer)


@pytest.mark.parametrize(
    ("template", "name", "message"),
    [
        (QWEN3, "qwen4", "the library renderers has no such renderer; did you mean qwen3"),
        (QWEN25, "qwen3", "writes conversations in another way than the model's chat template"),
        (QWEN3, "glm-4.5", "model.renderer=glm-4.5: cannot be used with this model"),
    ],
)
def test_renderers_that_do_not_fit_are_refused_in_one_sentence(tokenizer, template, name, message):
    with pytest.raises(UserError, match=message):
        chosen(tokenizer, template, path="mine/model", renderer=name)


def test_without_the_library_a_name_is_refused_and_auto_takes_the_template(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "renderers.base", None)
    assert isinstance(chosen(tokenizer, QWEN3, path="Qwen/Qwen3-0.6B"), TemplateTools)
    with pytest.raises(UserError, match="install the extra `environments`"):
        chosen(tokenizer, QWEN3, path="Qwen/Qwen3-0.6B", renderer="qwen3")


class Qwen(Policy):
    """A policy whose replies end as those of Qwen."""

    def complete(self, request: Request) -> Completion:
        prompt = self.tokenizer.decode(request.prompt_token_ids)
        turn = prompt.count("<|im_start|>assistant") - 1
        self._asked[turn].append(prompt)
        return sampled(self.tokenizer, f"{self.script[turn]}<|im_end|>")


@pytest.mark.processes
def test_an_environment_with_tools_gets_the_calls_that_a_renderer_has_read(tokenizer):
    """Its episode has the same tokens as without a renderer: Qwen3 has the format of Hermes."""
    call = (
        '<think>\nhm\n</think>\n\nSo:\n<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
    )
    policy = Qwen(tokenizer, call, "42")
    episodes = []
    for renderer, tool_format in (("auto", "auto"), ("template", "auto"), ("template", "hermes")):
        cfg = runner_config(name="tests.cpu.unit.environments.test_tools:Calculator", max_prompt_tokens=2000)
        cfg.model = ModelConfig(path="Qwen/Qwen3-0.6B", renderer=renderer, tool_format=tool_format)
        with EnvironmentRunner(cfg, tokenizer) as runner:
            (episode,) = run(runner, policy, requests_of({"prompt": "6*7?", "answer": "42"}))
        episodes.append(episode)
    for episode in episodes:
        assert episode.reward == episode.metrics["tool_calls/multiply"] == 1.0, episode.failure
        assert episode.messages[3]["content"] == "42"
    rendered, native, text = (episode.messages for episode in episodes)
    assert rendered[2]["reasoning_content"] == "hm" and rendered[3]["tool_call_id"] == "call_0"
    assert native[2]["tool_calls"] == rendered[2]["tool_calls"] and native[3] == rendered[3]
    assert "tool_calls" not in text[2]
    (one,), (other,), (another,) = (episode.samples for episode in episodes)
    assert one.token_ids.tolist() == other.token_ids.tolist() == another.token_ids.tolist()
