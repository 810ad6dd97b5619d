"""`rollout.*`: the engines that generate completions, and how they sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.config.engines import engines_with, find_engine
from trainer.config.fields import (
    HARMLESS,
    LONGEST_TIME,
    ResumeRule,
    SavedRun,
    Section,
    choice,
    config_error,
    number,
    open_section,
    setting,
)
from trainer.config.inference import TOKEN
from trainer.config.transports import find_transport
from trainer.errors import UserError
from trainer.files.redaction import agree
from trainer.files.uris import split_http_url

if TYPE_CHECKING:
    from trainer.config.schema import Config

LOWEST_TEMPERATURE = 0.01  # vLLM replaces anything lower by this
_MOST_IN_FLIGHT = 2048


def works_ahead(rollout: Mapping[str, Any]) -> bool:
    """Return what `RolloutConfig.works_ahead` is for a section, which may be one of an earlier version."""
    return rollout.get("ahead", 0) > 0 or rollout.get("in_flight_updates", False)


@dataclass
class RolloutConfig(Section):
    engine: str = setting("vllm", resume="rollouts")
    """Inference engine: `vllm`, `transformers`, `server` (the inference servers of `rollout.urls`), or an engine of
    your own, by the import path of its class or `EngineSpec`."""
    urls: list[str] = setting(default_factory=list, resume="rounding")
    """Addresses of inference servers, such as `http://gpu7:8000`, for `rollout.engine=server`. There is one engine for
    each of them."""
    server_timeout_s: float = number(300.0, at_least=1, at_most=LONGEST_TIME, resume="harmless")
    """Seconds for which an engine waits for its inference server, which may be starting again."""
    num_engines: int = number(1, at_least=1, resume="rounding")
    """Number of engines. Prompts are spread over them. With `rollout.urls`, it is their number."""
    tensor_parallel_size: int = number(1, at_least=1, resume="rounding")
    """GPUs per engine (vLLM)."""
    colocate: bool = setting(False, resume="harmless")
    """Engines share the GPUs of the ranks and free their memory while the ranks train. false: engines have GPUs
    of their own."""
    n: int = number(8, at_least=1, resume="rollouts")
    """Completions per prompt."""
    max_prompt_tokens: int = number(512, at_least=1, resume="rollouts")
    """Longest prompt, in tokens. Longer prompts are dropped, and counted, when the data is read."""
    max_response_tokens: int = number(512, at_least=1, resume="rollouts")
    """Longest completion, in tokens. Longer completions are cut."""
    temperature: float = number(1.0, at_least=LOWEST_TEMPERATURE, at_most=100, off=0, resume="rollouts")
    """Sampling temperature of rollouts. The trainer divides its logits by it too. 0: greedy."""
    top_p: float = number(1.0, above=0, at_most=1, resume="rollouts")
    """Nucleus sampling: keep the smallest set of tokens with this probability. 1: all tokens."""
    top_k: int = number(-1, at_least=1, off=-1, resume="rollouts")
    """Keep this many of the most likely tokens. -1: all."""
    val_n: int = number(0, at_least=0, resume="validation")
    """Validation also samples this many completions per prompt for `val/pass@<k>`. 0: greedy completions only."""
    dtype: str = choice("auto", ("auto", "bfloat16", "float32"), resume="rollouts")
    """Precision of the engine: `auto` (bfloat16 on CUDA, float32 on CPU), `bfloat16` or `float32`."""
    max_logprob_diff: str | None = setting("auto", resume="harmless")
    """Largest mean difference, in nats per token, between the log-probs of engines and ranks for tokens of the newest
    weights. Above it, the run stops before it trains on them; so it does if the difference is 100 times that of all
    steps before and more than a hundredth of the limit. `auto`: 0.001 if both compute in float32 on CPU, 0.01 on GPUs,
    0.1 with bfloat16, 0.3 with a quantised engine; none where `top_p`, `top_k` or temperature 0 change the engine's
    log-probs. null: no limit."""
    max_num_seqs: int = number(256, at_least=1, resume="rounding")
    """Largest number of sequences that an engine runs at the same time."""
    kv_cache_mb: int = number(128, at_least=1, resume="rounding")
    """KV cache of a vLLM engine on CPU, in MiB."""
    gpu_memory_utilization: float = number(0.85, above=0, at_most=1, resume="rounding")
    """Fraction of a GPU's memory that a vLLM engine uses for weights and KV cache."""
    enforce_eager: bool = setting(False, resume="rounding")
    """Run vLLM without CUDA graphs. On CPU it always runs without."""
    weight_sync: str = setting("auto", resume="rounding")
    """How weights reach the engines: `shared_memory` (engines on rank 0's node), `broadcast` (a gloo or NCCL group
    over ranks and engines), `ipc` (from rank to engine within the GPU that they share), a way of your own by the import
    path of its class or `TransportSpec`, or `auto`: the way of an engine that has one of its own; else ipc on shared
    GPUs, broadcast across nodes and to engines with GPUs of their own, else shared memory."""
    weight_sync_bucket_mb: int = number(256, at_least=1, resume="rounding")
    """Size of the buckets, in MiB, in which weights are sent by broadcast and ipc. Two are in memory at a time."""
    lora_sync: str = choice("auto", ("auto", "merged", "adapter"), resume="rounding")
    """What engines receive from a policy with adapters: the `adapter`, `merged` weights, or `auto`: the adapter if the
    engine can serve it, else merged weights."""
    ahead: int = number(0, at_least=0, at_most=8, resume="update")
    """While a step trains, engines generate the episodes of this many steps after it. Each step then trains on episodes
    of the weights of so many steps before. 0: each step trains on episodes of its own weights."""
    in_flight_updates: bool = setting(False, resume="rollouts")
    """Engines generate all the time, and take new weights between two tokens. So a completion may come of several
    versions of the weights, and chance decides of which: no step can be repeated bit for bit. Across kills, no prompt
    is lost or trained twice. Only for engines that keep requests while they take weights (vLLM)."""
    max_staleness: int = number(1, at_least=1, at_most=64, resume="update")
    """With `in_flight_updates`: at most this many steps more than the next one are under way, and a step trains on
    episodes that began at most this many versions before. `window` adds to that. At most 2048 prompts can be under way:
    (max_staleness + 1) * train_batch_size."""
    window: int = number(1, at_least=1, resume="update")
    """With `in_flight_updates`: a step trains on the oldest prompts that are finished, among so many from the oldest
    one that is left. 1: in the order in which they were drawn. More: a few prompts may pass one that takes long, and a
    step may train on episodes that are (window - 1) / train_batch_size versions older."""
    journal: bool = setting(True, resume="harmless")
    """Write finished completions with their rewards to `{run_dir}/.journal` before a step trains on them. After a kill,
    the steps behind the last checkpoint train again on these, and only what is missing is generated."""
    engine_args: dict[str, Any] = open_section(resume="rollouts")
    """Further arguments for `vllm.LLM`, or for an engine of your own."""

    def check_values(self, config: Config, name: str) -> None:
        spec = find_engine(self.engine)
        if self.tensor_parallel_size > 1 and not spec.tensor_parallel:
            problem = f"rollout.engine={self.engine} runs on one device; choose {engines_with('tensor_parallel')}"
            raise config_error(config, "rollout.tensor_parallel_size", problem)
        if self.engine_args and not spec.engine_args:
            problem = f"rollout.engine={self.engine} takes none; choose {engines_with('engine_args')}"
            raise config_error(config, "rollout.engine_args", problem)
        self._check_urls(config, spec.served)
        self.logprob_limit("float32", "cpu")
        if self.weight_sync != "auto":
            find_transport(self.weight_sync)
        if self.colocate and not spec.gpus:
            raise config_error(config, "rollout.colocate", f"rollout.engine={self.engine} takes no GPUs; choose false")
        if self.colocate and self.ahead > 0:
            problem = "engines that share the GPUs of the ranks cannot generate while these train; choose 0"
            raise config_error(config, "rollout.ahead", f"{problem}, or rollout.colocate=false")
        self._check_in_flight(config)
        self._check_lora(config)

    def _check_urls(self, config: Config, served: bool) -> None:
        if self.urls and not served:
            raise config_error(config, "rollout.urls", f"rollout.engine={self.engine} uses no servers; choose server")
        if served and not self.urls:
            raise config_error(config, "rollout.urls", f"rollout.engine={self.engine} needs the addresses of servers")
        for url in self.urls:
            if (problem := _problem_of_url(url)) is not None:
                raise config_error(config, "rollout.urls", problem)
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise config_error(config, "rollout.urls", "names a server twice")
        if self.urls and self.num_engines != len(self.urls):
            problem = f"there is one engine for each of the {len(self.urls)} rollout.urls; leave this key out"
            raise config_error(config, "rollout.num_engines", problem)
        if served and self.server_timeout_s >= config.trainer.hang_timeout_s:
            problem = f"must be below trainer.hang_timeout_s={config.trainer.hang_timeout_s:g}, or the wait is a hang"
            raise config_error(config, "rollout.server_timeout_s", problem)

    def logprob_limit(self, dtype: str, device: str) -> float | None:
        """Return the largest mean difference of log-probs (see `max_logprob_diff`); None: there is no limit.

        Args:
            dtype: `float32` if engines and ranks compute in it, else `bfloat16`.
            device: `cpu` or `cuda`.
        """
        chosen = str(self.max_logprob_diff).lower()
        if chosen in ("none", "null", "off", "false"):
            return None
        if chosen == "auto":
            if self.top_p < 1 or self.top_k > 0 or self.temperature == 0:
                return None
            quantised = any(self.engine_args.get(name) for name in ("quantization", "kv_cache_dtype"))
            return 0.3 if quantised else {"float32": {"cpu": 1e-3}.get(device, 1e-2)}.get(dtype, 0.1)
        try:
            limit = float(chosen)
        except ValueError:
            limit = -1.0
        if not 0 < limit < math.inf:
            raise UserError(
                f"rollout.max_logprob_diff={self.max_logprob_diff}: must be a number above 0, auto, or null (no limit)"
            )
        return limit

    @property
    def works_ahead(self) -> bool:
        """Whether engines generate while the ranks train."""
        return works_ahead(vars(self))

    def _check_in_flight(self, config: Config) -> None:
        key = "rollout.in_flight_updates"
        if not self.in_flight_updates:
            for name in ("max_staleness", "window"):
                if getattr(self, name) != getattr(RolloutConfig(), name):
                    raise config_error(config, f"rollout.{name}", f"needs {key}=true")
            return
        if not find_engine(self.engine).in_flight:
            able = engines_with("in_flight")
            problem = f"rollout.engine={self.engine} takes weights only when it generates nothing"
            raise config_error(config, key, f"{problem}; choose rollout={able}, or rollout.ahead=1 instead")
        if self.ahead > 0:
            problem = "engines take new weights before a batch of rollout.ahead is complete"
            raise config_error(config, key, f"{problem}; choose one of the two")
        if self.colocate:
            problem = "engines that share the GPUs of the ranks cannot generate while these train"
            raise config_error(config, key, f"{problem}; choose false, or rollout.colocate=false")
        batch = config.trainer.train_batch_size
        if (count := (self.max_staleness + 1) * batch) > _MOST_IN_FLIGHT:
            problem = f"with trainer.train_batch_size={batch}, {count} prompts would be under way, each on a thread"
            raise config_error(config, "rollout.max_staleness", f"{problem}; at most {_MOST_IN_FLIGHT} can be")

    @property
    def deciding_args(self) -> dict[str, Any]:
        """`engine_args` that decide what engines generate."""
        return self._without_harmless(self.engine_args)

    def _without_harmless(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in arguments.items() if name not in find_engine(self.engine).harmless_args}

    def resume_rules(self, config: Config, saved: SavedRun) -> dict[str, ResumeRule]:
        before = saved.config.get("rollout", {})
        arguments = before.get("engine_args", {})
        same = isinstance(arguments, dict) and agree(self._without_harmless(arguments), self.deciding_args)
        return {"engine_args": HARMLESS} if same else {}

    def _check_lora(self, config: Config) -> None:
        rank, most = config.trainer.policy.lora.rank, find_engine(self.engine).max_lora_rank
        if rank is None and self.lora_sync != "auto":
            raise config_error(config, "rollout.lora_sync", "needs trainer.policy.lora.rank")
        if rank is None or self.lora_sync != "adapter":
            return
        if not most:
            raise config_error(
                config,
                "rollout.lora_sync",
                f"rollout.engine={self.engine} serves no adapters; choose merged or "
                f"rollout={engines_with('max_lora_rank')}",
            )
        if rank > most:
            problem = f"rollout.engine={self.engine} serves adapters up to rank {most}; choose merged"
            raise config_error(config, "rollout.lora_sync", problem)


def _problem_of_url(url: str) -> str | None:
    """Return why `url` cannot be the address of a server; None: it can."""
    if "@" in url:
        return f"an address must hold no password; the token of the servers is the variable {TOKEN}"
    parts = split_http_url(url)
    if parts is None or parts.path not in ("", "/") or parts.query or parts.fragment:
        return f"{url} is no address of a server; write http://HOST:PORT"
    return None
