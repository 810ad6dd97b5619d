"""How replies of some models are read (`tokenizer.response_template`), for tests without the models' own files."""

from __future__ import annotations

from typing import Any

_THOUGHT = {"open": "<think>", "close_pattern": r"</think>\s*"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def _answer(name: str, anchor: str, calls: dict[str, Any], end: str) -> dict[str, Any]:
    fields = {
        name: _THOUGHT,
        "tool_calls": {"repeats": True, "transform": _NAMED, **calls},
        "content": {"close_pattern": end},
    }
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


def _tags(key: str, value: str) -> dict[str, Any]:
    return {"content": "xml-inline", "content_args": {"tag_pattern": key + value, "value_parser": {"name": "text"}}}


QWEN = "<|im_start|>assistant\n"
JSON_CALLS = _answer(
    "reasoning_content",
    QWEN,
    {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    r"<\|im_end\|>",
)
"""Of Qwen2.5 and Qwen3: the format of Hermes."""
XML_CALLS = _answer(
    "reasoning_content",
    QWEN,
    {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close": "</tool_call>",
        **_tags(r"<parameter=(?P<key>[^>\n]+)>", r"(?P<value>.*?)</parameter>"),
    },
    r"<\|im_end\|>",
)
"""Of Qwen3.5."""
GLM_CALLS = _answer(
    "reasoning_content",
    "<|assistant|>",
    {
        "open_pattern": r"<tool_call>(?P<name>\S+)",
        "close": "</tool_call>",
        **_tags(r"<arg_key>(?P<key>[^<]+)</arg_key>\s*", r"<arg_value>(?P<value>.*?)</arg_value>"),
    },
    r"<\|user\|>|<\|observation\|>|$",
)
"""Of GLM-4.5."""
CHANNELS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": "<|return|>"},
        "tool_calls": {
            "open_pattern": r"to=functions\.(?P<name>\S+?)<\|channel\|>commentary json<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": _NAMED,
        },
    },
}
"""Of gpt-oss."""
