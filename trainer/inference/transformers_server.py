"""The transformers engine behind a small HTTP application, for machines without vLLM.

It listens on a Unix socket, for the front alone (see `trainer.inference.gateway`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from aiohttp import web
from transformers import AutoTokenizer

from trainer.config import RolloutConfig
from trainer.config.engines import DETERMINISTIC_CUDA
from trainer.errors import one_line
from trainer.generation import server_protocol as protocol
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.memory_watch import snapshots, watch_methods
from trainer.generation.request_scheduler import by_length
from trainer.generation.stop_strings import cut_at
from trainer.generation.transformers_engine import TransformersEngine
from trainer.generation.weight_check import refused_weights, weights_of
from trainer.generation.weight_sync import SharedMemory
from trainer.inference.streams import with_signs_of_life
from trainer.models.tokenizer import stop_token_ids
from trainer.parallel.determinism import use_deterministic_kernels

_DEFAULT_TOKENS = 256
"""Longest answer to a person who does not say how long it may be."""
_MOST_STOPS = 4
_UNSUPPORTED = (
    *("allowed_token_ids", "audio", "bad_words", "best_of", "echo", "frequency_penalty", "functions", "ignore_eos"),
    *("include_stop_str_in_output", "logit_bias", "logprobs", "min_p", "min_tokens", "modalities", "presence_penalty"),
    *("prompt_logprobs", "repetition_penalty", "response_format", "stop_token_ids", "structured_outputs", "suffix"),
    *("tools", "top_logprobs"),
)
"""Fields that would change the answer, and that this server does not support."""
_NEUTRAL = {"best_of": 1, "modalities": ["text"], "repetition_penalty": 1, "response_format": {"type": "text"}}


class _AbortedError(Exception):
    """The batch under way is not wanted any more."""


class TransformersServer:
    """One engine; its calls run one after another on a thread.

    Args:
        settings: see `trainer.inference.backend.Backend`.
    """

    def __init__(self, settings: dict[str, Any]):
        self._rollout = RolloutConfig(**settings["rollout"])
        self._name, path = settings["name"], settings["model_path"]
        trusted = settings["trust_remote_code"]
        with snapshots(settings["snapshot"]):
            self._engine = TransformersEngine(
                path,
                dtype=self._rollout.dtype,
                seed=settings["seed"],
                rollout=self._rollout,
                device=settings["device"],
                trust_remote_code=trusted,
            )
        watch_methods(self._engine, ("generate", "sync_weights"), settings["snapshot"])
        self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)
        self._stops = stop_token_ids(path, self._tokenizer)
        self._model = self._engine._model
        self._model.register_forward_hook(self._after_forward)
        self._weights = weights_of(self._model, self._model.dtype)
        self._thread = ThreadPoolExecutor(1)
        self._forwards, self._calls = 0, 0
        self._aborted = False
        self._aborts = 0

    def application(self) -> web.Application:
        """Return the HTTP application."""
        app = web.Application(client_max_size=protocol.LARGEST_BODY)
        app.router.add_get("/trainer/alive", self._alive)
        app.router.add_post(protocol.GENERATE, self._generate)
        app.router.add_post(protocol.WEIGHTS, self._load)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    def _after_forward(self, *_: Any) -> None:
        self._forwards += 1
        if self._aborted:
            raise _AbortedError

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        self._calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        finally:
            self._calls -= 1

    async def _alive(self, _: web.Request) -> web.Response:
        return web.json_response({"busy": self._calls > 0, "progress": self._forwards})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        requests, aborts = protocol.decode_requests(await request.read()), self._aborts
        return await _send(request, with_signs_of_life(self._completions(requests, aborts)))

    async def _completions(self, requests: dict[int, Request], aborts: int) -> AsyncIterator[bytes]:
        numbers = list(requests)
        with contextlib.suppress(_AbortedError):
            for indices in by_length(list(requests.values()), 1, self._rollout.max_num_seqs):
                if self._aborts > aborts:
                    return
                chosen = [numbers[index] for index in indices]
                completions = await self._call(self._engine.generate, [requests[number] for number in chosen])
                yield protocol.encode_completions(dict(zip(chosen, completions, strict=True)))

    async def _load(self, request: web.Request) -> web.StreamResponse:
        message = await request.json()
        return await _send(request, with_signs_of_life(self._loaded(message)))

    async def _loaded(self, message: dict[str, Any]) -> AsyncIterator[bytes]:
        if message["running"] == "abort":
            self._aborted = True  # the call under way ends at its next token
            self._aborts += 1
        # A call that is kept is completed first: the engine cannot change its weights between two tokens.
        # It runs to its end if nobody waits for it any more, or calls would be aborted for ever.
        yield json.dumps(await asyncio.shield(self._call(self._replace_weights, message))).encode() + b"\n"

    def _replace_weights(self, message: dict[str, Any]) -> dict[str, str]:
        self._aborted = False
        if (problem := refused_weights(message["path"], self._weights)) is not None:
            return protocol.error_body(protocol.REFUSED, problem)
        self._engine.sync_weights(SharedMemory(message["path"]), message["version"])
        return {}

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._name, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        with _refusing():
            body = await request.json()
            prompt = body["prompt"]
            if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
                (prompt,) = prompt
            ids = self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            start = self._tokenizer.bos_token
            if start and isinstance(prompt, str) and prompt.startswith(start):  # a rendered chat
                ids = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
            wanted, stops = self._wanted(ids, body), _stops(body)
        text, reason, usage = await self._answer(wanted, stops)
        choice = {"index": 0, "text": text, "finish_reason": reason}
        return web.json_response(self._envelope("text_completion", choice, usage))

    async def _chat(self, request: web.Request) -> web.Response:
        with _refusing():
            body = await request.json()
            ids = self._tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
            wanted, stops = self._wanted(ids, body), _stops(body)
        text, reason, usage = await self._answer(wanted, stops)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
        return web.json_response(self._envelope("chat.completion", choice, usage))

    def _wanted(self, ids: Any, body: dict[str, Any]) -> Request:
        """Return what a person asks the engine for.

        Raises:
            Exception: it cannot be generated.
        """
        body = {name: value for name, value in body.items() if value is not None}  # `null` leaves a field out
        if body.get("stream"):
            raise ValueError("the transformers engine streams nothing; leave out `stream`")
        wanted = {name for name in _UNSUPPORTED if body.get(name) and body[name] != _NEUTRAL.get(name)}
        if body.get("logprobs") is not False and "logprobs" in body:  # 0 asks for those of the sampled tokens
            wanted.add("logprobs")
        if refused := sorted(wanted):
            raise ValueError(f"the transformers engine does not support `{refused[0]}`; leave it out")
        if body.get("n", 1) != 1:
            raise ValueError("the transformers engine gives one answer to a request; leave out `n`")
        vocabulary = self._model.get_input_embeddings().num_embeddings
        is_list = isinstance(ids, list) and ids
        if not is_list or not all(type(token) is int and 0 <= token < vocabulary for token in ids):
            raise ValueError(f"a prompt is one text, or a list of tokens from 0 to {vocabulary - 1}")
        most = self._rollout.max_prompt_tokens + self._rollout.max_response_tokens - len(ids)
        if most < 1:
            raise ValueError("the prompt is too long for this server")
        tokens = min(most, int(body.get("max_completion_tokens", body.get("max_tokens", _DEFAULT_TOKENS))))
        if tokens < 1:
            raise ValueError("`max_tokens` is at least 1")
        temperature, top_p = float(body.get("temperature", 1.0)), float(body.get("top_p", 1.0))
        if not 0 <= temperature < math.inf or not 0 < top_p <= 1:
            raise ValueError("`temperature` is at least 0, and `top_p` above 0 and at most 1")
        top_k = int(body.get("top_k", -1)) or -1  # 0: off, as in vLLM
        if top_k < -1:
            raise ValueError("`top_k` is at least 1, or -1 for no limit")
        seed = int(body.get("seed", uuid.uuid4().int % 2**31))
        if not -(2**63) <= seed < 2**63:
            raise ValueError("`seed` has at most 64 bits")
        return Request(ids, seed, Sampling(temperature, top_p, top_k, tokens, self._stops))

    async def _answer(self, wanted: Request, stops: list[str]) -> tuple[str, str, dict[str, int]]:
        decode = partial(self._tokenizer.decode, skip_special_tokens=True)  # as clients of this API expect
        completion, text = cut_at(await self._call_again(wanted), stops, decode)
        counts = {"prompt_tokens": len(wanted.prompt_token_ids), "completion_tokens": len(completion.token_ids)}
        return text, completion.finish_reason, {**counts, "total_tokens": sum(counts.values())}

    async def _call_again(self, request: Request) -> Completion:
        while True:  # a job that aborts its own batches does not end those of people
            try:
                return (await self._call(self._engine.generate, [request]))[0]
            except _AbortedError:
                continue

    def _envelope(self, kind: str, choice: dict[str, Any], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": self._name,
            "choices": [choice],
            "usage": usage,
        }


def _stops(body: dict[str, Any]) -> list[str]:
    """Return the texts that end the answer.

    Raises:
        ValueError: `stop` is something else.
    """
    given = body.get("stop") or []
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"`stop` is a text, or a list of up to {_MOST_STOPS}")
    return stops


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Refuse the request of a person if the block, which only reads it, fails."""
    try:
        yield
    except Exception as error:
        text = str(error) if type(error) is ValueError else repr(error)
        raise web.HTTPBadRequest(text=one_line(text)) from error


async def _send(request: web.Request, lines: AsyncIterator[bytes]) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    async for line in lines:
        await response.write(line)
    await response.write_eof()
    return response


def serve(_: Any, socket_path: str, settings: dict[str, Any]) -> None:
    """Serve on the Unix socket until the process is ended."""
    if settings["deterministic"]:
        os.environ.update(DETERMINISTIC_CUDA)  # cuBLAS reads it when CUDA starts
        use_deterministic_kernels(warn_only=True)  # `top_p` adds up probabilities, which has no such kernel
    app = TransformersServer(settings).application()
    web.run_app(app, path=socket_path, print=None, handle_signals=False, access_log=None, handler_cancellation=True)
