"""vLLM as an engine. It runs in the process that builds it, so that one process is the whole engine."""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trainer.config import RolloutConfig
from trainer.config.engines import ENGINES
from trainer.config.rollout import CPU_CACHE_BYTES
from trainer.errors import RESTART_HINT, UserError, WorkerError
from trainer.files.shared_memory import SharedDirectory, choose_directory
from trainer.generation.engine import CUT, Completion, Request, RunningRequests, generate_in_steps, join_interval_s
from trainer.generation.weight_shards import Shards, close_copies
from trainer.generation.weight_sync import Adapter, SharedMemory, WeightSource
from trainer.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.models.weight_deltas import digest_of
from trainer.process.startup import importing

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.config import ModelConfig
    from vllm.lora.request import LoRARequest

_ADAPTER = "policy"

_REFUSALS = (TypeError, ValueError, AssertionError, AttributeError, NotImplementedError)
"""What vLLM raises for settings that it does not know, and for models that it does not support on this device."""

_OCCUPIED = "Free memory on device"  # begins vLLM's complaint about memory that other processes hold

_UNIMPORTABLE = "failed to be inspected"  # in vLLM's complaint about a model whose class it cannot import

_CPU_BLOCK = 32  # tokens of a block of the KV cache on CPU: the attention wants multiples of it

_CPU_PREFILL_TOKENS = 8192  # tokens a prefill batch; bounds its activations in memory


