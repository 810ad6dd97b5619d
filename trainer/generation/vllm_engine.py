"""vLLM as an engine: in the process that builds it, so that a Ray actor is the whole engine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.config import RolloutConfig
from trainer.errors import UserError
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.weight_sync import Adapter, Broadcast, SharedMemory, WeightSource
from trainer.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.shared_memory import SharedDirectory, check_own, place_for

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.lora.request import LoRARequest

_ADAPTER = "policy"

_CPU_BLOCK = 32  # tokens a block of the KV cache; the CPU attention wants multiples of it
_CPU_PREFILL_TOKENS = 8192  # tokens a prefill batch; bounds its activations in memory


def engine_environment(device: str) -> dict[str, str]:
    """Environment of an engine's process; must be set before vLLM is imported."""
    env = {
        # The scheduler in this process: an actor is one process to start, watch and kill.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if device == "cpu":
        env |= {
            # More threads sum in another order, and the log-probs of a resumed run would differ.
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",  # compiling for the first batch costs seconds and gives the same bits
        }
    return env


class VLLMEngine:
    """See `trainer.generation.engine.Engine`.

    Args:
        model_path: directory or Hub id of the start weights.
        dtype: `auto`, `bfloat16` or `float32`.
        seed: of what vLLM draws besides requests, which have their own.
        device: `cpu` or `cuda`.
        weight_version: the version of the start weights.
        lora_rank: of the adapters that `sync_weights` will bring in place of weights.

    Raises:
        UserError: vLLM is not installed, or refuses the model or the settings.
    """

    def __init__(self, model_path: str, *, dtype: str, seed: int, rollout: RolloutConfig, device: str,
                 weight_version: int = 0, trust_remote_code: bool = False, lora_rank: int | None = None):  # fmt: skip
        for name, value in engine_environment(device).items():
            os.environ.setdefault(name, value)
        try:
            from vllm import LLM
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            raise UserError(
                "rollout.engine=vllm: vLLM is not installed (it is in the extras cpu and gpu); "
                "install one, or choose rollout=transformers"
            ) from error

        self._version = weight_version
        self._asleep = False
        self._can_sleep = device == "cuda" and rollout.share_gpus
        self._group: Broadcast | None = None
        self._adapter: LoRARequest | None = None
        options = {
            "model": model_path,
            "trust_remote_code": trust_remote_code,
            "dtype": ("float32" if device == "cpu" else "bfloat16") if dtype == "auto" else dtype,
            "seed": seed,
            **_device_options(rollout, device),
            **_lora_options(lora_rank),
            **rollout.engine_args,
        }
        try:
            self._llm = LLM(**options)
        except (TypeError, ValueError) as error:  # the former of a name in engine_args that it does not know
            reason = " ".join(str(error).split())
            raise UserError(
                f"rollout.engine=vllm does not start with {model_path} and these settings: {reason}"
            ) from error

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests."""
        from vllm import SamplingParams

        assert not self._asleep, "wake the engine before generating"
        # Nothing carries over from earlier calls: neither keys and values of older weights, nor of other prompts,
        # with which a run that did not stop could differ in its last bits from one that was resumed.
        cleared = self._llm.reset_prefix_cache()
        assert cleared, "the prefix cache is in use"
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,  # the caller names all stop tokens; vLLM would add the model directory's
                seed=request.seed,
                logprobs=0,  # of the sampled token alone
                detokenize=False,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter)
        return [self._completion(output) for output in outputs]

    def _completion(self, request: RequestOutput) -> Completion:
        output = request.outputs[0]
        assert output.finish_reason in ("stop", "length"), output.finish_reason
        tokens = list(output.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)]
        return Completion(tokens, logprobs, output.finish_reason, self._version)

    def sync_weights(self, source: WeightSource, version: int) -> None:
        """Load the weights of `source` in place."""
        if self._asleep and self._can_sleep:
            self._llm.wake_up(tags=["weights"])  # the KV cache stays away until `wake`
        if isinstance(source, SharedMemory):
            check_own(source.path)
            self._llm.collective_rpc("load_shared", args=(source.path,))
        elif isinstance(source, Adapter):
            self._load(source)
        else:
            self._receive(source)
        self._version = version

    def _load(self, adapter: Adapter) -> None:
        from vllm.lora.request import LoRARequest

        with SharedDirectory(place_for(len(adapter.weights) + len(adapter.config))) as shared:
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
                raise UserError(f"rollout.lora_sync: vLLM's model has no {unserved[0]} that could serve an adapter; "
                                "choose merged")  # fmt: skip
            # Requests name it without `load_inplace`: it is there, and not read again.
            self._adapter = LoRARequest(_ADAPTER, 1, directory)

    def _receive(self, group: Broadcast) -> None:
        if self._group != group:
            self._llm.init_weight_transfer_engine({"init_info": dataclasses.asdict(group)})
            self._group = group
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {}})
        self._llm.finish_weight_update()

    def set_version(self, version: int) -> None:
        """Name the weights that are loaded."""
        self._version = version

    def sleep(self) -> None:
        """Give back the GPU memory of weights and KV cache, when the engine shares its GPU.

        The weights wait in host memory (vLLM's level 1), so that waking does not depend on a sync.
        """
        if self._can_sleep and not self._asleep:
            self._llm.sleep(level=1)
        self._asleep = True

    def wake(self) -> None:
        """Take the memory again."""
        if self._can_sleep and self._asleep:
            self._llm.wake_up()
        self._asleep = False

    def shutdown(self) -> None:
        """End vLLM's worker processes. The engine is of no use afterwards."""
        self._llm.llm_engine.engine_core.shutdown()


def _lora_options(rank: int | None) -> dict[str, Any]:
    if rank is None:
        return {}
    room = next(r for r in (8, 16, 32, 64, 128, 256, 320, 512) if r >= rank)  # the ranks that vLLM has kernels for
    return {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}


def _device_options(rollout: RolloutConfig, device: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that follow from the config, those of the model aside."""
    from vllm.config import WeightTransferConfig

    from trainer.generation.vllm_worker import BACKEND

    length = rollout.max_prompt_tokens + rollout.max_response_tokens
    options: dict[str, Any] = {
        "max_model_len": length,
        "max_num_seqs": rollout.max_num_seqs,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,  # tokens go in and come out
        "use_tqdm_on_load": False,
        "worker_extension_cls": "trainer.generation.vllm_worker.WeightReceiver",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
    }
    if device == "cpu":
        return options | {
            "enforce_eager": True,
            "block_size": _CPU_BLOCK,
            "kv_cache_memory_bytes": rollout.kv_cache_mb * 2**20,
            # A seeded request whose prefill is cut into chunks kills the CPU engine.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(_CPU_PREFILL_TOKENS, length, rollout.max_num_seqs),
        }
    return options | {
        "enforce_eager": rollout.enforce_eager,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "distributed_executor_backend": "mp" if rollout.tensor_parallel_size > 1 else "uni",
        "enable_sleep_mode": rollout.share_gpus,
    }
