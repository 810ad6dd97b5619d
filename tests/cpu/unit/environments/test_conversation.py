"""The tokens of a conversation, under the chat templates of well-known models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.chat_templates import LAST_USER, SPECIAL, TEMPLATES
from trainer.environments.conversation import Conversation
from trainer.errors import UserError
from trainer.generation.engine import Completion
from trainer.models.tokenizer import load_tokenizer

LONG = 10_000


@pytest.fixture(scope="module")
def tokenizer(model) -> Any:
    """With the special tokens of all templates."""
    own = load_tokenizer(model)
    own.add_tokens(list(SPECIAL), special_tokens=True)
    return own


def with_template(tokenizer: Any, name: str) -> str:
    """Give it the template; return its stop token."""
    if name == "embedded":
        from trainer.models.tiny import CHAT_TEMPLATE, END

        tokenizer.chat_template = CHAT_TEMPLATE
        return END
    tokenizer.chat_template, stop = TEMPLATES[name]
    return stop


def user(*texts: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text} for text in texts]


def completion(tokenizer: Any, text: str, version: int = 1) -> Completion:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return Completion(tokens, [-0.5 - i for i in range(len(tokens))], "stop", version)


@pytest.mark.parametrize("name", ["embedded", *TEMPLATES])
@pytest.mark.parametrize("role", ["wizard", "User"])
def test_messages_of_an_unknown_role_are_refused(tokenizer, name, role):
    """A template may write any role (that of the built-in model, plain ChatML), or raise, or leave the message out."""
    stop = with_template(tokenizer, name)
    with pytest.raises(UserError, match=rf"role {role}|refuse"):
        Conversation(tokenizer, user("hé?", role=role))
    conversation = Conversation(tokenizer, user("hé?"))
    conversation.add_reply(completion(tokenizer, f"one{stop}"))
    with pytest.raises(UserError, match=rf"role {role}|refuse"):
        conversation.add_messages(user("And 2?", role=role), LONG)


def test_a_tokenizer_may_have_several_templates(tokenizer):
    with_template(tokenizer, "embedded")
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": tokenizer.chat_template}
    conversation = Conversation(tokenizer, user("hé?"))
    assert "hé?" in tokenizer.decode(conversation.token_ids)
    with pytest.raises(UserError, match="role wizard"):
        Conversation(tokenizer, user("hé?", role="wizard"))


def test_a_role_that_the_template_names_is_known(tokenizer):
    names = "{{ 'fn' if m.role == 'function' else m.role }}"
    tokenizer.chat_template = f"{{% for m in messages %}}[{names}]{{{{ m.content }}}}{{% endfor %}}"
    conversation = Conversation(tokenizer, user("hé?") + user("7", role="function"))
    assert tokenizer.decode(conversation.token_ids) == "[user]hé?[fn]7"


@pytest.mark.parametrize("name", ["embedded", *TEMPLATES])
@pytest.mark.parametrize("system", [True, False])
def test_a_conversation_has_the_tokens_that_the_template_gives(tokenizer, name, system):
    """Where replies are text that survives its rendering."""
    stop = with_template(tokenizer, name)
    conversation = Conversation(tokenizer, [*user("You are x.", role="system")] * system + user("hé?"))
    assert conversation.add_reply(completion(tokenizer, f"one{stop}")) == {"role": "assistant", "content": "one"}
    assert conversation.add_messages(user("And 2?"), LONG)
    conversation.add_reply(completion(tokenizer, f"two{stop}"))
    assert conversation.add_messages(user("And 3?"), LONG)
    (sample,) = conversation.samples()
    whole = tokenizer.apply_chat_template(conversation.messages, add_generation_prompt=True, tokenize=False)
    text = tokenizer.decode(sample.token_ids)
    if name == "qwen3-thinking":  # earlier replies stay as they were prompted
        assert text.replace("<think>\n", "") == whole.replace("<think>\n", "") and text.count("<think>") == 3
    else:
        assert text == whole
        assert sample.token_ids.tolist() == tokenizer.encode(whole, add_special_tokens=False)
    learnt = tokenizer.decode(sample.token_ids[sample.mask > 0])
    assert learnt == f"one{stop}two{stop}"
    assert sample.logprobs[sample.mask > 0].tolist() == [-0.5, -1.5, -2.5, -3.5] * 2
    assert not sample.logprobs[sample.mask == 0].any()


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "qwen3-thinking"])
def test_answers_of_tools_are_written_as_one_turn(tokenizer, name):
    stop = with_template(tokenizer, name)
    conversation = Conversation(tokenizer, user("2+2, 3+3?"))
    conversation.add_reply(completion(tokenizer, f"<tool_call>x</tool_call>{stop}"))
    assert conversation.add_messages(user("4", "6", role="tool"), LONG)
    (sample,) = conversation.samples()
    assert tokenizer.decode(sample.token_ids).count("<|im_start|>user") == 2
    assert "<tool_response>\n4\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|>\n<|im_start|>assi" in (
        tokenizer.decode(sample.token_ids)
    )


@pytest.mark.parametrize("name", ["embedded", *TEMPLATES])
def test_sampled_tokens_are_kept_as_they_were_sampled(tokenizer, name):
    """Tokens that no tokenizer makes of their text, spaces that a template trims, thoughts that it drops."""
    stop = with_template(tokenizer, name)
    conversation = Conversation(tokenizer, user("x"))
    prompt = list(conversation.token_ids)
    half = tokenizer.encode("é", add_special_tokens=False)[:1]  # half a letter
    sampled = [
        *tokenizer.encode("<think>\nhm\n</think>\n\n  a \n", add_special_tokens=False),
        *half,
        *tokenizer.encode(stop, add_special_tokens=False),
    ]
    conversation.add_reply(Completion(sampled, [-1.0] * len(sampled), "stop", 1))
    assert conversation.add_messages(user("y"), LONG)
    (sample,) = conversation.samples()
    assert sample.token_ids[: len(prompt) + len(sampled)].tolist() == [*prompt, *sampled]
    assert sample.mask.sum() == len(sampled)
    assert tokenizer.decode(sample.token_ids[len(prompt) + len(sampled) :]).count("y") == 1


def test_a_template_that_changes_earlier_messages_begins_a_new_sample(tokenizer):
    tokenizer.chat_template = LAST_USER
    conversation = Conversation(tokenizer, user("x"))
    conversation.add_reply(completion(tokenizer, "one<|im_end|>", version=3))
    assert conversation.add_messages(user("y"), LONG)
    conversation.add_reply(completion(tokenizer, "two<|im_end|>", version=4))
    first, second = conversation.samples()
    assert tokenizer.decode(first.token_ids) == "[TOOLS][user]x[assistant]one<|im_end|>"
    assert tokenizer.decode(second.token_ids) == (
        "[user]x[assistant]one<|im_end|>[TOOLS][user]y[assistant]two<|im_end|>"
    )
    assert [tokenizer.decode(s.token_ids[s.mask > 0]) for s in (first, second)] == ["one<|im_end|>", "two<|im_end|>"]
    assert [s.weight_versions for s in (first, second)] == [(3, 3), (4, 4)]


def test_a_reply_that_ends_in_another_stop_token_begins_a_new_sample(tokenizer):
    with_template(tokenizer, "qwen2.5")
    conversation = Conversation(tokenizer, user("x"))
    conversation.add_reply(completion(tokenizer, "one<|endoftext|>"))
    assert conversation.add_messages(user("y"), LONG)
    first, second = conversation.samples()
    assert tokenizer.decode(first.token_ids).endswith("one<|endoftext|>")
    assert "assistant\none<|im_end|>\n" in tokenizer.decode(second.token_ids) and not second.mask.any()


def test_a_copy_continues_in_its_own_way(tokenizer):
    stop = with_template(tokenizer, "embedded")
    conversation = Conversation(tokenizer, user("x"))
    conversation.add_reply(completion(tokenizer, f"one{stop}"))
    other = conversation.fork()
    assert conversation.add_messages(user("y"), LONG) and other.add_messages(user("z"), LONG)
    other.add_reply(completion(tokenizer, f"two{stop}"))
    texts = [tokenizer.decode(one.samples()[0].token_ids) for one in (conversation, other)]
    start = f"<|user|>x<|assistant|>one{stop}"
    assert texts == [f"{start}<|user|>y<|assistant|>", f"{start}<|user|>z<|assistant|>two{stop}"]
    assert [message["content"] for message in conversation.messages] == ["x", "one", "y"]


@pytest.mark.parametrize("template", ["embedded", "last user"])
def test_messages_that_are_too_long_add_no_tokens(tokenizer, template):
    stop = with_template(tokenizer, "embedded")
    if template == "last user":
        tokenizer.chat_template, stop = LAST_USER, "<|im_end|>"
    conversation = Conversation(tokenizer, user("x"))
    conversation.add_reply(completion(tokenizer, f"one{stop}"))
    tokens = list(conversation.token_ids)
    assert not conversation.add_messages(user("y" * 100), 50)
    (sample,) = conversation.samples()
    assert sample.token_ids.tolist() == tokens and sample.token_ids.dtype == np.int32
    assert conversation.messages[-1]["content"] == "y" * 100


@pytest.mark.parametrize("template", ["embedded", "last user"])
def test_a_prompt_may_be_as_long_as_the_limit(tokenizer, template):
    stop = with_template(tokenizer, "embedded")
    if template == "last user":
        tokenizer.chat_template, stop = LAST_USER, "<|im_end|>"

    def next_prompt(limit: int) -> Conversation | None:
        conversation = Conversation(tokenizer, user("x"))
        conversation.add_reply(completion(tokenizer, f"one{stop}"))
        return conversation if conversation.add_messages(user("yy"), limit) else None

    length = len(next_prompt(LONG).token_ids)
    assert len(next_prompt(length).token_ids) == length
    assert next_prompt(length - 1) is None
