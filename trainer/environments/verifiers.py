"""Environments of the package verifiers (0.4), by name.

verifiers needs other versions of openai and mcp than vLLM, so it is installed in a virtual environment of its own,
whose interpreter is `environment.python` (docs/environments.md).

An environment of verifiers runs its own loop, and asks a model with OpenAI's chat protocol. Here it asks a server in
its own process, on the loopback interface. Each request is a turn: its messages since the last reply are what the
policy sees next, and the reply of the policy is the response. Tools are verifiers' own MCP servers: processes of this
machine that verifiers starts. The policy's calls are sent to them, and their results are messages of the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
import json
import re
import secrets
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import verifiers.v1 as vf
from aiohttp import ClientSession, ClientTimeout, web
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.utils.loaders import load_environment, resolve_env_config, taskset_class

from trainer.environments.base import Message, StepResult
from trainer.environments.calls import ToolCall, normal_arguments, read_calls, split_calls
from trainer.environments.tools import with_tools
from trainer.environments.worker import reach_without_proxy
from trainer.sandbox.limits import MAX_TOOL_CALLS

_CHAT = "trainer-chat"
_MAX_REQUEST = 1 << 28
_NAME = re.compile(r"[^\w.-]")


class Verifiers:
    """Runs one task of verifiers in an episode: that at the position `row["task"]` of its taskset.

    The rewards of the episode are those of the one agent, by name.

    Args:
        id: name of an installed taskset, such as `my-taskset`.
        taskset: further settings of the taskset.
        options: further settings of the environment, as in the section `env` of verifiers' own config. By default the
            agent `agent` chats in this process, and calls tools.
    """

    def __init__(self, id: str, taskset: Mapping[str, Any] | None = None, **options: Any):
        agent = {"harness": {"id": _CHAT}, "runtime": {"type": "subprocess"}}
        self._settings = {"agent": agent, **options, "taskset": {**(taskset or {}), "id": id}}
        self._requests: asyncio.Queue[tuple[list[Message], list[Any]]] = asyncio.Queue()
        self._reply: asyncio.Future[Message] | None = None
        self._run: asyncio.Task[Any] | None = None
        self._messages: list[Message] = []
        self._tools: list[Any] = []
        self._calls = 0
        self._traces: list[str] = []
        self._world: _World | None = None

    @classmethod
    def check_options(cls, id: str, **options: Any) -> None:
        """Check that the taskset is installed, takes its settings, and that its tools can run here."""
        taskset = taskset_class(id)
        settings = resolve_env_config(cls(id, **options)._settings).taskset
        task = taskset.task_type()
        if task.NEEDS_CONTAINER:
            raise ValueError(f"the tasks of {id} run in a container, which nothing would end after a kill")
        for toolset in [*taskset.toolsets(settings), *task.toolsets(settings.task)]:
            kind = toolset.config.runtime.type
            if toolset.config.url is None and kind != "subprocess":
                raise ValueError(
                    f"the tools {type(toolset).__name__} of {id} run in a container (runtime {kind}), which nothing "
                    "would end after a kill; start them yourself and give their url, or use the runtime subprocess"
                )

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """Begin the task, and return the messages of its first request."""
        self._world = await _World.of(self._settings)
        task, context = self._world.task(int(row["task"])), self._world.context
        run = self._world.environment.run_episode(task, context, on_trace=self._register)
        self._run = asyncio.create_task(run)
        messages = await self._next_request()
        if messages is None:
            raise RuntimeError(f"ended before it asked the policy: {_problem(await self._run)}")
        return with_tools(messages, self._tools) if self._tools else messages

    async def step(self, reply: Message) -> StepResult:
        """Answer the request with the reply; return the messages of the next one, or the rewards."""
        assert self._run is not None and self._reply is not None
        message = self._read(reply)
        self._messages.append(_plain(message))
        self._reply.set_result(message)
        messages = await self._next_request()
        if messages is not None:
            return StepResult(messages)
        episode = await self._run
        if problem := _problem(episode):
            raise RuntimeError(problem)
        (trace,) = episode.traces
        rewards = {_NAME.sub("_", name): one.value for name, one in trace.rewards.items() if one is not None}
        metrics = {_NAME.sub("_", name): value for name, value in trace.metrics.items() if value is not None}
        return StepResult(done=True, rewards=rewards, metrics=metrics)

    async def close(self) -> None:
        """End the task."""
        if self._run is not None:
            self._run.cancel()
            with contextlib.suppress(BaseException):
                await self._run
        if self._world is not None:
            for trace in self._traces:
                self._world.episodes.pop(trace, None)

    def _register(self, trace: Any) -> None:
        assert self._world is not None
        self._traces.append(trace.id)
        self._world.episodes[trace.id] = self

    async def ask(self, messages: list[Message], tools: list[Any]) -> Message:
        """Return the policy's reply to a request, as the chat API has it."""
        self._reply = asyncio.get_running_loop().create_future()
        await self._requests.put((messages, tools))
        return await self._reply

    def _read(self, reply: Message) -> Message:
        """Return a reply as the chat API has it: where there are tools, with its calls apart from its text."""
        content, calls = reply["content"], read_calls(reply)
        if calls is None:  # such as a number that JSON does not have
            content, calls = f"{content}\n{json.dumps(reply['tool_calls'])}".strip(), ()
        elif self._tools and not calls:
            content, calls = split_calls(content)
        message: Message = {"role": "assistant", "content": content}
        if reply.get("reasoning_content"):
            message["reasoning_content"] = reply["reasoning_content"]
        calls = calls[: MAX_TOOL_CALLS + 1]  # the answer to the last one says that further ones are not made
        if calls:
            message["tool_calls"] = [_wire(call, self._calls + number) for number, call in enumerate(calls)]
            self._calls += len(calls)
        return message

    async def _next_request(self) -> list[Message] | None:
        """Return the new messages of the next request; None: the task has ended without one."""
        assert self._run is not None
        request = asyncio.create_task(self._requests.get())
        await asyncio.wait([request, self._run], return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            return None
        messages, tools = await request
        known = len(self._messages)
        if messages[:known] != self._messages:
            raise RuntimeError(
                "the task has changed earlier messages, which an episode of turns cannot; run it as an agent"
            )
        if known and tools != self._tools:
            raise RuntimeError("the task has changed its tools, which an episode of turns cannot; run it as an agent")
        if any("tool_calls" in message for message in messages[known:]):
            raise RuntimeError(
                "the task begins with calls of tools, which no turn of an episode is; run it as an agent"
            )
        self._messages, self._tools = messages, tools
        return messages[known:]


class _World:
    """What the tasks of a process share: the environment, its servers, and the server that answers for the policy."""

    _all: dict[str, asyncio.Task[_World]] = {}

    def __init__(self, settings: Mapping[str, Any]):
        self.environment = load_environment(resolve_env_config(copy.deepcopy(dict(settings))))
        self.episodes: dict[str, Verifiers] = {}
        """By the id of their trace, which requests have in a header."""
        self._tasks: list[Any] = []
        self._more: Iterator[Any] = iter(self.environment.taskset)

    @classmethod
    async def of(cls, settings: Mapping[str, Any]) -> _World:
        """Return that of these settings, which the first caller starts."""
        key = json.dumps(settings, sort_keys=True)
        task = cls._all.get(key)
        if task is None:
            task = cls._all[key] = asyncio.create_task(cls(settings)._started())
            task.add_done_callback(functools.partial(cls._note_start, key))
        return await asyncio.shield(task)

    @classmethod
    def _note_start(cls, key: str, task: asyncio.Task[_World]) -> None:
        """Let the next environment start another one if this one has failed."""
        if task.cancelled() or task.exception() is not None:
            del cls._all[key]

    async def _started(self) -> _World:
        reach_without_proxy("127.0.0.1", "localhost")
        path = secrets.token_urlsafe(16)  # nobody else on this machine can guess it
        app = web.Application(client_max_size=_MAX_REQUEST)
        app.router.add_post(f"/{path}/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            client = vf.EvalClientConfig(base_url=f"http://{host}:{port}/{path}/v1", api_key_var="NO_API_KEY")
            self.context = vf.ModelContext(model="policy", client=client)
            self._serving = self.environment.serving()  # until the process ends; collected, it would end its servers
            await self._serving.__aenter__()
        except BaseException:
            await runner.cleanup()
            raise
        return self

    def task(self, position: int) -> Any:
        """Return the task at a position of the taskset."""
        self._tasks += itertools.islice(self._more, max(0, position + 1 - len(self._tasks)))
        if not 0 <= position < len(self._tasks):
            raise IndexError(f"the row asks for the task {position}; the taskset has {len(self._tasks)}")
        return self._tasks[position]

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        episode = self.episodes.get(request.headers.get("X-Session-ID", ""))
        if episode is None:
            return _refusal(404, "the episode has ended")
        if body.get("stream"):
            return _refusal(400, "no streaming")
        try:
            messages = [_plain(message) for message in body["messages"]]
        except ValueError as error:
            return _refusal(400, str(error))
        message = await episode.ask(messages, body.get("tools") or [])
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        answer = {"id": "policy", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response({**answer, "choices": [choice], "usage": usage})


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A harness that chats in this process, and calls the tools of MCP servers: no program to start."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_TOOL_INTERCEPTION = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """Send the conversation so far to the model, and make its calls of tools, until it replies without one."""
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        config = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(
                ClientSession(timeout=ClientTimeout(total=None), headers={"Authorization": f"Bearer {secret}"})
            )
            tools, dispatch, servers = await connect_mcp({"mcpServers": config}, stack)
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while True:
                async with http.post(f"{endpoint}/chat/completions", json=body) as response:
                    if response.status != 200:
                        return vf.ProgramResult(1, "", await response.text())
                    reply = (await response.json())["choices"][0]["message"]
                messages.append(reply)
                calls = reply.get("tool_calls") or []
                if not calls:
                    return vf.ProgramResult(0, "", "")
                for number, call in enumerate(calls):
                    objection = await _objection(http, tool_interception_url, call)
                    if objection is None:
                        messages.append(await _answer(servers, dispatch, call, number))
                    elif objection["action"] == "stop":
                        return vf.ProgramResult(1, "", str(objection["reason"]))
                    else:
                        messages.append(objection["message"])


async def _answer(servers: Any, dispatch: Any, call: Mapping[str, Any], number: int) -> Message:
    """Make the call with this number in its reply, and return the answer."""
    name = call["function"]["name"]
    if number >= MAX_TOOL_CALLS:
        content: Any = f"error: only the first {MAX_TOOL_CALLS} calls of a reply are made"
    elif name not in dispatch:
        content = f"error: unknown tool {name!r}"
    else:
        content = await call_mcp(servers, dispatch, name, json.loads(call["function"]["arguments"]))
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


async def _objection(http: ClientSession, url: str | None, call: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Ask the hooks of the task whether a call may be made; return None, or what verifiers has decided instead."""
    if url is None:
        return None
    function = call["function"]
    question = {
        "tool_call_id": call["id"],
        "name": function["name"],
        "arguments": json.loads(function["arguments"]),
    }
    async with http.post(url, json=question) as response:
        response.raise_for_status()
        decision = await response.json()
    return None if decision["action"] == "allow" else decision


def _wire(call: ToolCall, number: int) -> dict[str, Any]:
    """Return a call as the chat API has it. Its id is the same in another attempt."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _refusal(status: int, problem: str) -> web.Response:
    return web.json_response({"error": {"message": problem, "type": "invalid_request_error"}}, status=status)


def _plain(message: Mapping[str, Any]) -> Message:
    """Return what counts of a message of the chat API.

    Raises:
        ValueError: it has parts that are not text.
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        kinds = {part.get("type") for part in content} - {"text"}
        if kinds:
            raise ValueError(
                f"a message of the role {message['role']} has {min(map(str, kinds))}, and the policy reads text alone"
            )
        content = "".join(part["text"] for part in content)
    plain: Message = {"role": message["role"], "content": content}
    if message["role"] == "tool":
        plain["tool_call_id"] = message.get("tool_call_id", "")
        if message.get("name"):
            plain["name"] = message["name"]
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function, arguments = call["function"], call["function"]["arguments"]
    function = {"name": function["name"], "arguments": normal_arguments(arguments or "{}") or arguments}
    return {"id": call["id"], "type": "function", "function": function}


def _problem(episode: Any) -> str:
    """Return why an episode of verifiers has failed; empty if it has not."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        return f"{errors[-1].type}: {errors[-1].message}"
    if len(episode.traces) != 1:
        return f"it ran {len(episode.traces)} agents, and an episode of turns has one"
    return "" if episode.ok else "it failed"


# verifiers finds a harness by the name of a module.
sys.modules[_CHAT.replace("-", "_")] = types.SimpleNamespace(  # type: ignore[assignment]
    __name__=_CHAT, __all__=["ChatHarness"], ChatHarness=ChatHarness
)
