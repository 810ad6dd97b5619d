"""The calls of an episode as a tree, and the samples that it gives."""

from __future__ import annotations

import dataclasses
import json
import sys
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.agents import runs_of
from tests.support.chat_templates import LAST_USER
from trainer.agents.call_tree import CallTree
from trainer.agents.chat_wire import ChatWire
from trainer.agents.messages import ApiError, ChatMessage
from trainer.agents.requests import ChatRequest, Rules, parse_request
from trainer.generation.engine import Completion, Sampling

USUAL = Sampling(1.0, 1.0, -1, 32, (4,))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def request_of(messages: list[Any], **fields: Any) -> ChatRequest:
    body = json.dumps({"model": "policy", "messages": messages, **fields}).encode()
    return parse_request(body, Rules("policy", USUAL, USUAL, overrides=False, max_turns=99), ChatWire())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def returned(reply: ChatMessage) -> dict[str, Any]:
    """Return a reply as an agent sends it back."""
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in reply.calls]
    return {"role": "assistant", "content": reply.content, **({"tool_calls": calls} if calls else {})}


class Talk:
    """An agent and a policy. Remembers which completion the policy gave to which prompt."""

    def __init__(self, tokenizer: Any, longest: int = 1000, reader: Any = None):
        self.tokenizer = tokenizer
        self.tree = CallTree(tokenizer, longest, reader=reader)
        self.given: list[tuple[list[int], list[int], list[float]]] = []

    def ask(self, messages: list[Any], *replies: str, delivered: bool = True, **fields: Any) -> list[dict[str, Any]]:
        request = request_of(messages, **fields)
        said = []
        for text in replies:
            turn = self.tree.begin(request)
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
            logprobs = [-float(len(self.given) + 1) - i / 8 for i in range(len(tokens))]
            reply = self.tree.answer(turn, Completion(tokens, logprobs, "stop", len(self.given)), request)
            turn.is_delivered = delivered
            if delivered:
                assert turn.completion is not None
                kept = len(turn.completion.token_ids)
                self.given.append((turn.prompt_ids.tolist(), tokens[:kept], logprobs[:kept]))
            said.append(returned(reply))
        return said

    def check(self) -> None:
        """Each token that was sampled is trained once, after the tokens that the engine was given."""
        trained = [run for sample in self.tree.samples() for run in runs_of(sample)]
        assert sorted(trained) == sorted(self.given)

    def texts(self) -> list[str]:
        return [self.tokenizer.decode(sample.token_ids) for sample in self.tree.samples()]

    def trained(self) -> list[str]:
        return [self.tokenizer.decode(sample.token_ids[sample.mask > 0]) for sample in self.tree.samples()]


def test_a_conversation_is_one_sample(tokenizer):
    talk = Talk(tokenizer)
    (one,) = talk.ask([user("a")], " one <|end|>")
    (two,) = talk.ask([user("a"), {**one, "content": "one"}, user("b")], "two<|end|>")
    talk.ask([user("a"), one, user("b"), two, user("c")], "three<|end|>")
    assert talk.texts() == [
        "<|user|>a<|assistant|> one <|end|><|user|>b<|assistant|>two<|end|><|user|>c<|assistant|>three<|end|>"
    ]
    assert talk.trained() == [" one <|end|>two<|end|>three<|end|>"]
    (sample,) = talk.tree.samples()
    assert sample.weight_versions == (0, 2) and sample.version_spans == ((0, 6), (1, 4), (2, 6))
    messages, turns = talk.tree.transcript()
    assert [message["content"] for message in messages] == ["a", " one ", "b", "two", "c", "three"] and turns == 3
    talk.check()


def test_branches_share_what_they_begin_with(tokenizer):
    """It is trained in the first of them alone."""
    talk = Talk(tokenizer)
    (one,) = talk.ask([user("a")], "1<|end|>")
    (two,) = talk.ask([user("a"), one, user("b")], "2<|end|>")
    talk.ask([user("a"), one, user("c")], "3<|end|>")
    talk.ask([user("a"), one, user("b"), two, user("d")], "4<|end|>")
    start = "<|user|>a<|assistant|>1<|end|>"
    assert talk.texts() == [
        f"{start}<|user|>c<|assistant|>3<|end|>",
        f"{start}<|user|>b<|assistant|>2<|end|><|user|>d<|assistant|>4<|end|>",
    ]
    assert talk.trained() == ["1<|end|>3<|end|>", "2<|end|>4<|end|>"]
    messages, turns = talk.tree.transcript()
    assert [message["content"] for message in messages] == ["a", "1", "c", "3", "b", "2", "d", "4"] and turns == 4
    talk.check()


