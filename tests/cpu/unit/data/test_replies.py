"""What rewards, environments, agents and records see of special tokens."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import normalizers

from tests.cpu.unit.agents.test_call_tree import request_of
from tests.support.episodes import Policy, run
from tests.support.generation import SAMPLED
from trainer.agents.call_tree import CallTree
from trainer.config import Config, DataConfig
from trainer.data.datasets import Prompt
from trainer.data.rollout_io import read_rollouts, write_rollouts
from trainer.data.tokens import changed_answer, reply_text
from trainer.environments.conversation import Conversation
from trainer.environments.episode_runner import RolloutRequest, SingleTurnRunner
from trainer.generation.engine import Completion
from trainer.models.tokenizer import load_tokenizer
from trainer.sources.routes import read_prompts

REPLY = "[THINK]x[/THINK]<answer>1</answer>"
MARKS = ["[THINK]", "[/THINK]", "<answer>", "</answer>", "<|turn_end|>", "<|channel|>"]


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def tokenizer(model, request) -> Any:
    own = load_tokenizer(model)
    own.add_tokens(MARKS, special_tokens=request.param)
    return own


def completion(tokenizer: Any, text: str, reason: str = "stop") -> Completion:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return Completion(tokens, [-1.0] * len(tokens), reason, 1)


def test_a_text_has_all_special_tokens_but_the_end_and_padding(tokenizer):
    """`<|turn_end|>` is none of the tokenizer's own end tokens: the engine has stopped there."""
    for end in ["<|end|>", "<|turn_end|>", "<|end|><|pad|>", ""]:
        tokens = tokenizer.encode(REPLY + end.replace("<|pad|>", tokenizer.pad_token), add_special_tokens=False)
        kept = REPLY.removesuffix("</answer>") if not end else REPLY  # then that is where the reply has ended
        assert reply_text(tokenizer, tokens, has_ended=True) == kept
        assert reply_text(tokenizer, tokens, has_ended=False) == REPLY + ("<|turn_end|>" if "turn" in end else "")
        assert reply_text(tokenizer, tokenizer.encode("ab"), has_ended=True) == "ab", "it has ended with a text"


def test_rewards_and_the_records_get_that_text(tokenizer):
    policy, prompt = Policy(tokenizer, REPLY), tokenizer.encode("<|user|>x<|assistant|>")
    requests = [RolloutRequest(Prompt(0, tuple(prompt), "x", "1"), "0:0", 1, 0, SAMPLED)]
    (episode,) = run(SingleTurnRunner(Config(), tokenizer), policy, requests)
    assert episode.text == REPLY


def test_environments_get_that_text_and_histories_keep_its_tokens(tokenizer):
    conversation = Conversation(tokenizer, [{"role": "user", "content": "x"}])
    said = conversation.add_reply(completion(tokenizer, f"{REPLY}<|end|>"))
    assert said == {"role": "assistant", "content": REPLY}
    ended = conversation.fork()
    assert ended.add_messages([{"role": "user", "content": "y"}], 1000) and len(ended.samples()) == 1
    cut = Conversation(tokenizer, [{"role": "user", "content": "x"}])
    cut.add_reply(completion(tokenizer, f"{REPLY}<|turn_end|>"))  # the template ends it in another way
    assert cut.add_messages([{"role": "user", "content": "y"}], 1000) and len(cut.samples()) == 2
    assert cut.token_ids == ended.token_ids


