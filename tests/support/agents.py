"""Agents for tests, and a policy that answers them as a function says."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.support.environments import first_time, take_effect
from trainer.environments import AgentResult, Endpoint
from trainer.generation.engine import Completion, Request
from trainer.seeding import derive_seed

Say = Callable[[str, int], str]
"""Returns the reply to a prompt, a text, and a seed. One that ends in `…` is cut."""


class Policy:
    """Answers requests as a function says."""

    def __init__(self, tokenizer: Any, say: Say, version: int = 7):
        self.tokenizer = tokenizer
        self.say = say
        self.version = version
        self.asked: list[Request] = []
        self.completions: list[Completion] = []

    def end_requests(self) -> None:
        pass

    def complete(self, request: Request) -> Completion:
        text = self.say(self.tokenizer.decode(request.prompt_token_ids), request.seed)
        tokens = self.tokenizer.encode(text.rstrip("…"), add_special_tokens=False)
        is_cut = text.endswith("…") or len(tokens) >= request.sampling.max_tokens
        tokens = tokens[: request.sampling.max_tokens]
        if not is_cut:
            tokens.append(self.tokenizer.eos_token_id)
        drawn = [-0.001 * (1 + derive_seed(request.seed, i) % 1000) for i in range(len(tokens))]
        completion = Completion(tokens, drawn, "length" if is_cut else "stop", self.version)
        self.asked.append(request)
        self.completions.append(completion)
        return completion


class OneCall:
    """Asks `row["prompt"]` once; the reward is the length of the reply. `row["do"]` makes it misbehave before that.

    `row["once"]`, a path, makes it do so only the first time.
    """

    def __init__(self, times: int = 1):
        self._times = times

    def run(self, row: Mapping[str, Any], seed: int, endpoint: Endpoint) -> AgentResult | float:
        if "do" in row and ("once" not in row or first_time(row["once"])):
            misbehave(row["do"])
        said = [ask(endpoint, row["prompt"]) for _ in range(self._times)]
        return AgentResult(float(len(said[-1])), {"calls": 0.5}, {"chars": len(said[-1])})


class AsyncOneCall(OneCall):
    """The same, `async`."""

    async def run(self, row: Mapping[str, Any], seed: int, endpoint: Endpoint) -> Any:  # type: ignore[override]
        if row.get("do") == "wait":
            if "once" not in row or first_time(row["once"]):
                await asyncio.sleep(1000)
            row = {"prompt": row["prompt"]}
        while row.get("do") == "stay":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)
        return await asyncio.to_thread(super().run, row, seed, endpoint)


def misbehave(how: str) -> None:
    match how:
        case "raise":
            raise RuntimeError("it broke")
        case "die":
            os._exit(5)
        case "hang":
            time.sleep(1000)


def ask(endpoint: Endpoint, prompt: str, **fields: Any) -> str:
    """Return the reply to a prompt, without a library."""
    return chat(endpoint, [{"role": "user", "content": prompt}], **fields)["choices"][0]["message"]["content"]


def chat(endpoint: Endpoint, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return the answer of the endpoint.

    Raises:
        RuntimeError: it is an error.
    """
    body = json.dumps({"model": endpoint.model, "messages": messages, **fields}).encode()
    request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", body)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # httpx takes 40 ms to make a client
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code} {error.read().decode()}") from error


class Effects:
    """Asks 40 times, and has an effect on a service after each reply."""

    def __init__(self, service: str, is_slow: bool = False):
        self._service, self._is_slow = service, is_slow

    def run(self, row: Mapping[str, Any], seed: int, endpoint: Endpoint) -> float:
        messages = [{"role": "user", "content": row["prompt"]}]
        for turn in range(1, 41):
            messages.append(chat(endpoint, messages)["choices"][0]["message"])
            time.sleep(0.02 if self._is_slow else 0)
            while take_effect(self._service, f"{endpoint.episode_id} {turn}", turn):
                time.sleep(600)
            messages.append({"role": "user", "content": str(derive_seed(messages[-1]["content"], seed) % 1000)})
        return len(messages[-2]["content"]) % 7 / 7


class Counted:
    """Returns how many of its kind run beside it, itself included."""

    async def run(self, row: Mapping[str, Any], seed: int, endpoint: Endpoint) -> float:
        own = os.path.join(row["directory"], os.urandom(8).hex())
        open(own, "x").close()
        await asyncio.sleep(0.3)
        running = len(os.listdir(row["directory"]))
        os.remove(own)
        return running


class Returns:
    """Returns what is in its row."""

    def run(self, row: Mapping[str, Any], seed: int, endpoint: Endpoint) -> Any:
        value = row["value"]
        return AgentResult(**value) if isinstance(value, dict) else value


