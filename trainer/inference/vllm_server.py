"""vLLM's own API server, with routes for jobs beside its OpenAI API.

It listens on a Unix socket, for the front alone (see `trainer.inference.gateway`). Jobs' requests join the engine
together: what a batch of one sequence computes can differ in its last bits, so all of them begin in one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from transformers import AutoTokenizer

from trainer.config import RolloutConfig
from trainer.config.engines import ENGINES
from trainer.errors import one_line
from trainer.generation import server_protocol as protocol
from trainer.generation.engine import Request
from trainer.generation.server_protocol import with_signs_of_life
from trainer.models.tokenizer import load_tokenizer, stop_token_ids
from trainer.process import model_server

_OWN_OPTIONS = ("skip_tokenizer_init", "use_tqdm_on_load")
"""Options of `vllm.LLM` that a server for people does without."""
_TEMPLATE = "chat_template.jinja"


def serve(_: Any, socket_path: str, settings: dict[str, Any]) -> None:
    """Serve on the Unix socket until the process is ended."""
    for name, value in ENGINES["vllm"].environment_on(settings["device"], settings["deterministic"]).items():
        if name != "VLLM_ENABLE_V1_MULTIPROCESSING":  # the API server wants its engine in another process
            os.environ.setdefault(name, value)
    JobRoutes.idle_check_s = settings["idle_check_s"]
    write_generation_config(os.path.dirname(socket_path), settings)
    write_chat_template(os.path.dirname(socket_path), settings)
    sys.argv = ["trainer inference", *arguments(socket_path, settings)]
    from vllm.entrypoints.launchers.api_server.entry import main

    main()


def write_generation_config(directory: str, settings: dict[str, Any]) -> None:
    """Write the model's generation config with all tokens that end a reply. vLLM knows fewer (`stop_token_ids`)."""
    path = settings["model_path"]
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=settings["trust_remote_code"])
    config = {}
    with contextlib.suppress(FileNotFoundError), open(os.path.join(path, "generation_config.json")) as own:
        config = json.load(own)
    with open(os.path.join(directory, "generation_config.json"), "w") as file:
        json.dump(config | {"eos_token_id": list(stop_token_ids(path, tokenizer))}, file)


def write_chat_template(directory: str, settings: dict[str, Any]) -> None:
    """Write the chat template of the config, if it names one, for vLLM to use in place of that of the model."""
    template, variables = settings["chat_template"], settings["chat_template_kwargs"]
    if template is not None or variables:
        tokenizer = load_tokenizer(settings["model_path"], template, settings["trust_remote_code"], variables)
        with open(os.path.join(directory, _TEMPLATE), "w") as file:
            file.write(tokenizer.chat_template)


def arguments(socket_path: str, settings: dict[str, Any]) -> list[str]:
    """Return the arguments of vLLM's API server."""
    from trainer.generation.vllm_engine import device_options, dtype_on

    template = os.path.join(os.path.dirname(socket_path), _TEMPLATE)
    rollout, device = RolloutConfig(**settings["rollout"]), settings["device"]
    options = {
        "model": settings["model_path"],
        "served_model_name": settings["name"],
        "dtype": dtype_on(device, rollout.dtype),
        "seed": settings["seed"],
        "trust_remote_code": settings["trust_remote_code"],
        "generation_config": os.path.dirname(socket_path),
        "chat_template": template if os.path.exists(template) else None,
        **device_options(rollout, device, settings["model_path"], settings["trust_remote_code"]),
        **({"distributed_executor_backend": "uni"} if device == "cpu" else {}),
        "max_logprobs": model_server.MOST_TOP_K,
        **rollout.engine_args,
        "middleware": f"{__name__}.JobRoutes",
        "uds": socket_path,
        "uvicorn_log_level": "warning",
    }
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if name in _OWN_OPTIONS:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return words


