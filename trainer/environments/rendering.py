"""Conversations by the library `renderers`, which knows the chat templates and tool formats of many models.

For other models, and where the library is not installed, the model's own chat template writes conversations (see
`trainer.environments.conversation`), and describes tools if it can (see `trainer.environments.template_tools`).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import Any

from trainer.config import ModelConfig
from trainer.data.datasets import render_text
from trainer.data.limits import TextTooLong, encode
from trainer.data.replies import reply_text
from trainer.environments.base import Message
from trainer.environments.template_tools import REPLY_MARK, TemplateTools, find_template_tools
from trainer.environments.tools import split_tools, unread_reply, with_tools
from trainer.errors import UserError, describe_error, did_you_mean
from trainer.files.documents import nests_deeply

LOG = logging.getLogger(__name__)

AUTO, TEMPLATE, HERMES = "auto", "template", "hermes"
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
_USER = {"role": "user", "content": "2+2?"}
_PROBES: tuple[tuple[list[Message], list[Any]], ...] = (
    ([_USER], []),
    ([{"role": "system", "content": "Be brief."}, _USER], []),
    ([{"role": "system", "content": "Be brief."}, _USER], [_TOOL]),
)
"""Prompts and tools that a renderer must write as the model's template does. The template alone writes histories."""
_CALLS: list[Message] = [
    {"id": f"call_{i}", "type": "function", "function": {"name": "add", "arguments": {"a": 70413 + i}}}
    for i in range(2)
]
_ANSWERS: list[Message] = [
    {"role": "tool", "tool_call_id": f"call_{i}", "name": "add", "content": content}
    for i, content in enumerate(["é 7\n", ""])
]
_FOLLOWED: tuple[tuple[list[Message], list[Message]], ...] = (
    ([], [_USER]),
    ([], [{"role": "user", "content": " é\n{}"}]),
    (_CALLS[:1], _ANSWERS[:1]),
    (_CALLS[:1], _ANSWERS[1:]),
    (_CALLS, _ANSWERS),
)
"""Calls of a reply, and the messages that follow it, which a renderer must read and write as the template does."""


