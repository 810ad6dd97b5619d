"""The protocol of an inference engine: what goes in, what comes out, and what it must do.

Nothing here imports torch: the process that speaks for an inference server starts in a moment.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from trainer.config.engines import EngineSpec
from trainer.import_utils import import_function
from trainer.process import time_limits
from trainer.process.model_server import TOKEN
from trainer.seeding import derive_seed

if TYPE_CHECKING:
    from trainer.generation.weight_sync import WeightSource


RunningRequests = Literal["abort", "keep"]
"""What happens to the requests that an engine generates when it gets weights. `abort`: they are dropped, because no one
waits for them. `keep`: they continue with the new weights."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a completion are drawn."""

    temperature: float
    """0 means greedy."""
    top_p: float
    top_k: int
    """-1 means all tokens."""
    max_tokens: int
    """Longest completion; longer ones are cut."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a completion. They belong to it."""

    def within(self, most_tokens: int | None, prompt: int = 0) -> Sampling:
        """Return the same for a prompt of this length and its completion that have at most `most_tokens` together."""
        if most_tokens is None or prompt + self.max_tokens <= most_tokens:
            return self
        return replace(self, max_tokens=most_tokens - prompt)


@dataclass(frozen=True, eq=False)
class Request:
    """One completion to generate. Its tokens depend on itself and the weights, not on other requests."""

    prompt_token_ids: np.ndarray
    """`(T,)` int32. Any sequence of integers can be given."""
    seed: int
    sampling: Sampling

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", np.asarray(self.prompt_token_ids, np.int32))


@dataclass(frozen=True, eq=False)
class Completion:
    """The answer to a request. Any sequences of numbers can be given for the arrays."""

    token_ids: np.ndarray
    """`(T,)` int32, with the stop token, if there was one."""
    logprobs: np.ndarray
    """`(T,)` float32, the log-prob of each token under the distribution from which it was drawn: log_softmax(logits /
    temperature) over the tokens that top-k and top-p keep. Greedy: log_softmax(logits)."""
    finish_reason: str
    """`stop` or `length`; or `CUT`."""
    weight_versions: tuple[int, int]
    """The oldest and the newest version of the weights that generated its tokens. One number stands for both."""
    version_spans: tuple[tuple[int, int], ...] = ()
    """Who generated which tokens, if several versions did: pairs of a version and a number of tokens, in the order of
    the tokens. Empty: one version did, or the engine does not know."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", np.asarray(self.token_ids, np.int32))
        object.__setattr__(self, "logprobs", np.asarray(self.logprobs, np.float32))
        if isinstance(self.weight_versions, int):
            object.__setattr__(self, "weight_versions", (self.weight_versions, self.weight_versions))


CUT = "cut"
"""`finish_reason` of a completion that its engine has not finished: it leaves the job, and hands back what it has."""


@dataclass
class Pending:
    """A request that is not complete."""

    request: Request
    """For what is missing."""
    completion: asyncio.Future[Completion]
    oldest: int = -1
    """Version of the weights that its engine had when it got the request."""
    _begun: Completion | None = None
    """What engines that have left the job have generated."""

    def add(self, part: Completion) -> bool:
        """Take what an engine has generated. Return whether that completes it. What is drawn later is independent."""
        request, count = self.request, len(part.token_ids)
        whole = part
        if (begun := self._begun) is not None:
            spans: list[tuple[int, int]] = []
            for one in (begun, part):
                for version, size in one.version_spans or ((one.weight_versions[1], len(one.token_ids)),):
                    same = spans.pop()[1] if spans and spans[-1][0] == version else 0
                    spans.append((version, same + size))
            whole = Completion(
                np.concatenate([begun.token_ids, part.token_ids]),
                np.concatenate([begun.logprobs, part.logprobs]),
                part.finish_reason,
                (begun.weight_versions[0], part.weight_versions[1]),
                tuple(spans) if len(spans) > 1 else (),
            )
        if part.finish_reason != CUT:
            self.completion.set_result(whole)
            return True
        sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - count)
        tokens = np.concatenate([request.prompt_token_ids, part.token_ids])
        self.request, self._begun = Request(tokens, derive_seed(request.seed, count), sampling), whole
        return False


@dataclass(frozen=True)
class SharedMemory:
    """Weights as safetensors files."""

    path: str
    """Directory on the engines' node."""

    @contextmanager
    def opened(self) -> Iterator[str]:
        """Yield the directory."""
        yield self.path


@dataclass(frozen=True)
class Adapter:
    """peft's two files. The engine adds the adapter to the weights that it was started with."""

    config: str
    weights: bytes