class JobRoutes:
    """ASGI middleware that answers the paths below `/trainer/` itself."""

    idle_check_s = 0.0
    """Between two looks at the processes of an engine without requests. After each message, a process of vLLM waits
    for the next one for a second with all of a core, which trainers need."""

    def __init__(self, app: Any):
        self._app = app
        self._running: set[asyncio.Future[Any]] = set()
        self._companion: asyncio.Future[Any] | None = None
        """Of a request that nobody waits for (see `_accompany`)."""
        self._longest = 0  # of the requests that run, in tokens
        self._admission = asyncio.Lock()
        self._checked_at = -math.inf

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/trainer/"):
            await self._app(scope, receive, send)
            return
        from starlette.requests import Request as HttpRequest
        from starlette.responses import JSONResponse, Response, StreamingResponse

        request, engine = HttpRequest(scope, receive), scope["app"].state.engine_client
        response: Response
        match scope["path"]:
            case "/trainer/alive":
                response = JSONResponse(await self._check(engine, now=scope["query_string"] == b"now"))
            case protocol.GENERATE:
                await self._generate(engine, protocol.decode_requests(await request.body()), scope, receive, send)
                return
            case model_server.SCORE:
                message = await request.json()
                response = StreamingResponse(with_signs_of_life(self._scores(engine, message)))
            case protocol.WEIGHTS:
                response = StreamingResponse(with_signs_of_life(self._loaded(engine, await request.json())))
            case _:
                response = JSONResponse({}, 404)
        await response(scope, receive, send)

    async def _check(self, engine: Any, now: bool) -> dict[str, Any]:
        """Return how the engine does, if its processes are well. One that hangs does not answer.

        The answer says whether anybody's requests run, has a number that changes with each of their tokens, and the
        length of the longest prompt without one.

        Args:
            now: look at the processes of an idle engine, too, however short ago the last look was.
        """
        await engine.check_health()  # knows of a process that has died
        states, at = list(engine.output_processor.request_states.values()), time.monotonic()
        tokens = sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None)
        prompt = max((state.prompt_len for state in states if state.is_prefilling), default=0)
        if now or states or at > self._checked_at + self.idle_check_s:
            await engine.collective_rpc("check_health")  # they answer between two steps
            self._checked_at = at
        return {"busy": bool(states), "progress": [len(states), tokens], "prompt": prompt}

    async def _scores(self, engine: Any, message: dict[str, Any]) -> AsyncIterator[bytes]:
        """Answer with what the frozen model computes for sequences (see `process.model_server`)."""
        from vllm.exceptions import VLLMClientError

        tasks = [
            asyncio.ensure_future(_score_of(engine, ids, int(message.get("top_k", 0)))) for ids in message["token_ids"]
        ]
        try:
            answer: dict[str, Any] = {"answers": await asyncio.gather(*tasks)}
        except (VLLMClientError, ValueError, TypeError) as error:  # a sequence that the model cannot read
            answer = protocol.error_body(protocol.REFUSED, f"cannot read a sequence ({one_line(str(error))})")
        finally:
            for task in tasks:
                task.cancel()
        yield json.dumps(answer).encode() + b"\n"

    async def _generate(self, engine: Any, requests: dict[int, Request], *connection: Any) -> None:
        """Answer with completions. The requests are in line before the answer begins, so before later new weights."""
        from starlette.responses import StreamingResponse

        from trainer.generation.vllm_engine import completion_of

        tasks: dict[asyncio.Future[Any], int] = {}
        adding = asyncio.ensure_future(self._add(engine, requests, tasks))

        async def lines() -> AsyncIterator[bytes]:
            await asyncio.shield(adding)
            left = set(tasks)
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                if any(task.cancelled() for task in done):
                    return
                outputs = {tasks[task]: completion_of(task.result()) for task in done}
                yield protocol.encode_completions(outputs)

        try:
            await StreamingResponse(with_signs_of_life(lines()))(*connection)
        finally:
            await asyncio.wait([adding])  # a scheduler that stays paused serves nobody
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _add(self, engine: Any, requests: dict[int, Request], tasks: dict[asyncio.Future[Any], int]) -> None:
        """Add all requests while the scheduler is paused, and a task for each, with its number, to `tasks`."""
        from trainer.generation.vllm_engine import sampling_params

        async with self._admission:
            try:
                await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
                if not self._running:  # as an engine of the job does, which generates the same bits
                    await _reset_prefix_cache(engine)
                    self._longest = 0
                for number, request in requests.items():
                    self._longest = max(self._longest, request.sampling.max_tokens)
                    prompt = {"prompt_token_ids": request.prompt_token_ids.tolist()}
                    outputs = await engine.add_request(uuid.uuid4().hex, prompt, sampling_params(request))
                    task = asyncio.ensure_future(self._wait_for(engine, outputs))
                    tasks[task] = number
                    self._running.add(task)
                    task.add_done_callback(self._forget)
                await self._accompany(engine)
            finally:
                await engine.engine_core.resume_scheduler_async()

    async def _accompany(self, engine: Any) -> None:
        """Generate something beside the requests of jobs on CPU, where one that is alone has other last bits.

        It begins last and is as long as the longest of them, so it outlasts all. If the cache is full, it leaves that
        before they do.
        """
        from vllm import SamplingParams

        config = engine.vllm_config
        if config.device_config.device_type != "cpu" or config.scheduler_config.max_num_seqs < 2:
            return
        self._end_companion()
        params = SamplingParams(temperature=0.0, max_tokens=self._longest, ignore_eos=True, detokenize=False)
        outputs = await engine.add_request(uuid.uuid4().hex, {"prompt_token_ids": [0]}, params)
        self._companion = asyncio.ensure_future(self._wait_for(engine, outputs))

    def _end_companion(self) -> None:
        if self._companion is not None:
            self._companion.cancel()
            self._companion = None

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(task)
        if not self._running:
            self._end_companion()

    async def _wait_for(self, engine: Any, outputs: Any) -> Any:
        """Return the last output of a request; abort the request if nobody waits for it any more."""
        try:
            while not (output := await outputs.get()).finished:
                pass
            return output
        except asyncio.CancelledError:
            await engine.abort(outputs.request_id, internal=True)
            raise
        finally:
            outputs.close()

    async def _loaded(self, engine: Any, message: dict[str, Any]) -> AsyncIterator[bytes]:
        async with self._admission:  # after the requests that are in line
            aborted = list(self._running) if message["running"] == "abort" else []
            for task in aborted:
                task.cancel()
        if aborted:
            await asyncio.wait(aborted)

        async def load() -> dict[str, str]:
            async with self._admission:
                for problem in await engine.collective_rpc("refused_weights", args=(message["path"],)):
                    if problem is not None:
                        return protocol.error_body(protocol.REFUSED, problem)
                try:
                    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
                    digests = await engine.collective_rpc("load_shared", args=(message["path"],))
                    # Keys and values of requests that go on, also of people, are of the old weights.
                    await _reset_prefix_cache(engine)
                    # vLLM tells which tokens each version has generated.
                    await engine.update_weight_version(str(message["version"]))
                finally:
                    await engine.engine_core.resume_scheduler_async()
                return {"digest": ", ".join(sorted({*digests}))}

        # It runs to its end if nobody waits for it any more: a scheduler that stays paused serves nobody.
        yield json.dumps(await asyncio.shield(asyncio.ensure_future(load()))).encode() + b"\n"


