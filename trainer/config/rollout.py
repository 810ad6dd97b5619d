"""`rollout.*`, `inference.*`, `reward.*`, `environment.*`: what generates, answers and judges completions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.fields import LONGEST_TIME, ON_FAILURE, Section, setting, subsection
from trainer.errors import UserError
from trainer.import_utils import import_function, is_agent

CPU_CACHE_BYTES = 128 * 2**20
"""KV cache of a vLLM engine on CPU, if `rollout.engine_args.kv_cache_memory_bytes` is not set."""
LOWEST_TEMPERATURE = 0.01  # vLLM replaces anything lower by this


def works_ahead(rollout: Mapping[str, Any]) -> bool:
    """Return what `RolloutConfig.works_ahead` is for a section of a nested config."""
    return rollout.get("ahead", 0) > 0 or rollout.get("in_flight_updates", False)


@dataclass
class RolloutConfig(Section):
    engine: str = setting("vllm", resume="rollouts")
    """Inference engine: `vllm`, `transformers`, `server` (the inference servers of `rollout.urls`), or an engine of
    your own, by the import path of its class or `EngineSpec`."""
    urls: list[str] = setting(default_factory=list, resume="rounding")
    """Addresses of inference servers, such as `http://gpu7:8000`, for `rollout.engine=server`. There is one engine for
    each of them."""
    num_engines: int = setting(1, at_least=0, resume="rounding")
    """Number of engines that the job starts. Prompts are spread over them. With `rollout.urls`, it is their number. 0:
    none, with `rollout.fleet`."""
    fleet: bool = setting(False, resume="harmless")
    """Engines may join the job, and leave it, at any time: `trainer engine --join RUN` starts one (docs/inference.md).
    Needs the environment variable TRAINER_INFERENCE_TOKEN, here and there."""
    tensor_parallel_size: int = setting(1, at_least=1, resume="rounding")
    """GPUs per engine (vLLM)."""
    colocate: bool = setting(False, resume="harmless")
    """Engines share the GPUs of the ranks and free their memory while the ranks train. false: engines have GPUs
    of their own."""
    n: int = setting(8, at_least=1, resume="rollouts")
    """Completions per prompt."""
    max_prompt_tokens: int = setting(512, at_least=1, resume="rollouts")
    """Longest prompt, in tokens. Longer prompts are dropped, and counted, when the data is read."""
    max_response_tokens: int = setting(512, at_least=1, resume="rollouts")
    """Longest completion, in tokens. Longer completions are cut."""
    temperature: float = setting(1.0, at_least=LOWEST_TEMPERATURE, at_most=100, off=0, resume="rollouts")
    """Sampling temperature of rollouts. The trainer divides its logits by it too. 0: greedy."""
    top_p: float = setting(1.0, above=0, at_most=1, resume="rollouts")
    """Nucleus sampling: keep the smallest set of tokens with this probability. 1: all tokens."""
    top_k: int = setting(-1, at_least=1, off=-1, resume="rollouts")
    """Keep this many of the most likely tokens. -1: all."""
    val_n: int = setting(0, at_least=0, resume="validation")
    """Validation also samples this many completions per prompt for `val/pass@<k>`. 0: greedy completions only."""
    dtype: str = setting("auto", choices=("auto", "bfloat16", "float32"), resume="rollouts")
    """Precision of the engine: `auto` (bfloat16 on CUDA, float32 on CPU), `bfloat16` or `float32`."""
    max_logprob_diff: str | None = setting("auto", resume="harmless")
    """Largest mean difference, in nats per token, between the log-probs of engines and ranks for tokens of the newest
    weights. Above it, the run stops before it trains on them; so it does if the difference is 100 times that of all
    steps before and more than a hundredth of the limit. `auto`: 0.001 if both compute in float32 on CPU, 0.01 on GPUs,
    0.1 with bfloat16, 0.3 with a quantised engine; none where `top_p`, `top_k` or temperature 0 change the engine's
    log-probs. null: no limit."""
    max_num_seqs: int = setting(256, at_least=1, resume="rounding")
    """Largest number of sequences that an engine runs at the same time."""
    gpu_memory_utilization: float = setting(0.85, above=0, at_most=1, resume="rounding")
    """Fraction of a GPU's memory that a vLLM engine uses for weights and KV cache."""
    weight_sync: str = setting(
        "auto", choices=("auto", "ipc", "delta", "broadcast", "shared_memory"), resume="rounding"
    )
    """How weights reach the engines: `shared_memory` (engines on rank 0's node), `broadcast` (a gloo or NCCL group
    over ranks and engines), `delta` (engines fetch from each rank what has changed of its shards, once for each node),
    `ipc` (from rank to engine within the GPU that they share), or `auto`: ipc on shared GPUs, broadcast to engines with
    GPUs of their own, delta across nodes to engines without GPUs and in a fleet, else shared memory."""
    lora_sync: str = setting("auto", choices=("auto", "merged", "adapter"), resume="rounding")
    """What engines receive from a policy with adapters: the `adapter`, `merged` weights, or `auto`: the adapter if the
    engine can serve it, else merged weights."""
    ahead: int = setting(0, at_least=0, at_most=8, resume="update")
    """While a step trains, engines generate the episodes of this many steps after it. Each step then trains on episodes
    of the weights of so many steps before. 0: each step trains on episodes of its own weights."""
    in_flight_updates: bool = setting(False, resume="rollouts")
    """Engines generate all the time, and take new weights between two tokens. So a completion may come of several
    versions of the weights, and chance decides of which: no step can be repeated bit for bit. Across kills, no prompt
    is lost or trained twice. Only for engines that keep requests while they take weights (vLLM)."""
    max_staleness: int = setting(1, at_least=1, at_most=64, resume="update")
    """With `in_flight_updates`: at most this many steps more than the next one are under way, and a step trains on
    episodes that began at most this many versions before."""
    journal: bool = setting(True, resume="harmless")
    """Write finished completions with their rewards to `{run_dir}/.journal` before a step trains on them. After a kill,
    the steps behind the last checkpoint train again on these, and only what is missing is generated."""
    engine_args: dict[str, Any] = setting(default_factory=dict, is_open=True, resume="rollouts")
    """Further arguments for `vllm.LLM`, such as `kv_cache_memory_bytes` (on CPU 128 MiB by default), or for an engine
    of your own."""

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