class Engine(Protocol):
    """One copy of the policy that generates. It is awake when it is built."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return completions in the order of the requests. The engine must be awake."""
        ...

    def sync_weights(self, source: WeightSource, version: int) -> str | None:
        """Load the weights of `source`, awake or asleep. Completions carry `version` from now on.

        Returns:
            the digest of what was loaded (`trainer.models.weight_deltas.WeightsDigest`; of an adapter, `digest_of` its
            file): an engine with another one than the ranks and the other engines is not used. None: it does not tell.
        """
        ...

    def set_version(self, version: int) -> None:
        """Set the version of the weights that are loaded."""
        ...

    def sleep(self) -> int:
        """Release the GPU memory until `wake`, if the engine shares its GPU.

        Returns:
            the bytes of each GPU that the engine will take to generate. 0: it cannot tell.
        """
        ...

    def wake(self) -> None:
        """Get ready to generate, with the weights from before `sleep`, or those synced since."""
        ...

    def shutdown(self) -> None:
        """End the engine."""
        ...


class StreamingEngine(Engine, Protocol):
    """An engine of the unit `request` (see `EngineSpec.unit`): it takes more requests while it generates.

    Requests may be under way between two calls of `step`, and when the weights change.
    """

    def step(self, requests: Mapping[int, Request]) -> dict[int, Completion]:
        """Add requests, and generate until some are complete; return these. The pool calls this, not `generate`.

        Args:
            requests: by number; a completion has the number of its request. No two requests of a run have one number.
        """
        ...

    def sync_weights(self, source: WeightSource, version: int, running: RunningRequests = "abort") -> str | None:
        """Load the weights of `source`, awake or asleep; return their digest, as `Engine.sync_weights` does.

        Args:
            running: see `RunningRequests`. A completion that was kept has an older and a newer version.
        """
        ...

    def hand_back(self) -> dict[int, Completion]:
        """End all requests, and return the tokens of those that have some, as completions that are `CUT`.

        Optional. Called at the end of an engine that has joined a job; no `step` runs.
        """
        ...

    def interrupt(self) -> None:
        """Let a running `step` return within about a token's time, with what is complete. Called on another thread.

        Called when requests or weights wait. If no `step` runs, the next `step` may return immediately.
        """
        ...


def generate_in_steps(engine: StreamingEngine, requests: Sequence[Request]) -> list[Completion]:
    """Return completions in the order of the requests, as `Engine.generate` does. Nothing else may be under way."""
    completions = engine.step(dict(enumerate(requests)))
    while len(completions) < len(requests):
        completions |= engine.step({})
    return [completions[number] for number in range(len(requests))]


def by_length(requests: Sequence[Request], engines: int, most: int) -> list[list[int]]:
    """Return batches of at most `most` requests with one sampling and prompts of similar length, the longest first.

    There are as many batches for each of `engines`, and of the same size as far as possible. Which requests share a
    batch does not depend on how fast the engines are, because it can change the last bits of log-probs.
    """
    alike: dict[Sampling, list[int]] = {}
    for i, request in enumerate(requests):
        alike.setdefault(request.sampling, []).append(i)
    batches: list[list[int]] = []
    for indices in alike.values():
        order = sorted(indices, key=lambda i: len(requests[i].prompt_token_ids))
        rounds = -(-len(order) // (engines * most))
        size = -(-len(order) // (engines * rounds))
        batches += [order[start : start + size] for start in range(0, len(order), size)][::-1]
    return batches


def by_prompt(requests: Mapping[int, Request], most: int) -> list[list[int]]:
    """Return the numbers of requests, those of one prompt together: an engine computes the prompt once.

    Args:
        most: longest list; a prompt with more completions is cut.
    """
    prompts: dict[bytes, list[int]] = {}
    for number, request in requests.items():
        prompts.setdefault(request.prompt_token_ids.tobytes(), []).append(number)
    return [numbers[start : start + most] for numbers in prompts.values() for start in range(0, len(numbers), most)]


def join_interval_s(running: int) -> float:
    """Return how long an engine generates before it reports completions or takes requests that join.

    It does nothing meanwhile. The more requests it runs, the less it loses if a few of them wait.

    Args:
        running: requests that it generates.
    """
    return time_limits.JOIN_S * max(0.25, running / 16)


BUILT_IN = {
    "vllm": "trainer.generation.vllm_engine:VLLMEngine",
    "transformers": "trainer.generation.transformers_engine:TransformersEngine",
    "server": "trainer.generation.server_engine:ServerEngine",
}
"""The classes of the built-in engines, imported in the process of an engine."""


def build_engine(
    spec: EngineSpec, token: str | None, deterministic: bool, model_path: str, number: int, **kwargs: Any
) -> Engine:
    """Return an engine. It runs in the engine's process, so that the driver need not import engines.

    Args:
        token: of inference servers. It comes here, because Ray shows the environment of an actor to everybody.
    """
    if token is not None:
        os.environ.setdefault(TOKEN, token)
    if deterministic:
        from trainer.parallel.rng import use_deterministic_kernels

        use_deterministic_kernels(warn_only=True)  # `top_p` adds up probabilities, which has no such kernel
    numbered = {"index": number} if spec.served else {}
    return import_function(BUILT_IN.get(spec.path, spec.path), "rollout.engine")(model_path, **kwargs, **numbered)