async def _score_of(engine: Any, ids: list[int], top_k: int) -> Any:
    """Return the score after the last token; or log-probs of the tokens but the first, or of the likeliest ones."""
    from vllm import PoolingParams, SamplingParams

    prompt, name = {"prompt_token_ids": ids}, uuid.uuid4().hex
    if engine.model_config.runner_type == "pooling":
        # Without the activation of vLLM, which makes a probability of a score.
        params = PoolingParams(task="classify", use_activation=False)
        outputs = [one async for one in engine.encode(prompt, params, name)]
        return outputs[-1].outputs.data.float().item()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=top_k, detokenize=False)
    outputs = [one async for one in engine.generate(prompt, params, name)]
    known = list(zip(ids, outputs[-1].prompt_logprobs, strict=True))[1:]
    if not top_k:
        return {"logprobs": [found[token].logprob for token, found in known]}
    ranked = [sorted((one.rank, token, one.logprob) for token, one in found.items())[:top_k] for _, found in known]
    columns = {"ids": 1, "logprobs": 2}
    return {name: [[one[column] for one in some] for some in ranked] for name, column in columns.items()}


async def _reset_prefix_cache(engine: Any) -> None:
    """Forget all keys and values, while the scheduler is paused. Requests that run compute theirs again."""
    if not await engine.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("the prefix cache is in use")
