"""A whole inference server: the front, and the engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import logging
import socket
import tempfile

from trainer.config import Config
from trainer.config.engines import ENGINES
from trainer.errors import UserError
from trainer.files.atomic_io import digest_weights
from trainer.files.shared_memory import PrivateDirectory
from trainer.generation.server_protocol import describe_model
from trainer.inference.backend import Backend
from trainer.inference.gateway import Gateway, is_loopback
from trainer.process import time_limits
from trainer.process.model_server import LOGPROBS, SCORES, TOKEN, read_token
from trainer.process.network import listen, start_server
from trainer.process.signals import SIGNALS, Stopped

LOG = logging.getLogger(__name__)


def run(cfg: Config) -> None:
    """Serve until a signal comes.

    Raises:
        UserError: the address cannot be used, the token is missing, or vLLM is.
        WorkerError: the engine does not start.
    """
    from trainer.models.files import resolve_model_path

    token = check(cfg)
    with contextlib.ExitStack() as stack:
        named = f"inference.host={cfg.inference.host} inference.port={cfg.inference.port}"
        listener = stack.enter_context(listen(cfg.inference.host, cfg.inference.port, named))
        path, name = cfg.model.path, "tiny"
        if path is not None:
            path, name = resolve_model_path(path), path
        else:
            from trainer.models.tiny import TinyShape, build_tiny

            path = stack.enter_context(PrivateDirectory(tempfile.gettempdir(), "trainer-model-", 8)).path
            build_tiny(TinyShape.of(cfg.model.tiny), path)  # with random weights
        try:
            asyncio.run(_serve(cfg, token, listener, path, name))
        except Stopped:
            LOG.info("stopped")


def check(cfg: Config) -> str | None:
    """Check what the server needs, and return its token; None: it has none.

    Raises:
        UserError: something is missing.
    """
    inference = cfg.inference
    token = read_token()
    if token is None and not is_loopback(inference.host):
        raise UserError(
            f"inference.host={inference.host}: others can reach this address; set the environment variable {TOKEN} to "
            "a secret, here and where the jobs run, or choose 127.0.0.1"
        )
    if importlib.util.find_spec("vllm") is None:
        raise UserError("trainer inference: vLLM is not installed; install trainer[cpu] or trainer[gpu]")
    return token


async def _serve(cfg: Config, token: str | None, listener: socket.socket, path: str, name: str) -> None:
    from trainer.models.checks import is_classifier
    from trainer.models.files import load_config
    from trainer.models.tokenizer import token_table
    from trainer.parallel.mesh import pick_device

    rollout, inference = cfg.rollout, cfg.inference
    spec = ENGINES["vllm"]
    device = pick_device(cfg.trainer.device, spec)
    repeats = device == "cpu" or cfg.trainer.deterministic
    settings = {
        "model_path": path,
        "name": name,
        "rollout": dataclasses.asdict(rollout),
        "device": device,
        "deterministic": cfg.trainer.deterministic,
        "seed": cfg.trainer.seed,
        "trust_remote_code": cfg.model.trust_remote_code,
        "chat_template": cfg.model.chat_template,
        "chat_template_kwargs": dict(cfg.model.chat_template_kwargs),
        "idle_check_s": time_limits.SERVER_HANG_S / 4,
    }
    description = {
        "model": name,
        "max_tokens": rollout.max_prompt_tokens + rollout.max_response_tokens,
        "repeats": repeats,
        "computes": SCORES if is_classifier(load_config(cfg.model, path).architectures) else LOGPROBS,
    }
    architecture = describe_model(cfg.model, path, description["max_tokens"])

    def frozen() -> tuple[str, dict[str, int]]:
        return digest_weights(path), token_table(path, cfg.model.trust_remote_code) or {}

    gateway = Gateway(token, time_limits.SERVER_LEASE_S, description, architecture, frozen)
    gateway.backend = Backend(settings, gateway.begin_engine)
    runner = await start_server(gateway.application(), listener)
    shown = f"[{inference.host}]" if ":" in inference.host else inference.host
    address = f"http://{shown}:{listener.getsockname()[1]}"
    LOG.info("listening on %s, loading %s", address, name)
    engine = asyncio.ensure_future(gateway.backend.run(lambda: LOG.info("serving %s on %s", name, address)))
    try:
        while not engine.done():
            await asyncio.wait([engine], timeout=time_limits.POLL_INTERVAL_S)
            SIGNALS.check()
        engine.result()
    finally:
        engine.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await engine
        await runner.cleanup()