def test_a_template_that_refuses_its_own_tokens_gets_the_text_without_them(model):
    """As that of gpt-oss refuses channels in a content."""
    tokenizer = load_tokenizer(model)
    tokenizer.add_tokens(MARKS, special_tokens=True)
    refusing = "{% for m in messages %}{% if '<|channel|>' in m.content %}{{ raise_exception('tags') }}{% endif %}"
    tokenizer.chat_template = refusing + "{% endfor %}" + tokenizer.chat_template
    conversation = Conversation(tokenizer, [{"role": "user", "content": "x"}])
    assert conversation.add_reply(completion(tokenizer, "<|channel|>1<|turn_end|>"))["content"] == "<|channel|>1"
    assert conversation.add_messages([{"role": "user", "content": "y"}], 1000)
    assert tokenizer.decode(conversation.token_ids) == "<|user|>x<|assistant|>1<|end|><|user|>y<|assistant|>"
    with pytest.raises(Exception, match="tags"):
        conversation.add_messages([{"role": "user", "content": "<|channel|>"}], 1000)


def test_agents_get_that_text_and_a_stop_in_it_ends_it(tokenizer):
    def said(text: str, *stops: str) -> str:
        tree, request = CallTree(tokenizer, 1000), request_of([{"role": "user", "content": "x"}], stop=list(stops))
        turn = tree.begin(request)
        return tree.answer(turn, completion(tokenizer, text), request).content

    assert said(f"{REPLY}<|end|>") == said(f"{REPLY}<|turn_end|>") == REPLY
    assert said(f"{REPLY}<|end|>", "</answer>") == REPLY.removesuffix("</answer>")


def test_calls_between_special_tokens_are_read(tokenizer):
    request = request_of([{"role": "user", "content": "x"}], tools=[{"type": "function", "function": {"name": "f"}}])
    own = load_tokenizer(tokenizer.name_or_path)
    own.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=True)
    tree = CallTree(own, 1000)
    turn = tree.begin(request)
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    (read,) = tree.answer(turn, completion(own, f"{call}<|end|>"), request).calls
    assert (read.name, read.arguments) == ("f", '{"a": 1}')


def test_recorded_rollouts_are_read_with_their_special_tokens(model, tmp_path):
    tokenizer = load_tokenizer(model)
    tokenizer.add_tokens(MARKS, special_tokens=True)
    requests = [RolloutRequest(Prompt(0, tuple(tokenizer.encode("x")), "x", "1"), "0:0", 1, 0, SAMPLED)]
    (episode,) = run(SingleTurnRunner(Config(), tokenizer), Policy(tokenizer, REPLY), requests)
    assert episode.messages[-1]["content"] == REPLY
    write_rollouts(str(tmp_path), 1, [replace(episode, reward=1.0)])
    (sample,) = read_rollouts(str(tmp_path / "rollouts/step_1.arrow"), tokenizer, None)
    assert np.array_equal(sample.token_ids, episode.samples[0].token_ids)


def test_an_answer_that_the_tokenizer_changes_is_found(model):
    tokenizer = load_tokenizer(model)
    assert changed_answer(tokenizer, ["12", " ab ", "", "A b"]) is None
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert changed_answer(tokenizer, ["12", "A b"]) == (1, "A b", "a b")
    assert changed_answer(tokenizer, []) is None
    some = SimpleNamespace(encode=lambda text, **_: [text], decode=lambda ids, **_: ids[0].lower())
    assert changed_answer(some, ["a"] * 9_999 + ["B"]) is None, "of many, some are tried"
    assert changed_answer(some, ["B"] * 10_000) == (0, "B", "b")


@pytest.mark.parametrize("environment", [None, "m:E"])
def test_an_answer_that_the_tokenizer_changes_is_named_before_the_start(model, tmp_path, caplog, environment):
    tokenizer = load_tokenizer(model)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "x", "answer": 12}\n{"prompt": "x", "answer": "Paris"}\n')
    cfg = Config(data=DataConfig(train_files=[str(file)], prompt_key="prompt", answer_key="answer"))
    cfg.environment.name = environment
    with caplog.at_level(logging.WARNING):
        read_prompts(cfg, "train", tokenizer)
    assert (
        "data.answer_key=answer: the tokenizer changes the reference answer of row 2 of the train data" in caplog.text
    )
    assert "'Paris', into 'paris'" in caplog.text