def test_a_conversation_may_be_longer_than_python_s_stack(tokenizer):
    talk = Talk(tokenizer)
    (one,) = talk.ask([user("a")], "1<|end|>")
    talk.ask([user("a"), one, user("b")], "2<|end|>")
    first, last = talk.tree.turns
    for _ in range(sys.getrecursionlimit()):
        last = dataclasses.replace(last, parent=last)
    path = last.path()
    assert len(path) == sys.getrecursionlimit() + 2 and path[0] is first and path[-1] is last


def test_a_compacted_history_is_a_sample_of_its_own(tokenizer):
    talk = Talk(tokenizer)
    (one,) = talk.ask([user("a")], "1<|end|>")
    talk.ask([user("a"), one, user("b")], "2<|end|>")
    talk.ask([user("so far: 2")], "3<|end|>")
    assert talk.trained() == ["1<|end|>2<|end|>", "3<|end|>"]
    talk.check()


def test_several_replies_to_one_prompt_are_samples(tokenizer):
    """Also equal ones; and the one that the agent continues is the first of these."""
    talk = Talk(tokenizer)
    one, _ = talk.ask([user("a")], "1<|end|>", "2<|end|>")
    talk.ask([user("a")], "1<|end|>")
    talk.ask([user("a"), one, user("b")], "3<|end|>")
    assert talk.trained() == ["2<|end|>", "1<|end|>", "1<|end|>3<|end|>"]
    assert len({turn.key for turn in talk.tree.turns}) == 4
    messages, turns = talk.tree.transcript()
    assert turns == 4 == sum(message["role"] == "assistant" for message in messages)
    talk.check()


def test_a_changed_reply_is_not_continued(tokenizer):
    talk = Talk(tokenizer)
    (one,) = talk.ask([user("a")], "1<|end|>")
    talk.ask([user("a"), {**one, "content": "other"}, user("b")], "2<|end|>")
    assert talk.texts()[1] == "<|user|>a<|assistant|>other<|end|><|user|>b<|assistant|>2<|end|>"
    assert talk.trained() == ["1<|end|>", "2<|end|>"]
    talk.check()