class MadeUpTurns:
    """Talks for `row["turns"]` turns, as a hash of seed and replies says: it branches and compacts its history."""

    def run(self, row: Mapping[str, Any], seed: int, endpoint: Endpoint) -> float:
        said: list[dict[str, Any]] = [{"role": "user", "content": str(row["prompt"])}]
        total = 0
        for turn in range(row.get("turns", 3)):
            reply = chat(endpoint, said)["choices"][0]["message"]
            total += len(reply["content"])
            match derive_seed(seed, turn, reply["content"]) % 4:
                case 0:  # forget the middle
                    said = [said[0], {"role": "user", "content": f"so far: {reply['content'][:3]}"}]
                case 1:  # another reply to the same
                    said = said[:]
                case _:
                    said = [*said, reply, {"role": "user", "content": f"{turn}?"}]
        return total % 7 / 7


class Hashed(MadeUpTurns):
    """The same, slowly; a hash of the seed lets its process die once, if `crashes` names a directory."""

    def __init__(self, crashes: str | None = None):
        self._crashes = crashes

    def run(self, row: Mapping[str, Any], seed: int, endpoint: Endpoint) -> float:
        if self._crashes and derive_seed(seed) % 2 == 0 and first_time(f"{self._crashes}/{seed}"):
            os._exit(7)
        time.sleep(random.SystemRandom().random() / 50)  # another time at each start
        return super().run(row, seed, endpoint)


PROGRAM = """
import json, sys
from openai import OpenAI

client, task = OpenAI(), json.loads(sys.argv[1])
tool = {"type": "function", "function": {"name": "double", "description": "Doubles.", "parameters": {
    "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}}
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task["prompt"]}]
while True:
    given = dict(model=task["model"], messages=messages, tools=[tool])
    if task["stream"]:
        with client.chat.completions.stream(**given) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**given).choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        n = json.loads(call.function.arguments)["n"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(2 * n)})
print(json.dumps({"said": message.content, "turns": sum(not isinstance(m, dict) for m in messages)}))
"""


class Subprocess:
    """Runs `PROGRAM`, a tool loop with OpenAI's client, as a process of its own. The reward is 1 for the right word."""

    async def run(self, row: Mapping[str, Any], seed: int, endpoint: Endpoint) -> AgentResult:
        task = {"prompt": row["prompt"], "model": endpoint.model, "stream": row.get("stream", False)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, json.dumps(task),
            env={**os.environ, **endpoint.variables}, stdout=subprocess.PIPE,
        )  # fmt: skip
        output, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"exit status {process.returncode}")
        result = json.loads(output)
        return AgentResult(float(result["said"] == row["answer"]), metrics={"replies": result["turns"]})


def run_beside(function: Callable[[], Any]) -> Callable[[], Any]:
    """Begin a function in a thread; return a function that waits for its result."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append((function(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Any:
        thread.join()
        result, error = results[0]
        if error is not None:
            raise error
        return result

    return wait


def runs_of(sample: Any) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """Yield for each run of trained tokens of a sample what was before it, its tokens, and its log-probs."""
    mask, tokens = [*(sample.mask > 0).tolist(), False], sample.token_ids.tolist()
    start = None
    for i, is_trained in enumerate(mask):
        if is_trained and start is None:
            start = i
        elif not is_trained and start is not None:
            yield tokens[:start], tokens[start:i], sample.logprobs[start:i].tolist()
            start = None


class Framework:
    """An agent of Pydantic AI with a tool, as its users write one. Without a right answer, the reward is a hash.

    With `stops`, a path, the agent of a row with `stops` waits the first time, between its two questions.
    """

    def __init__(self, stops: str | None = None):
        self._stops = stops

    async def run(self, row: Mapping[str, Any], seed: int, endpoint: Endpoint) -> AgentResult:
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.api_key)
        agent = Agent(OpenAIChatModel(endpoint.model, provider=provider), system_prompt="Be brief.")

        @agent.tool_plain
        def double(n: int) -> int:
            """Return twice a number."""
            return 2 * n

        first = await agent.run(row["prompt"])
        if self._stops and row.get("stops") and first_time(self._stops):
            await asyncio.sleep(60)
        second = await agent.run("And again?", message_history=first.all_messages())
        score = float(second.output == row["answer"]) if "answer" in row else derive_seed(second.output) % 7 / 7
        return AgentResult(score, metrics={"words": len(first.output.split())})


class Debate:
    """Two players answer the same prompt. Each earns the length of its reply. With `row["unnamed"]` the agent also asks
    without the name of a player."""

    players = ("pro", "con")

    def run(self, row: Mapping[str, Any], seed: int, endpoint: Endpoint) -> AgentResult:
        pro, con = (dataclasses.replace(endpoint, model=f"{endpoint.model}:{name}") for name in self.players)
        said = {name: ask(one, row["prompt"]) for name, one in (("pro", pro), ("con", con))}
        if row.get("unnamed"):
            ask(endpoint, row["prompt"])
        return AgentResult(0.5, player_rewards={name: float(len(text)) for name, text in said.items()})
