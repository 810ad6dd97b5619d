"""Tools that are plain Python functions, called in the format of Hermes, which Qwen and others are trained on."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from trainer.environments.base import Environment, Message, StepResult
from trainer.errors import UserError, describe_error
from trainer.files.documents import nests_deeply
from trainer.sandbox.limits import MAX_TOOL_CALLS

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
"""A call of a tool in a reply. Its group is JSON with `name` and `arguments`."""
_SYSTEM = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


class ToolFailure(Exception):  # noqa: N818 - named like the failures of environments
    """Raised by a tool that does not work. The environment has failed, and the policy does not see why."""


class ToolEnvironment:
    """An environment that answers calls of tools, until the policy replies without one. Derive from it.

    A class has `tools`, functions with type hints and a docstring that describes each argument (as
    `transformers.utils.get_json_schema` reads it), and the methods `prompt` and `score`. A tool may be `async`. What a
    tool returns must depend on the row, the seed and the calls of the episode so far, and on nothing else.
    """

    tools: Sequence[Callable[..., Any]] = ()
    """`prompt` may set other tools for an episode, such as methods that read what belongs to its row."""
    instructions = _SYSTEM
    """The system message, with `{tools}` in place of the schemas of the tools. Empty: none, for a policy that knows the
    tools already."""

    recorded_tools: Sequence[str] = ()
    """Names of tools that change nothing in the environment. After a kill, and if the process of an episode has died,
    the answers that they gave before are used, and no call is made: a call may cost money or time."""

    call_id = ""
    """Names the call under way, the same after a kill: a service can refuse what it has done already."""

    def prompt(self, row: Mapping[str, Any]) -> str | Sequence[Message]:
        """Return the question of a row: its `prompt`, unless a class says otherwise."""
        return row["prompt"]

    def score(self, answer: str, row: Mapping[str, Any]) -> float | Mapping[str, float]:
        """Return the reward of the last reply, the one without a call, or its named terms."""
        raise NotImplementedError

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """Return the system message, which describes the tools, and the question."""
        self._row = row
        prompt = self.prompt(row)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if not self.instructions:
            return messages
        return with_tools(messages, [tool_schema(tool) for tool in self.tools], self.instructions)

    async def step(self, reply: Message, step_id: str = "", recorded: StepResult | None = None) -> StepResult:
        """Answer each call with a message of the role `tool`. A wrong call is answered with the error."""
        read = [call["function"] for call in reply.get("tool_calls") or []]  # by a renderer
        calls = [*map(json.dumps, read), *CALL.findall(reply["content"])]
        count = {f"tool_calls/{tool.__name__}": 0 for tool in self.tools} | {"tool_errors": 0}
        unread = reply.get("unread_calls") or []
        if not calls and unread:
            count["tool_errors"] += len(unread)
            return StepResult([_refusal(call) for call in unread[:MAX_TOOL_CALLS]], metrics=count)
        if not calls:
            score = self.score(reply["content"].strip(), self._row)
            given: dict[str, Any] = {"rewards": score} if isinstance(score, Mapping) else {"reward": score}
            return StepResult(done=True, metrics=count, **given)
        answers = []
        for number, call in enumerate(calls[:MAX_TOOL_CALLS]):
            self.call_id = f"{step_id}-{number}"
            known = recorded.messages[number : number + 1] if recorded is not None else ()
            answers.append(await self._call(call, count, *(message["content"] for message in known)))
        if len(calls) > MAX_TOOL_CALLS:
            answers.append(f"Error: {len(calls)} calls; only the first {MAX_TOOL_CALLS} of a reply are made")
            count["tool_errors"] += len(calls) - MAX_TOOL_CALLS
        messages: list[Message] = [{"role": "tool", "content": answer} for answer in answers]
        for message, call in zip(messages, reply.get("tool_calls") or [], strict=False):
            message.update(tool_call_id=call["id"], name=call["function"]["name"])
        return StepResult(messages, metrics=count if recorded is None else recorded.metrics)

    async def close(self) -> None:
        pass

    def _tool(self, name: str) -> Callable[..., Any]:
        tool = {tool.__name__: tool for tool in self.tools}.get(name)
        if tool is None:
            raise KeyError(f"there is no tool {name}")
        return tool

    async def _call(self, text: str, count: dict[str, int], known: str | None = None) -> str:
        """Return the answer to a call (`known`: what it was before); count it: by its tool, and as an error if so."""
        try:
            call = json.loads(text, parse_float=_finite, parse_constant=_finite)
            tool = self._tool(call["name"])
            count[f"tool_calls/{tool.__name__}"] += 1
            arguments = call.get("arguments", {})
            _check(tool, arguments)
            if known is not None and tool.__name__ in self.recorded_tools:
                return known
            value = tool(**arguments)
            if inspect.isawaitable(value):
                value = await value
            return value if isinstance(value, str) else json.dumps(value, default=str)
        except ToolFailure:
            raise
        except Exception as error:  # the policy's mistake, or the tool's: the policy sees it
            count["tool_errors"] += 1
            return f"Error: {describe_error(error)}"


def _refusal(call: Mapping[str, str]) -> Message:
    """Return the answer to a call of a reply whose calls cannot all be read (see `template_tools`)."""
    problem = f"this call cannot be read ({call['problem']})" if call["problem"] else "another call cannot be read"
    known = {key: call[name] for key, name in (("tool_call_id", "id"), ("name", "name")) if name in call}
    return {"role": "tool", "content": f"Error: {problem}; no call of the reply was made", **known}


def with_tools(
    messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]], instructions: str = _SYSTEM
) -> list[Message]:
    """Return messages that begin with a system message which describes tools, after the text of the one they have.

    With the usual instructions it also holds the schemas as `tools`, and its own text as `without_tools`, for
    renderers and chat templates, which describe tools in the format of their model (see `split_tools`).
    """
    has_system = bool(messages) and messages[0]["role"] == "system"
    own = messages[0]["content"] if has_system else ""
    text = instructions.replace("{tools}", "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas))
    system: Message = {"role": "system", "content": own + "\n\n" + text if has_system else text}
    if instructions is _SYSTEM:
        system |= {"tools": list(schemas), "without_tools": own}
    return [system, *messages[has_system:]]


def split_tools(messages: Sequence[Message]) -> tuple[list[Message], list[Any] | None]:
    """Return the messages without the description of tools that `with_tools` has written, and the tools."""
    if not messages or not messages[0].get("tools"):
        return list(messages), None
    first, *others = messages
    own = first.get("without_tools", "")
    system = [{"role": first["role"], "content": own}] if own else []
    return [*system, *others], list(first["tools"])


def unread_reply(text: str, calls: list[dict[str, str]]) -> Message:
    """Return a reply whose calls cannot all be read.

    Args:
        calls: what is known of each of them, and its problem. The message names them if its text shows no call.
    """
    message: Message = {"role": "assistant", "content": text}
    return message if CALL.search(text) else {**message, "unread_calls": calls}


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _check(tool: Callable[..., Any], arguments: Any) -> None:
    """Check that a tool can be called with these arguments, by its type hints. They are not converted.

    Raises:
        TypeError: an argument is missing, has another type, or is not known.
        ValueError: an argument is nested too deeply.
    """
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticUserError

    if not isinstance(arguments, dict):
        raise TypeError("the arguments must be an object with the name of each")
    if nests_deeply(arguments):
        raise ValueError("the arguments are nested too deeply")
    signature = inspect.signature(tool)
    signature.bind(**arguments)
    more = next((p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    try:
        hints = typing.get_type_hints(tool, include_extras=True)
    except (NameError, TypeError):  # names for type checkers only, or an object that is called
        hints = {}
    for name, value in arguments.items():
        parameter = signature.parameters.get(name, more)
        assert parameter is not None
        if parameter.name not in hints or value is None and parameter.default is None:
            continue
        try:
            adapter = TypeAdapter(hints[parameter.name])
        except PydanticUserError:  # pydantic does not know the type
            continue
        try:
            adapter.validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, [name, *one['loc']]))}: {one['msg']}" for one in error.errors()[:3]]
            raise TypeError("; ".join(problems)) from None


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function, from its type hints and its docstring."""
    from transformers.utils import get_json_schema  # late, because the import takes seconds

    return get_json_schema(tool)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: str  # a JSON object
    id: str = field(default="", compare=False)  # what its answer calls it; empty: it is not known

    def __str__(self) -> str:
        call = json.dumps({"name": self.name, "arguments": json.loads(self.arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"


def split_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return a reply without its calls, and the calls. If one of them cannot be read, all of the text is content."""
    try:
        written = [json.loads(found, parse_constant=_finite) for found in CALL.findall(text)]
    except (ValueError, RecursionError):
        return text, ()
    calls = _checked_calls(written)
    return (CALL.sub("", text).strip(), calls) if calls else (text, ())


def read_calls(message: Message) -> tuple[ToolCall, ...] | None:
    """Return the calls that a reply names; None: an agent could not send one of them back."""
    return _checked_calls([call["function"] for call in message.get("tool_calls") or []])


def normal_arguments(text: str) -> str | None:
    """Return a JSON object as text that is the same for the same object; None: it is no object."""
    try:
        value = json.loads(text, parse_constant=_finite)
        if not isinstance(value, dict) or nests_deeply(value):
            return None
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, RecursionError):
        return None
    return written


def _checked_calls(values: Sequence[Any]) -> tuple[ToolCall, ...] | None:
    """Return calls that have a name, a text, and arguments, a JSON object; None: one of them is no such call."""
    calls = []
    for value in values:
        try:
            name, arguments = value["name"], value.get("arguments", {})
            name.encode()
            written = normal_arguments(json.dumps(arguments, ensure_ascii=False))
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            return None
        if not isinstance(name, str) or written is None:
            return None
        calls.append(ToolCall(name, written))
    return tuple(calls)


def supervised_chat(
    environment: Callable[..., Environment],
    row: Mapping[str, Any],
    chat: Sequence[Message],
    seed: int = 0,
    **options: Any,
) -> dict[str, list[Message]]:
    """Return a row for `trainer sft` with `data.messages_key=messages`: a chat that begins as an episode begins.

    An episode begins with what the environment's `reset` returns, such as the system message that describes the tools.
    These messages replace what the chat has before its first reply.

    Args:
        environment: the class that `environment.name` names.
        row: of the data, for the environment.
        chat: messages with replies (`assistant`) and answers of tools (`tool`). Calls in `tool_calls`, as the API of
            OpenAI has them, are written as the text that `ToolEnvironment` reads.
        seed: for what the environment draws.
        options: of the environment, as in `environment.kwargs`.

    Raises:
        UserError: the chat has no reply, or does not end with one; or a call in `tool_calls` names no tool of the
            environment, or has arguments that the tool does not take.
    """
    first = next((i for i, message in enumerate(chat) if message["role"] == "assistant"), None)
    if first is None or chat[-1]["role"] != "assistant":
        raise UserError("supervised_chat: the chat must end with a reply, a message of the role `assistant`")
    world = environment(**options)
    try:
        start = _result(world.reset(row, seed))
        replies = [_as_text(message, world) for message in chat[first:]]
    finally:
        _result(world.close())
    return {"messages": [*map(dict, start), *replies]}


def _as_text(message: Message, world: Environment) -> Message:
    """Return a message with text as its content, its calls included."""
    content = message.get("content") or ""
    content = content if isinstance(content, str) else json.dumps(content, default=str)
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(world, ToolEnvironment):
            try:
                _check(world._tool(function["name"]), arguments)
            except Exception as error:
                raise UserError(f"supervised_chat: a call of {function['name']}: {describe_error(error)}") from error
        calls.append(str(ToolCall(function["name"], json.dumps(arguments))))
    return {"role": message["role"], "content": "\n".join(filter(None, [content, *calls]))}


def _result(value: Any) -> Any:
    """Return a value, or what it yields when it is awaited, also where an event loop runs already (a notebook)."""
    if not inspect.isawaitable(value):
        return value

    async def waited(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, waited(value)).result()
