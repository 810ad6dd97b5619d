"""Tools that are plain Python functions, called in the format of Hermes, which Qwen and others are trained on."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.environments.base import Message, Step
from trainer.errors import describe_error

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_SYSTEM = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class ToolEnvironment:
    """An environment that answers calls of tools, until the policy replies without one. Derive from it.

    A class has `tools`, functions with type hints and a docstring that describes each argument (as
    `transformers.utils.get_json_schema` reads it), and the methods `prompt` and `score`. A tool may be `async`. What a
    tool returns must depend on its arguments alone.
    """

    tools: Sequence[Callable[..., Any]] = ()

    def prompt(self, row: Mapping[str, Any]) -> str | Sequence[Message]:
        """Return the question of a row: its `prompt`, unless a class says otherwise."""
        return row["prompt"]

    def score(self, answer: str, row: Mapping[str, Any]) -> float:
        """Return the reward of the last reply, the one without a call."""
        raise NotImplementedError

    async def start(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """Return the system message, which describes the tools, and the question."""
        self._row = row
        prompt = self.prompt(row)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        own = messages.pop(0)["content"] + "\n\n" if messages[0]["role"] == "system" else ""
        schemas = "\n".join(json.dumps(tool_schema(tool)) for tool in self.tools)
        return [{"role": "system", "content": own + _SYSTEM.format(tools=schemas)}, *messages]

    async def step(self, reply: Message) -> Step:
        """Answer each call with a message of the role `tool`. A wrong call is answered with the error."""
        calls = _CALL.findall(reply["content"])
        if not calls:
            return Step(reward=float(self.score(reply["content"].strip(), self._row)), done=True)
        return Step([{"role": "tool", "content": await self._call(call)} for call in calls])

    async def close(self) -> None:
        pass

    async def _call(self, text: str) -> str:
        try:
            call = json.loads(text)
            tool = {tool.__name__: tool for tool in self.tools}.get(call["name"])
            if tool is None:
                raise KeyError(f"there is no tool {call['name']}")
            value = tool(**call.get("arguments", {}))
            if inspect.isawaitable(value):
                value = await value
            return value if isinstance(value, str) else json.dumps(value, default=str)
        except Exception as error:  # the policy's mistake, or the tool's: the policy sees it
            return f"Error: {describe_error(error)}"


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function, from its type hints and its docstring."""
    from transformers.utils import get_json_schema  # late, because the import takes seconds

    return get_json_schema(tool)