def test_other_tools_begin_anew(tokenizer):
    """They are a part of the first message. Calls in the history are those that the policy has written."""
    talk = Talk(tokenizer)
    call = '<tool_call>{"name":  "add", "arguments": {"a":1}}</tool_call><|end|>'
    (one,) = talk.ask([user("a")], call, tools=[TOOL])
    assert one["content"] == "" and one["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    talk.ask([user("a"), one, {"role": "tool", "content": "1"}], "1<|end|>", tools=[TOOL])
    talk.ask([user("a"), one, {"role": "tool", "content": "1"}], "2<|end|>")
    first, second = talk.texts()
    assert "# Tools" in first and call in first and "# Tools" not in second
    assert second.startswith('<|user|>a<|assistant|><tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    talk.check()


def test_an_answer_that_never_arrived_is_not_trained(tokenizer):
    talk = Talk(tokenizer)
    (one,) = talk.ask([user("a")], "1<|end|>")
    talk.ask([user("a"), one, user("b")], "2<|end|>", delivered=False)
    assert talk.trained() == ["1<|end|>"]
    (two,) = talk.ask([user("a"), one, user("b")], "2<|end|>")
    talk.ask([user("a"), one, user("b"), two, user("c")], "3<|end|>")
    assert talk.trained() == ["1<|end|>2<|end|>3<|end|>"]
    talk.check()
    assert CallTree(tokenizer, 10).samples() == [] and CallTree(tokenizer, 10).transcript() == ([], 0)


def test_a_template_that_changes_earlier_messages_begins_a_sample(tokenizer):
    before, tokenizer.chat_template = tokenizer.chat_template, LAST_USER
    try:
        talk = Talk(tokenizer)
        (one,) = talk.ask([user("a")], "1<|end|>")
        talk.ask([user("a"), one, user("b")], "2<|end|>")
        assert talk.trained() == ["1<|end|>", "2<|end|>"]
        talk.check()
    finally:
        tokenizer.chat_template = before


@pytest.mark.parametrize("known", [False, True])
def test_a_prompt_may_be_as_long_as_the_limit(tokenizer, known):
    def ask(longest: int) -> None:
        talk = Talk(tokenizer, longest)
        (one,) = talk.ask([user("a")], "1<|end|>") if known else [{"role": "assistant", "content": "1"}]
        talk.ask([user("a"), one, user("bc")], "2<|end|>")

    ask(9)
    with pytest.raises(ApiError, match="prompt is too long: .*9 tokens > 8 maximum") as refusal:
        ask(8)
    assert refusal.value.code == "context_length_exceeded"


def test_a_chat_that_the_template_refuses_is_refused(tokenizer):
    before, tokenizer.chat_template = tokenizer.chat_template, "{{ raise_exception('no') }}"
    try:
        with pytest.raises(ApiError, match="cannot render a chat of user"):
            Talk(tokenizer).ask([user("a")], "1<|end|>")
    finally:
        tokenizer.chat_template = before


def test_a_reply_that_a_stop_ended_is_continued_as_it_was_sampled(tokenizer):
    """The policy sees the stop, and the end of the reply that the template writes. The agent does not see the stop."""
    talk = Talk(tokenizer)
    (one,) = talk.ask([user("a")], "think Observation: x<|end|>", stop=["Observation:"])
    assert one["content"] == "think "
    talk.ask([user("a"), one, user("b")], "2<|end|>")
    assert talk.trained() == ["think Observation:2<|end|>"]
    assert talk.texts() == ["<|user|>a<|assistant|>think Observation:<|end|><|user|>b<|assistant|>2<|end|>"]
    talk.check()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["continue", "branch", "compact", "again", "several", "edit", "cut", "lost", "tools", "strip"]),
        st.integers(0, 1000),
        st.text("ab é\n", max_size=3),
    ),
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(STEPS, st.booleans(), st.booleans())
def test_each_sampled_token_is_trained_once_whatever_an_agent_does_with_its_history(tokenizer, steps, at_once, changes):
    """It continues, branches, compacts, edits, asks again, is cut off. The template keeps or changes the history."""
    before = tokenizer.chat_template
    tokenizer.chat_template = LAST_USER.replace("<|im_end|>", "<|end|>") if changes else before
    try:
        talk = Talk(tokenizer)
        talk.tree.is_sequential = not at_once
        chats: list[list[dict[str, Any]]] = []
        for do, number, text in [("compact", 0, "x"), *steps]:
            said = list(chats[number % len(chats)]) if chats else []
            fields: dict[str, Any] = {"tools": [TOOL]} if do == "tools" else {}
            match do:
                case "continue" | "several" | "lost" | "tools" | "strip":
                    if do == "strip":
                        said[-1] = {**said[-1], "content": said[-1]["content"].strip()}
                    said = [*said, user(text)]
                case "branch":
                    said = [*said[: number % len(said)], user(text)]
                case "compact":
                    said = [user(f"so far {text}")]
                case "again":
                    said = said[:-1] or [user(text)]
                case "edit":
                    said = [*said[:-1], {"role": "assistant", "content": f"{text}!"}, user(text)]
                case "cut":
                    said, fields = [*said, user(text)], {"stop": ["b"]}
            replies = [f"{text}{i}<|end|>" for i in range(2 if do == "several" else 1)]
            chats += [[*said, reply] for reply in talk.ask(said, *replies, delivered=do != "lost", **fields)]
            if do == "lost":
                chats.pop()
        talk.check()
        messages, turns = talk.tree.transcript()
        assert turns == len(talk.given) <= sum(message["role"] == "assistant" for message in messages)
    finally:
        tokenizer.chat_template = before


def test_the_memory_of_an_episode_grows_with_its_tokens(tokenizer):
    """Not with the length of its history times the number of its turns."""

    def bytes_of(turns: int) -> tuple[int, int]:
        tree, messages = CallTree(tokenizer, 1_000_000), []
        for i in range(turns):
            messages.append(user(f"{i} " + "x" * 100))
            request = request_of(messages)
            turn = tree.begin(request)
            tokens = tokenizer.encode("y" * 20 + "<|end|>", add_special_tokens=False)
            messages.append(returned(tree.answer(turn, Completion(tokens, [-1.0] * len(tokens), "stop", 1), request)))
            turn.is_delivered = True
            del request
        (sample,) = tree.samples()
        length = len(sample.token_ids)
        del sample, messages
        used = tracemalloc.get_traced_memory()[0]
        tree.forget()
        return length, used - tracemalloc.get_traced_memory()[0]

    bytes_of(2)  # what the tokenizer keeps
    tracemalloc.start()
    try:
        length, used = bytes_of(60)
    finally:
        tracemalloc.stop()
    assert length > 60 * 100 and used < 60 * length