@dataclass
class InferenceConfig(Section):
    host: str = setting("127.0.0.1", resume="harmless")
    """Address on which the server listens. Beyond the loopback interface it needs a token."""
    port: int = setting(8000, at_least=1, at_most=65535, resume="harmless")
    """TCP port on which the server listens."""


REMOTE, MODEL = "remote", "model"
"""The reward that asks the server at `reward.url`."""


@dataclass
class RewardModelConfig(Section):
    path: str | None = setting(None, resume="rollouts")
    """Directory or Hugging Face id of the reward model that the reward `model` asks: a sequence classifier with one
    label and the tokenizer of the policy, such as an export of `trainer rm`. The ranks hold it beside the policy."""
    url: str | None = setting(None, resume="harmless")
    """In place of `path`, the address of a server with the reward model, such as one of `trainer inference`
    (docs/rewards.md). A resume finds the same weights there, at this address or another."""


@dataclass
class RewardConfig(Section):
    name: Any = setting("reverse_text", resume="rollouts")
    """`gsm8k`, `math`, `arithmetic`, `reverse_text`, `reasoning_gym` (the score of its task), `remote` (the server
    at `url`), or the import path `package.module:function` of a function, whose parameters name its inputs
    (docs/rewards.md). A list of these: the weighted sum of their rewards. `model` alone: the score of the reward model
    at `model.path`."""
    weights: list[float] = setting(default_factory=list, resume="rollouts")
    """Weight of each reward of `name`. Empty: 1 each."""
    timeout_s: float = setting(10.0, at_least=0.001, at_most=LONGEST_TIME, resume="harmless")
    """Seconds that one call of a reward function, or one request to `url` with all repetitions, may take. A call that
    takes longer counts as failed (see `on_failure`). After 30 such calls of a batch for each process, the remaining
    completions are not tried and count as failed."""
    num_processes: int = setting(1, at_least=1, resume="harmless")
    """Number of processes that compute rewards."""
    concurrency: int = setting(16, at_least=1, at_most=1024, resume="harmless")
    """Calls of an `async` reward, or requests to `url`, that run at the same time in each process."""
    on_failure: str = setting("leave_out", choices=ON_FAILURE, resume="rollouts")
    """What the run does with a completion whose reward failed. `leave_out`: it is neither trained on nor compared with
    the others of its prompt, and no metric of rewards counts it. If the algorithm compares completions, a prompt with
    fewer than two others is left out as a whole. `zero`: the reward counts as 0, like a wrong answer."""
    max_error_rate: float = setting(0.2, at_least=0, at_most=1, resume="harmless")
    """If more than this share of the rewards of a step, or of an evaluation, fails, the run ends before it trains on
    them; with `data.mix`, of the rewards of all sources with the same limit. 1: it never ends for that, and a reward
    that fails on the first rows of the data is no reason not to start."""
    success_threshold: float = setting(1.0, resume="validation")
    """A validation completion with at least this reward is a success: `val/accuracy` is the fraction of successes, and
    `val/pass@<k>` the fraction of prompts with at least one success."""
    url: str | None = setting(None, resume="rollouts")
    """Address of a server that judges completions (docs/rewards.md), for the reward `remote`. Its answers are stored in
    `rewards.jsonl` of the run directory."""
    authorization_env: str | None = setting(None, resume="harmless")
    """Environment variable with the header `Authorization` for `url`, such as `Bearer …`. The value is never saved or
    printed. null: no such header."""

    model: RewardModelConfig = subsection(RewardModelConfig)
    """The reward model."""

    @property
    def is_model(self) -> bool:
        """Whether a reward model gives the rewards."""
        return self.name in (MODEL, [MODEL])

    def names(self) -> list[str]:
        """Return the rewards as a list."""
        return [self.name] if isinstance(self.name, str) else list(self.name)

    def key(self) -> str:
        """Return the key of the rewards with its value, for errors."""
        return f"reward.name={self.name if isinstance(self.name, str) else ','.join(self.name)}"