class VLLMEngine:
    """See `trainer.generation.engine.Engine`.

    Args:
        model_path: directory or Hub id of the initial weights.
        dtype: `auto`, `bfloat16` or `float32`.
        seed: for what vLLM draws outside of requests, which have their own seeds.
        device: `cpu` or `cuda`.
        lora_rank: rank of the adapters that `sync_weights` will bring; None: it will bring weights.

    Raises:
        UserError: vLLM is not installed, or refuses the model or the settings.
        WorkerError: other processes hold the memory of the GPU.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        seed: int,
        rollout: RolloutConfig,
        device: str,
        trust_remote_code: bool = False,
        lora_rank: int | None = None,
    ):
        for name, value in ENGINES["vllm"].environment_on(device).items():
            os.environ.setdefault(name, value)
        if device == "cuda":  # on CPU, nothing is compiled
            use_own_cache()
        try:
            with importing():
                from vllm import LLM
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            raise UserError(
                "rollout.engine=vllm: vLLM is not installed (it is in the extras cpu and gpu); "
                "install one, or choose rollout=transformers"
            ) from error

        self._asleep = False
        self._can_sleep = device == "cuda" and rollout.colocate
        self._running: dict[str, int] = {}  # the numbers of the requests in vLLM, by their names there
        self._interrupted = threading.Event()
        self._has_old_keys = False  # the prefix cache may hold keys and values of older weights
        self._companion: str | None = None  # the name of a request that nobody waits for (see `_accompany`)
        self._longest = rollout.max_response_tokens
        self._accompanies = device == "cpu" and rollout.max_num_seqs > 1
        self._adapter: LoRARequest | None = None
        try:
            adapters: dict[str, Any] = {}
            if lora_rank is not None:
                # The ranks that vLLM has kernels for.
                room = next(rank for rank in (8, 16, 32, 64, 128, 256, 320, 512) if rank >= lora_rank)
                adapters = {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}
            options = {
                "model": model_path,
                "trust_remote_code": trust_remote_code,
                "dtype": dtype_on(device, dtype),
                "seed": seed,
                **device_options(rollout, device, model_path, trust_remote_code),
                **adapters,
                **rollout.engine_args,
            }
            self._llm = LLM(**options)
        except _REFUSALS as error:
            raise start_failure(error, model_path) from error
        self.set_version(0)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return generate_in_steps(self, requests)

    def step(self, requests: Mapping[int, Request]) -> dict[int, Completion]:
        """Add requests, and generate until some are complete; return these (see `StreamingEngine`)."""
        assert not self._asleep, "wake the engine before generating"
        if not self._running and self._has_old_keys:
            cleared = self._llm.reset_prefix_cache()
            assert cleared, "the prefix cache is in use"
            self._has_old_keys = False
        if requests:
            params = [sampling_params(request) for request in requests.values()]
            prompts = [{"prompt_token_ids": request.prompt_token_ids.tolist()} for request in requests.values()]
            names = self._llm.enqueue(prompts, params, lora_request=self._adapter, use_tqdm=False)
            # vLLM returns names with a random end, and puts names without it into outputs.
            self._running |= {name.partition("-")[0]: one for name, one in zip(names, requests, strict=True)}
        completions: dict[int, Completion] = {}
        began = time.monotonic()
        while self._running and not self._interrupted.is_set():
            if self._accompanies:
                self._accompany()
            for output in self._llm.llm_engine.step():
                if output.finished and output.request_id == self._companion:
                    self._companion = None
                elif output.finished:
                    completions[self._running.pop(output.request_id)] = completion_of(output)
            if not self._running:
                self._end_companion()
            if completions and time.monotonic() > began + join_interval_s(len(self._running)):
                break
        self._interrupted.clear()
        return completions

    def interrupt(self) -> None:
        self._interrupted.set()

    def _accompany(self) -> None:
        """Generate something beside a request that is alone.

        On CPU, a batch of one token is computed by other kernels, which round in another way. Whether a request is ever
        alone depends on time where requests join others, and on what is left to generate after a kill or a lost engine.
        """
        from vllm import SamplingParams

        if len(self._running) != 1:
            self._end_companion()
        elif self._companion is None:
            params = SamplingParams(temperature=0.0, max_tokens=self._longest, ignore_eos=True, detokenize=False)
            (name,) = self._llm.enqueue([{"prompt_token_ids": [0]}], [params], use_tqdm=False)
            self._companion = name.partition("-")[0]

    def _end_companion(self) -> None:
        if self._companion is not None:
            self._llm.llm_engine.abort_request([self._companion])
            self._companion = None

    def sync_weights(self, source: WeightSource, version: int, running: RunningRequests = "abort") -> str:
        """Load the weights of `source` in place; return their digest."""
        if running == "abort":
            self._abort()
        if self._asleep and self._can_sleep:
            self._llm.wake_up(tags=["weights"])  # the KV cache stays away until `wake`
        match source:
            case SharedMemory() | Shards():
                with source.opened() as directory:
                    digests = self._llm.collective_rpc("load_shared", args=(directory,))
            case Adapter():
                digests = [self._load_adapter(source)]
            case _:
                digests = self._llm.collective_rpc("load_sent", args=(source,))
        if self._running:  # their keys and values are of the old weights: compute them again
            cleared = self._llm.reset_prefix_cache(reset_running_requests=True)
            assert cleared, "the prefix cache is in use"
        self._has_old_keys = not self._running
        self.set_version(version)
        return ", ".join(sorted({*digests}))  # more than one is not what the ranks have

    def hand_back(self) -> dict[int, Completion]:
        """End all requests, and return the tokens that they have (see `StreamingEngine`)."""
        from vllm.v1.engine import FinishReason

        found = {}
        for state in list(self._llm.llm_engine.output_processor.request_states.values()):
            number = self._running.get(state.external_req_id)
            if number is not None and state.detokenizer.num_output_tokens():
                output = state.make_request_output([], None, FinishReason.ABORT, None)
                found[number] = replace(completion_of(output), finish_reason=CUT)
        self._abort()
        return found

    def _abort(self) -> None:
        if self._running:
            self._llm.llm_engine.abort_request(list(self._running))
        self._end_companion()
        self._running.clear()

    def _load_adapter(self, adapter: Adapter) -> str:
        from vllm.lora.request import LoRARequest

        with SharedDirectory(choose_directory(len(adapter.weights) + len(adapter.config))) as shared:
            directory = shared.path
            with open(os.path.join(directory, ADAPTER_CONFIG), "w") as file:
                file.write(adapter.config)
            with open(os.path.join(directory, ADAPTER_WEIGHTS), "wb") as file:
                file.write(adapter.weights)
            try:
                self._llm.llm_engine.add_lora(LoRARequest(_ADAPTER, 1, directory, load_inplace=True))
            except ValueError as error:
                raise UserError(f"rollout.lora_sync: vLLM refuses the adapters ({error}); choose merged") from error
            unserved = self._llm.collective_rpc("unserved_layers", args=(1,))[0]
            if unserved:
                raise UserError(
                    f"rollout.lora_sync: vLLM's model has no {unserved[0]} that could serve an adapter; choose merged"
                )
            if not all(self._llm.collective_rpc("serves_adapter", args=(1, directory))):
                raise ValueError("vLLM serves another adapter than the one of this sync")
            # Without `load_inplace`: the adapter is loaded already, and requests must not read it again.
            self._adapter = LoRARequest(_ADAPTER, 1, directory)
        return digest_of(adapter.weights)

    def set_version(self, version: int) -> None:
        self._llm.llm_engine.set_weight_version(str(version))  # vLLM tells which tokens each version has generated

    def sleep(self) -> int:
        """Release the GPU memory of weights and KV cache, if the engine shares its GPU.

        The weights wait in host memory (vLLM's level 1), so that waking does not depend on a sync.
        """
        if self._can_sleep and not self._asleep:
            self._llm.sleep(level=1)
        self._asleep = True
        return max(self._llm.collective_rpc("waking_bytes")) if self._can_sleep else 0

    def wake(self) -> None:
        if self._can_sleep and self._asleep:
            self._llm.wake_up()
        self._asleep = False

    def shutdown(self) -> None:
        """End vLLM's worker processes. The engine is of no use afterwards."""
        self._llm.llm_engine.engine_core.shutdown()
        close_copies()


def sampling_params(request: Request) -> SamplingParams:
    """Return how vLLM is to draw the tokens of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        top_k=request.sampling.top_k,
        max_tokens=request.sampling.max_tokens,
        stop_token_ids=list(request.sampling.stop_token_ids),
        ignore_eos=True,  # the caller names all stop tokens; vLLM would add the model directory's
        seed=request.seed,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion_of(request: RequestOutput) -> Completion:
    """Return the completion of a request that vLLM has completed."""
    output = request.outputs[0]
    assert output.finish_reason in ("stop", "length", "abort"), output.finish_reason
    logprobs = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
    spans = tuple((int(span.version), span.end - span.start) for span in output.weight_versions)
    versions = spans[0][0], spans[-1][0]
    return Completion(output.token_ids, logprobs, output.finish_reason, versions, spans if len(spans) > 1 else ())


def start_failure(error: Exception, model_path: str) -> Exception:
    """Return the exception to raise instead of vLLM's `error` when it refuses to start."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if reason.startswith(_OCCUPIED):
        # Perhaps by a process of the last start of this job, which is still ending.
        return WorkerError(
            f"rollout.engine=vllm does not start, its GPU is occupied: {reason}", RESTART_HINT, "gpu_memory_in_use"
        )
    if _UNIMPORTABLE in reason and find_spec("torchvision") is None:
        # vLLM logs why, and does not raise it. Text models of a family with images (Qwen3.5) import its classes.
        return UserError(
            f"rollout.engine=vllm: vLLM cannot import its class of {model_path}, probably for want of torchvision, "
            "which is not installed; install the torchvision that fits this torch, or choose rollout=transformers"
        )
    return UserError(f"rollout.engine=vllm does not start with {model_path} and these settings: {reason}")


def dtype_on(device: str, dtype: str) -> str:
    """Return the precision that a value of `rollout.dtype` stands for."""
    return ("float32" if device == "cpu" else "bfloat16") if dtype == "auto" else dtype


def device_options(rollout: RolloutConfig, device: str, model_path: str, trust_remote_code: bool) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` that follow from the config, without those that name the model.

    Raises:
        ValueError: vLLM does not support the model.
    """
    from vllm.config import ModelConfig

    length = rollout.max_prompt_tokens + rollout.max_response_tokens
    options: dict[str, Any] = {
        "max_model_len": length,
        "max_num_seqs": rollout.max_num_seqs,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,  # tokens go in and come out
        "use_tqdm_on_load": False,
        "worker_extension_cls": "trainer.generation.vllm_worker.WeightReceiver",
    }
    if device == "cpu":
        model = ModelConfig(model_path, trust_remote_code=trust_remote_code, skip_tokenizer_init=True)
        options |= {
            "enforce_eager": True,
            "block_size": _CPU_BLOCK,
            "kv_cache_memory_bytes": _cpu_cache(rollout, model),
            # A seeded request whose prefill is cut into chunks kills the CPU engine.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(_CPU_PREFILL_TOKENS, length, rollout.max_num_seqs),
        }
        if model.has_inner_state or model.is_hybrid:
            # vLLM keeps the states of recurrent layers for later requests only where it cuts prefills into chunks.
            options["enable_prefix_caching"] = False
        if model.is_deepseek_mla or model.hf_config.model_type in _HEADS_APART:
            options["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        return options
    return options | {
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "distributed_executor_backend": "mp" if rollout.tensor_parallel_size > 1 else "uni",
        "enable_sleep_mode": rollout.colocate,
    }


_HEADS_APART = ("lfm2", "lfm2_moe")
"""Types whose models in vLLM give heads as an axis of their own to the rotations, as latent attention does. Then the
kernel on CPU turns other parts of them; vLLM's own code in torch is right."""


def _cpu_cache(rollout: RolloutConfig, model: ModelConfig) -> int:
    """Return the bytes of the KV cache of an engine on CPU, which holds two of the longest sequences.

    With less, vLLM takes a sequence out and computes it later, so another one may be alone (see `_accompany`).

    Raises:
        UserError: the user's cache holds fewer.
    """
    text = model.hf_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    of_token = 2 * text.num_hidden_layers * heads * size * (2 if rollout.dtype == "bfloat16" else 4)
    blocks = 2 * math.ceil((rollout.max_prompt_tokens + rollout.max_response_tokens) / _CPU_BLOCK) + 1  # one is empty
    least, given = blocks * _CPU_BLOCK * of_token, rollout.engine_args.get("kv_cache_memory_bytes")
    if given is not None and given < least:
        raise UserError(
            f"rollout.engine_args.kv_cache_memory_bytes={given}: holds fewer than two of the longest sequences; give "
            f"at least {least}"
        )
    return given or max(CPU_CACHE_BYTES, least)


_VARIABLE = "VLLM_CACHE_ROOT"
_claims: list[int] = []


def use_own_cache() -> None:
    """Let vLLM, which must not be imported yet, keep its compiled code in a directory of this process.

    vLLM writes its list of compiled code in place. An engine that starts could read the half-written list of another
    engine, and fail.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = claim_directory(os.environ.get(_VARIABLE) or os.path.join(caches, "vllm"))
    if path is not None:
        os.environ[_VARIABLE] = path


def claim_directory(root: str) -> str | None:
    """Return the first directory below `root` that no running process has claimed; None: it cannot be claimed.

    The claim ends with this process. The directory and its files stay for the next one.
    """
    try:
        for number in itertools.count():
            path = os.path.join(root, f"engine-{number}")
            os.makedirs(path, exist_ok=True)
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                continue
            _claims.append(handle)
            return path
    except OSError:  # it cannot be written, or the file system has no locks
        return None
    raise AssertionError("there are more numbers")
