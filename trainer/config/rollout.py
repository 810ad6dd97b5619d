"""`rollout.*`: the engines that generate completions, and how they sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.fields import (
    LONGEST_TIME,
    Section,
    choice,
    number,
    open_section,
    setting,
)
from trainer.errors import UserError

LOWEST_TEMPERATURE = 0.01  # vLLM replaces anything lower by this


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
    weight_sync: str = setting("auto", resume="rounding")
    """How weights reach the engines: `shared_memory` (engines on rank 0's node), `broadcast` (a gloo or NCCL group
    over ranks and engines), `ipc` (from rank to engine within the GPU that they share), a way of your own by the import
    path of its class or `TransportSpec`, or `auto`: the way of an engine that has one of its own; else ipc on shared
    GPUs, broadcast across nodes and to engines with GPUs of their own, else shared memory."""
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
    episodes that began at most this many versions before."""
    journal: bool = setting(True, resume="harmless")
    """Write finished completions with their rewards to `{run_dir}/.journal` before a step trains on them. After a kill,
    the steps behind the last checkpoint train again on these, and only what is missing is generated."""
    engine_args: dict[str, Any] = open_section(resume="rollouts")
    """Further arguments for `vllm.LLM`, or for an engine of your own."""

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