@dataclass
class EnvironmentConfig(Section):
    name: str | None = setting(None, resume="rollouts")
    """Import path `package.module:Class` of an environment (see docs/environments.md) or of an agent (see
    docs/agents.md), which gives the reward of an episode. null: an episode is one prompt and one completion, and
    `reward.name` gives its reward."""
    kwargs: dict[str, Any] = setting(default_factory=dict, is_open=True, resume="rollouts")
    """Arguments for the class, by name."""
    max_turns: int = setting(8, at_least=1, resume="rollouts")
    """Largest number of replies of the policy in an episode. Each has at most `rollout.max_response_tokens` tokens."""
    max_tokens: int = setting(-1, at_least=2, off=-1, resume="rollouts")
    """Longest episode, in tokens: messages and replies together. Then `rollout.max_prompt_tokens` is for the first
    messages alone. -1: the messages and replies before a reply have at most `rollout.max_prompt_tokens`."""
    timeout_s: float = setting(60.0, at_least=0.001, at_most=LONGEST_TIME, resume="harmless")
    """Seconds that one call of an environment may take. A call that takes longer is repeated once, in a new
    environment; then the episode counts as failed. For agents, the time between two calls to the policy."""
    num_processes: int = setting(1, at_least=1, resume="harmless")
    """Number of processes that run environments. Each holds many of them."""
    on_failure: str = setting("leave_out", choices=ON_FAILURE, resume="rollouts")
    """What the run does with an episode whose environment failed before the policy replied. `leave_out`: it is neither
    trained on nor compared with the others of its row, and no metric of rewards counts it. If the algorithm compares
    episodes, a row with fewer than two others is left out as a whole. `zero`: its reward is 0. An episode whose
    environment fails later always has a reward of 0, because the policy may have caused that."""
    max_error_rate: float = setting(0.5, at_least=0, at_most=1, resume="harmless")
    """The run ends if a greater fraction of the episodes of a batch fails, with `data.mix` of those of all sources that
    have an environment and the same limit. 1: never, and an environment that fails for the first row of the data is no
    reason not to start."""
    agent_concurrency: int | None = setting(None, at_least=1, resume="harmless")
    """Agents of a source that run at the same time; the others wait. null: all of a batch. Set it where each is a
    program that takes a core or gigabytes."""
    agent_sampling: str = setting("refuse", choices=("refuse", "override"), resume="rollouts")
    """What happens to requests of agents whose `temperature`, `top_p` or `top_k` is not that of the run, or that force
    a call of a tool. `refuse`: they get an error. `override`: the values do not count. The run can learn from its own
    way of sampling alone."""
    agent_address: str = setting("127.0.0.1", resume="harmless")
    """`HOST` or `HOST:PORT` on which the server for agents listens; without a port, on a free one. Agents in containers
    and on other machines need another one (see docs/agents.md)."""
    agent_url: str | None = setting(None, resume="harmless")
    """How agents reach the server, such as `http://host.docker.internal:8123`. null: by
    `environment.agent_address`."""

    @property
    def agent_listens(self) -> tuple[str, int]:
        """Host and port of `agent_address`; the port is 0 if it has none, and -1 if it is no number."""
        host, colon, port = self.agent_address.rpartition(":")
        if not colon or ":" in host and not host.endswith("]"):  # a plain address of IPv6
            return self.agent_address.strip("[]"), 0
        return host.strip("[]"), int(port) if port.isdecimal() else -1

    @property
    def is_agent(self) -> bool:
        """Whether `name` is the class of an agent. One that cannot be imported here is none."""
        with contextlib.suppress(UserError):
            return self.name is not None and is_agent(import_function(self.name, "environment.name"))
        return False

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of a prompt and its reply; None: no more than those of each."""
        return self.max_tokens if self.max_tokens > 0 else None