class ChatRenderer:
    """Messages as tokens and replies as messages, in the format of one model.

    Tools are those that the system message names in `tools`; its text `without_tools` takes the place of its content,
    which describes them for other models (see `trainer.environments.tools`).

    Args:
        renderer: of the library. It reads replies, and writes what follows them.
        tokenizer: its chat template writes all else.
        limit: messages with more characters are too long, and not encoded.
    """

    def __init__(self, renderer: Any, tokenizer: Any, limit: float):
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._limit = limit

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation, up to where the next reply begins, as the model's template writes it.

        The renderer writes some histories in another way than the template of its model, so it writes none.

        Raises:
            UserError: the template refuses the messages.
            TextTooLong: they are too long.
        """
        self._check_length(messages)
        messages, tools = split_tools(messages)
        text = render_text(self._tokenizer, messages, add_generation_prompt=True, tools=tools)
        return encode(self._tokenizer, text, math.inf)

    def stops(self) -> set[int]:
        """Return the tokens that end a reply."""
        return set(self._renderer.get_stop_token_ids())

    def bridge(
        self, prompt: Sequence[int], reply: Sequence[int], new: Sequence[Message], history: Sequence[Message]
    ) -> list[int] | None:
        """Return the tokens between a reply and the next one; None: they cannot follow the reply as it was sampled.

        Args:
            prompt, reply: the tokens so far.
            new: the messages that follow the reply.
            history: those before it.

        Raises:
            TextTooLong: the new messages are too long.
        """
        self._check_length(new)
        before = [*prompt, *reply]
        try:
            whole = self._renderer.bridge_to_next_turn(
                list(prompt), list(reply), list(new), tools=split_tools(history)[1]
            )
        except Exception:  # it refuses the messages: `prompt` says so
            return None
        if whole is None or list(whole.token_ids[: len(before)]) != before:
            return None
        return list(whole.token_ids[len(before) :])

    def reply(self, token_ids: Sequence[int], prompt: Sequence[int], text: str, history: Sequence[Message]) -> Message:
        """Return a reply as a message: where there are tools, with its calls of them apart from its text.

        If a call cannot be read, the reply is its text as a whole. In the formats of some models this text does not
        show that there are calls: then the message names all of them as `unread_calls`, with their problems.

        Args:
            text: the decoded reply.
        """
        tools = split_tools(history)[1]
        if not tools:
            return {"role": "assistant", "content": text}
        try:
            parsed = self._renderer.parse_response(list(token_ids), tools=tools, prompt_ids=list(prompt))
        except Exception as error:  # such as lists in lists without end, or a number with too many digits
            return unread_reply(text, [{"problem": type(error).__name__}])
        if not all(_is_readable(call) for call in parsed.tool_calls):
            return unread_reply(text, [_problem(call) for call in parsed.tool_calls])
        calls = [
            {
                "id": call.id or f"call_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(parsed.tool_calls)
        ]
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        return {**message, "tool_calls": calls} if calls else message

    def _check_length(self, messages: Sequence[Message]) -> None:
        characters = sum(len(message["content"]) for message in messages)
        if characters > self._limit:
            raise TextTooLong(characters)


def _problem(call: Any) -> dict[str, str]:
    """Return the name of a call and its number, if they are known, and why it cannot be read; empty: it can be."""
    status = str(call.status).replace("_", " ")
    problem = "" if _is_readable(call) else "no readable arguments" if status == "ok" else status
    known = {"name": call.name, "id": call.id}
    return {**{key: value for key, value in known.items() if value and isinstance(value, str)}, "problem": problem}


def _is_readable(call: Any) -> bool:
    """Return whether a call has a name, and arguments that every reader of its message can print."""
    is_whole = str(call.status) == "ok" and isinstance(call.name, str)
    return is_whole and isinstance(call.arguments, dict) and not nests_deeply(call.arguments)


def find_renderer(model: ModelConfig, tokenizer: Any, limit: float) -> ChatRenderer | TemplateTools | None:
    """Return what writes and reads conversations with tools; None: the chat template, and tools as text (Hermes).

    Raises:
        UserError: see `_library_renderer`.
    """
    found = _library_renderer(model, tokenizer, limit)
    if found is not None or model.path is None or model.tool_format == HERMES:
        return found
    return find_template_tools(tokenizer, str(tokenizer.chat_template))


def _library_renderer(model: ModelConfig, tokenizer: Any, limit: float) -> ChatRenderer | None:
    """Return the renderer that `model.renderer` chooses; None: the model's own chat template.

    `auto` chooses that of the library, if the library is installed, knows `model.path`, and writes conversations as
    the model's template does.

    Raises:
        UserError: the library is not installed, has no such renderer, or the renderer writes conversations in another
            way than the model's chat template.
    """
    if model.renderer == TEMPLATE or model.renderer == AUTO and (model.path is None or model.chat_template is not None):
        return None
    key = f"model.renderer={model.renderer}"
    try:
        from renderers.base import MODEL_RENDERER_MAP, create_renderer, merge_chat_template_kwargs
        from renderers.configs import config_from_name
    except ImportError as error:
        if model.renderer == AUTO:
            return None
        raise UserError(
            f"{key}: the package renderers cannot be imported ({describe_error(error)}); install the extra "
            "`environments` (docs/install.md)"
        ) from error
    names = sorted(set(MODEL_RENDERER_MAP.values()))
    name = MODEL_RENDERER_MAP.get(str(model.path)) if model.renderer == AUTO else model.renderer
    if name is None:
        return None
    if name not in names:
        meant = did_you_mean(name, [*names, AUTO, TEMPLATE]) or f"choose one of {', '.join([AUTO, TEMPLATE, *names])}"
        raise UserError(f"{key}: the library renderers has no such renderer; {meant}")
    try:
        settings = merge_chat_template_kwargs(config_from_name(name), model.chat_template_kwargs)
        if settings.thinking_retention is None:
            settings = type(settings)(**settings.model_dump(exclude_unset=True), thinking_retention="all")
        renderer = create_renderer(tokenizer, settings)
        differs = any(not _agrees(renderer, tokenizer, *probe) for probe in _PROBES)
        found = ChatRenderer(renderer, tokenizer, limit)
        differs = differs or any(not _continues(found, tokenizer, *followed) for followed in _FOLLOWED)
    except Exception as error:
        if model.renderer == AUTO:
            LOG.info("model.renderer=auto: the model's own chat template is used (%s)", describe_error(error))
            return None
        raise UserError(f"{key}: cannot be used with this model ({describe_error(error)})") from error
    if differs and model.renderer == AUTO:
        LOG.info("model.renderer=auto: the model's own chat template is used; that of %s differs", name)
        return None
    if differs:
        raise UserError(
            f"{key}: writes conversations in another way than the model's chat template; choose another one"
        )
    return found


def _agrees(renderer: Any, tokenizer: Any, messages: list[Message], tools: list[Any]) -> bool:
    """Return whether the renderer writes a conversation as the model's template does."""
    ours = renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True)
    text = render_text(tokenizer, messages, add_generation_prompt=True, tools=tools)
    return list(ours) == tokenizer.encode(text, add_special_tokens=False)


def _continues(found: ChatRenderer, tokenizer: Any, calls: list[Message], new: list[Message]) -> bool:
    """Return whether a renderer reads the calls that the model's template writes, and writes what follows them.

    The reply ends with the first stop token behind what it says. A renderer may leave what follows to the template.
    """
    first = with_tools([_USER], [_TOOL])
    reply: Message = {"role": "assistant", "content": REPLY_MARK}
    if calls:
        reply |= {"content": "", "tool_calls": calls}
    try:
        whole = render_text(tokenizer, [_USER, reply, *new], add_generation_prompt=True, tools=[_TOOL])
    except UserError:
        if len(calls) > 1:  # the format of Llama 3 has one
            return True
        raise
    last = str(calls[-1]["function"]["arguments"]["a"]) if calls else REPLY_MARK
    said, _, rest = whole.rpartition(last)
    prompt = found.prompt(first)
    begin = tokenizer.decode(prompt)
    after = tokenizer.encode(rest, add_special_tokens=False)
    stops = found.stops()
    end = next((index for index, token in enumerate(after) if token in stops), None)
    if end is None or not said:
        return False
    start = os.path.commonprefix([tokenizer.encode(said, add_special_tokens=False), prompt])
    says = said[len(tokenizer.decode(start)) :] + last  # templates drop an empty thought of the prompt from a history
    if begin.rstrip().endswith("<think>") and "</think>" not in says:  # templates drop thoughts of earlier replies
        says = f"Hm.\n</think>\n\n{says}"
    sampled = tokenizer.encode(says, add_special_tokens=False) + after[: end + 1]
    message = found.reply(sampled, prompt, reply_text(tokenizer, sampled, has_ended=True), first)
    if [call["function"] for call in message.get("tool_calls", [])] != [call["function"] for call in calls]:
        return False
    return found.bridge(prompt, sampled, new, first) in (None, after[end + 1 :])
