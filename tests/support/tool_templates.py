"""Tokenizers with the templates of published models, and conversations with tools that they write."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.chat_templates import QWEN3
from tests.support.chat_templates import SPECIAL as SPECIAL_OF_QWEN
from tests.support.episodes import Policy
from trainer.data.datasets import render_text
from trainer.environments.conversation import Conversation
from trainer.environments.tools import with_tools
from trainer.generation.engine import Completion, Request
from trainer.models.tokenizer import _with_fixed_date, _with_variables

TEMPLATES = Path(__file__).parent / "model_templates"
DOCS = Path(__file__).resolve().parents[2] / "docs"
LONG = 100_000
USER_ASKS = {"role": "user", "content": "2+2?"}
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
TEXT = st.text(st.sampled_from("ab .\n{}\"<>é'1"), max_size=12)
SPECIAL = r"<\|[\w ]+\|>|<｜[^｜<>]+｜>|</?arg_\w+>|<\|[\w\"]+>|<[\w\"]+\|>"
MORE = [
    *("[gMASK]", "<sop>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<|end_of_text|>", "<|eom_id|>", "<|python_tag|>", "<bos>", "<eos>", "<pad>", "<|think|>"),  # Llama 3, Gemma 4
    *("<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>", "<|video>", "<|video|>", "<video|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),  # gpt-oss
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),  # DeepSeek
]
"""Tokens of models that their templates do not name."""
END = "zq7"
"""The last thing that a reply says."""
ARGUMENT = TEXT | st.integers(-3, 99) | st.booleans() | st.lists(st.integers(0, 3), max_size=2)
TEXTS = TEXT | st.just("日本 ñ🙂")
STOPS = ("<|im_end|>", "<|user|>", "<|observation|>", "<|eot_id|>", "<|eom_id|>", "<turn|>", "<|tool_response>")
QWEN25_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
"""What the template of Qwen2.5 writes where a conversation has no system message."""


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
    made.add_tokens([*SPECIAL_OF_QWEN], special_tokens=True)
    made.add_tokens(special)
    made.chat_template = QWEN3
    return made


def sampled(tokenizer: Any, text: str) -> Completion:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return Completion(tokens, [-0.5] * len(tokens), "stop", 1)


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


def stops_of(tokenizer: Any) -> set[int]:
    """Return the tokens that end a reply."""
    return {tokenizer.convert_tokens_to_ids(stop) for stop in STOPS if stop in tokenizer.chat_template}


def written(tokenizer: Any, reply: Any, new: Any) -> tuple[Completion, list[int]]:
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
    stop = next(index for index, token in enumerate(after) if token in stops_of(tokenizer))
    return sampled(tokenizer, says + tokenizer.decode(after[: stop + 1])), after[stop + 1 :]


def calls_of(message: Any, tokenizer: Any) -> list[Any]:
    """Return the names and arguments of calls; formats without JSON lose the blanks around an argument."""
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])]
    if '"arguments": ' in tokenizer.chat_template:
        return calls
    return [(name, {key: value.strip() for key, value in arguments.items()}) for name, arguments in calls]


def check_rounds(tokenizer: Any, reader: Any, turns: Any) -> None:
    """Check the tokens of a conversation with tools, round by round."""
    conversation = Conversation(tokenizer, with_tools([USER_ASKS], TOOLS), reader=reader)
    total = 0
    for reply, new in turns:
        reply, new = fitting(tokenizer, reply, new)
        completion, following = written(tokenizer, reply, new)
        before = conversation.token_ids.copy()
        said = conversation.add_reply(completion)
        assert calls_of(said, tokenizer) == calls_of(reply, tokenizer)
        assert conversation.add_messages(new, LONG)
        assert conversation.token_ids == [*before, *completion.token_ids.tolist(), *following]
        total += len(completion.token_ids)
    (sample,) = conversation.samples()
    assert sample.mask.sum() == total


class Qwen(Policy):
    """A policy whose replies end as those of Qwen."""

    def complete(self, request: Request) -> Completion:
        prompt = self.tokenizer.decode(request.prompt_token_ids)
        turn = prompt.count("<|im_start|>assistant") - 1
        self._asked[turn].append(prompt)
        return sampled(self.tokenizer, f"{self.script[turn]}<|im_end|>")
