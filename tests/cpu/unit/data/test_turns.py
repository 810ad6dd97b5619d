"""What is learnt of a chat, under templates as models have them: what the policy would have to write."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from tests.support.chat_templates import GEMMA3, LLAMA3, QWEN3_THINKING
from tests.support.tool_templates import make_tokenizer, tokenizer_of
from trainer.config import SFTConfig
from trainer.data.datasets import render_text
from trainer.data.examples import Stops, encode
from trainer.episodes import Sample
from trainer.errors import UserError
from trainer.models.tokenizer import stop_token_ids

PHI3 = """\
{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
MISTRAL = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}\
{% elif m.tool_calls %}{{ '[TOOL_CALLS] ' }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}</s>\
{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}\
{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"""
CHATML = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}\
{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
PLAIN = """\
{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
OWN = {"phi3": PHI3, "mistral": MISTRAL, "gemma3": GEMMA3, "llama3": LLAMA3, "qwen3_thinking": QWEN3_THINKING,
       "chatml": CHATML, "plain": PLAIN}  # fmt: skip
SPECIAL = [
    *("<|end|>", "<|user|>", "<|assistant|>", "<|end_of_text|>", "[INST]", "[/INST]", "</s>", "[TOOL_CALLS]"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"),
]

ASK = {"role": "user", "content": "a?"}
MORE = {"role": "user", "content": "b?"}
SAY = {"role": "assistant", "content": "one"}
END = {"role": "assistant", "content": "two"}
THINK = {**END, "reasoning_content": "hm"}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call00000", "type": "function", "function": {"name": "find", "arguments": {"x": "Rome"}}}]}  # fmt: skip
RESULT = {"role": "tool", "content": "18", "tool_call_id": "call00000", "name": "find"}


def tokenizer_with(name: str, variables: dict[str, Any] | None = None) -> Any:
    if name not in OWN:
        tokenizer = tokenizer_of(name, variables=variables)
        if name == "glm4moe":
            tokenizer.eos_token = "<|endoftext|>"
        return tokenizer
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<bos>", *SPECIAL], special_tokens=True)
    tokenizer.bos_token, tokenizer.chat_template = "<bos>", OWN[name]
    tokenizer.eos_token = {"phi3": "<|end_of_text|>", "mistral": "</s>"}.get(name, "<|im_end|>")
    return tokenizer


def samples_of(tokenizer: Any, chat: list[Any], stops: tuple[str, ...] = (), **options: Any) -> list[Sample]:
    ends = [*stop_token_ids("nowhere", tokenizer), *map(tokenizer.convert_tokens_to_ids, stops)]
    *prompt, reply = chat
    example = {"prompt": prompt, "answer": reply["content"], "reply": reply, "row": options.pop("row", {})}
    return encode(example, tokenizer, None, SFTConfig(max_length=10_000, **options), Stops(tokenizer, ends))


def parts(tokenizer: Any, sample: Sample) -> list[str]:
    """The runs of tokens of a sample, as text: not learnt and learnt in turn."""
    cuts = [0, *(np.flatnonzero(np.diff(sample.mask)) + 1).tolist(), len(sample.mask)]
    return [tokenizer.decode(sample.token_ids[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]


Q = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n"
WRITTEN: dict[str, tuple[str, list[Any], list[list[str]], dict[str, Any]]] = {
    "qwen3 thinks": ("qwen3", [ASK, THINK], [[Q, "<think>\nhm\n</think>\n\ntwo<|im_end|>"]], {}),
    "qwen3 thinks in its content": (
        "qwen3", [ASK, {**END, "content": "<think>\nhm\n</think>\n\ntwo"}],
        [[Q, "<think>\nhm\n</think>\n\ntwo<|im_end|>"]], {},
    ),
    "qwen3 forgets earlier thoughts": (
        "qwen3", [ASK, {**SAY, "reasoning_content": "so"}, MORE, THINK],
        [[Q, "<think>\nso\n</think>\n\none<|im_end|>"],
         [f"{Q}one<|im_end|>\n<|im_start|>user\nb?<|im_end|>\n<|im_start|>assistant\n",
          "<think>\nhm\n</think>\n\ntwo<|im_end|>"]],
        {},
    ),
    "qwen3 without thinking": (
        "qwen3", [ASK, END], [[f"{Q}<think>\n\n</think>\n\n", "two<|im_end|>"]], {"enable_thinking": False},
    ),
    "qwen3 calls": (
        "qwen3", [ASK, CALL, RESULT, END],
        [[Q, '<think>\n\n</think>\n\n'
          '<tool_call>\n{"name": "find", "arguments": {"x": "Rome"}}\n</tool_call><|im_end|>'],
         [f'{Q}<tool_call>\n{{"name": "find", "arguments": {{"x": "Rome"}}}}\n</tool_call><|im_end|>\n'
          "<|im_start|>user\n<tool_response>\n18\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
          "<think>\n\n</think>\n\ntwo<|im_end|>"]],
        {},
    ),
    "qwen3 calls last, beside a text": (
        "qwen3_instruct_2507", [ASK, {**CALL, "content": "I look."}],
        [[Q, 'I look.\n<tool_call>\n{"name": "find", "arguments": {"x": "Rome"}}\n</tool_call><|im_end|>']], {},
    ),
    "the prompt opens the thought": (
        "qwen3_thinking", [ASK, THINK], [[f"{Q}<think>\n", "hm\n</think>\n\ntwo<|im_end|>"]], {},
    ),
    "the prompt opens the thought of no thought": (
        "qwen3_thinking", [ASK, END], [[f"{Q}<think>\n", "\n</think>\n\ntwo<|im_end|>"]], {},
    ),
    "a template that drops all thoughts": (
        "deepseek_r1_distill", [ASK, {**END, "content": "<think>\nhm\n</think>\n\ntwo"}],
        [["<｜begin▁of▁sentence｜><｜User｜>a?<｜Assistant｜><think>\n",
          "hm\n</think>\n\ntwo<｜end▁of▁sentence｜>"]], {},
    ),
    "gemma3": (
        "gemma3", [ASK, SAY, MORE, END],
        [["<bos><start_of_turn>user\na?<end_of_turn>\n<start_of_turn>model\n", "one<end_of_turn>",
          "\n<start_of_turn>user\nb?<end_of_turn>\n<start_of_turn>model\n", "two<end_of_turn>"]], {},
    ),
    "phi3": (
        "phi3", [ASK, SAY, MORE, END],
        [["<|user|>\na?<|end|>\n<|assistant|>\n", "one<|end|>",
          "\n<|user|>\nb?<|end|>\n<|assistant|>\n", "two<|end|>"]],
        {},
    ),
    "llama3": (
        "llama3", [ASK, END],
        [["<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\na?<|eot_id|>"
          "<|start_header_id|>assistant<|end_header_id|>\n\n", "two<|eot_id|>"]], {},
    ),
    "mistral": (
        "mistral", [ASK, CALL, RESULT, END],
        [["<bos>[INST] a? [/INST]", '[TOOL_CALLS] {"name": "find", "arguments": {"x": "Rome"}}</s>',
          "[TOOL_RESULTS] 18[/TOOL_RESULTS]", " two</s>"]], {},
    ),
    "a template without an end": (
        "plain", [ASK, SAY, MORE, END],
        [["user: a?\nassistant:", " one\n<|im_end|>"],
         ["user: a?\nassistant: one\nuser: b?\nassistant:", " two\n<|im_end|>"]],
        {},
    ),
}  # fmt: skip


def test_a_reply_is_what_the_template_writes_after_the_prompt():
    for case in WRITTEN:
        name, chat, expected, variables = WRITTEN[case]
        tokenizer = tokenizer_with(name, variables)
        samples = samples_of(tokenizer, chat)
        assert [parts(tokenizer, sample) for sample in samples] == expected
        for sample, index in zip(samples, [i for i, m in enumerate(chat) if m["role"] == "assistant"], strict=False):
            prompt = tokenizer.encode(render_text(tokenizer, chat[:index], True), add_special_tokens=False)
            assert sample.token_ids[: len(prompt)].tolist() == prompt, "what the policy sees"


FINAL = "<|channel|>final<|message|>"
THOUGHT = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"


@pytest.mark.parametrize("is_last_thought", [False, True])
def test_replies_of_gpt_oss_have_their_channels(is_last_thought):
    """When the last message is a final one, its template drops the thought before the call, which the policy saw."""
    tokenizer = tokenizer_with("gptoss")
    last = {**END, "thinking": "hm"} if is_last_thought else END
    chat = [ASK, {**CALL, "thinking": "so"}, RESULT, last]
    [sample] = samples_of(tokenizer, chat)
    head, call, result, final = parts(tokenizer, sample)
    assert head.endswith("<|start|>user<|message|>a?<|end|><|start|>assistant")
    assert call == THOUGHT + ' to=functions.find<|channel|>commentary json<|message|>{"x": "Rome"}<|call|>'
    assert result == '<|start|>functions.find to=assistant<|channel|>commentary<|message|>"18"<|end|><|start|>assistant'
    own = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" if is_last_thought else ""
    assert final == f"{own}{FINAL}two<|return|>"
    [first, second] = samples_of(tokenizer, [ASK, SAY, MORE, END])
    assert parts(tokenizer, first)[1] == f"{FINAL}one<|return|>"
    before, said = parts(tokenizer, second)
    assert f"{FINAL}one<|end|>" in before and said == f"{FINAL}two<|return|>"


def test_a_reply_ends_with_the_token_that_begins_the_next_message():
    """GLM writes no other end: the message of a user ends a reply, and the answer of a tool ends a call."""
    tokenizer, stops = tokenizer_with("glm4moe"), ("<|user|>", "<|observation|>")
    samples = samples_of(tokenizer, [ASK, CALL, RESULT, END], stops)
    said = [part for sample in samples for part in parts(tokenizer, sample)[1::2]]
    assert [one.rpartition(">")[0].rpartition("<")[2] for one in said] == ["|observation|", "|user|"]
    assert [part for part in parts(tokenizer, samples[0]) if "Rome" in part] == said[:1]


def test_what_is_learnt_is_what_transformers_masks():
    """With a template that marks what the model writes (`{% generation %}`)."""
    tokenizer = tokenizer_with("chatml")
    chat = [{"role": "system", "content": "s"}, ASK, SAY, MORE, END]
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    theirs = tokenizer.apply_chat_template(chat, **options)
    [sample] = samples_of(tokenizer, chat)
    length = len(sample.token_ids)
    assert theirs["input_ids"][:length] == sample.token_ids.tolist()
    assert theirs["assistant_masks"] == [*sample.mask, *[0] * (len(theirs["input_ids"]) - length)]
    assert tokenizer.decode(theirs["input_ids"][length:]) == "\n", "the policy does not write it"


def test_what_the_template_does_not_write_is_refused():
    for name, reply, problem in [
        ("llama3", {**END, "reasoning_content": "hm"}, "message 2.reasoning_content"),
        ("llama3", {**CALL, "content": "I look."}, "message 2.tool_calls"),
        (
            "gptoss",
            {
                **CALL,
                "tool_calls": [
                    *CALL["tool_calls"],
                    {**CALL["tool_calls"][0], "function": {"name": "find", "arguments": {"x": "Oslo"}}},
                ],
            },
            "message 2.tool_calls",
        ),
        ("qwen3", {**END, "thinking": "hm"}, "message 2.thinking"),
        ("deepseek_r1_distill", END, "message 2: .* does not write this reply after its generation prompt"),
        ("deepseek_r1_distill", THINK, "message 2: .* does not write this reply after its generation prompt"),
    ]:
        with pytest.raises(UserError, match=problem):
            samples_of(tokenizer_with(name), [ASK, reply])


def test_tools_and_variables_of_the_row_are_in_its_prompt():
    tokenizer = tokenizer_with("qwen3")
    tool = {"type": "function", "function": {"name": "find", "description": "Find it.", "parameters": {}}}
    row = {"tools": [tool], "chat_template_kwargs": {"enable_thinking": False}}
    [sample] = samples_of(tokenizer, [ASK, END], row=row)
    prompt, said = parts(tokenizer, sample)
    assert prompt == tokenizer.apply_chat_template(
        [ASK], tools=[tool], enable_thinking=False, add_generation_prompt=True, tokenize=False
    )
    assert "Find it." in prompt and said == "two<|im_end|>"


def test_arguments_as_json_text_are_written_as_objects_and_the_reverse():
    """Qwen2.5 would write a text as a JSON string; DeepSeek can write nothing but a text."""
    text = copy.deepcopy(CALL)
    text["tool_calls"][0]["function"]["arguments"] = '{"x": "Rome"}'
    qwen = tokenizer_with("qwen2_5")
    [sample] = samples_of(qwen, [ASK, text])
    assert parts(qwen, sample)[1].count('"arguments": {"x": "Rome"}') == 1
    adds = tokenizer_with("mistral")
    adds.chat_template = MISTRAL.replace("c.function | tojson", "c.function.name + c.function.arguments")
    [sample] = samples_of(adds, [ASK, CALL])
    assert parts(adds, sample)[1] == '[TOOL_CALLS] find{"x": "Rome"}</s>'


def test_a_reply_that_holds_a_stop_token_is_learnt_whole():
    tokenizer = tokenizer_with("phi3")
    [sample] = samples_of(tokenizer, [ASK, {**END, "content": "1<|end|><|user|>and more"}])
    assert parts(tokenizer, sample)[1] == "1<|end|><|user|>and more<|end|>"
