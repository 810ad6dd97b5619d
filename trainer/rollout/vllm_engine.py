"""vLLM as an engine: in the process that builds it, so that a Ray actor is the whole engine."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainer.config import RolloutConfig
from trainer.rollout.engine import Completion, Request, Sampling
from trainer.rollout.weight_sync import WeightSource

_BLOCK = 32  # vLLM's CPU attention wants multiples of it


def engine_environment(device: str) -> dict[str, str]:
    """Environment of an engine's process; must be set before vLLM is imported."""
    env = {
        # The scheduler in this process: an actor is one process to start, watch and kill.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
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
    """See `trainer.rollout.engine.Engine`.

    Args:
        model_path: directory or Hub id of the start weights.
        dtype: `auto`, `bfloat16` or `float32`.
        device: `cpu` or `cuda`.
        weight_version: the version of the start weights.
    """

    def __init__(self, model_path: str, *, dtype: str, seed: int, rollout: RolloutConfig, device: str,
                 weight_version: int = 0):  # fmt: skip
        for name, value in engine_environment(device).items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        self._version = weight_version
        self._asleep = False
        self._can_sleep = device == "cuda" and rollout.colocate
        length = rollout.max_prompt_tokens + rollout.max_response_tokens
        options = {
            "model": model_path,
            "dtype": ("float32" if device == "cpu" else "bfloat16") if dtype == "auto" else dtype,
            "seed": seed,
            "max_model_len": length,
            "max_num_seqs": rollout.max_num_seqs,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": "trainer.rollout.vllm_worker.WeightReceiver",
            "disable_log_stats": True,
        }
        if device == "cpu":
            options |= {
                "enforce_eager": True,
                "block_size": _BLOCK,
                "kv_cache_memory_bytes": rollout.kv_cache_mb * 2**20,
                # A seeded request whose prefill is cut into chunks kills the CPU engine.
                "max_num_batched_tokens": rollout.max_num_seqs * length,
            }
        else:
            options |= {
                "enforce_eager": rollout.enforce_eager,
                "gpu_memory_utilization": rollout.gpu_memory_utilization,
                "tensor_parallel_size": rollout.tensor_parallel_size,
                "distributed_executor_backend": "mp" if rollout.tensor_parallel_size > 1 else "uni",
                "enable_sleep_mode": rollout.colocate,
            }
        self._llm = LLM(**{**options, **rollout.engine_args})

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests, each with its own seed."""
        assert not self._asleep, "wake the engine before generating"
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                seed=request.seed,
                logprobs=0,  # of the sampled token alone
                detokenize=False,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [self._completion(output.outputs[0]) for output in outputs]

    def _completion(self, output) -> Completion:
        tokens = list(output.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)]
        assert output.finish_reason in ("stop", "length"), output.finish_reason
        return Completion(tokens, logprobs, output.finish_reason, self._version)

    def sync_weights(self, source: WeightSource, version: int) -> None:
        """Load the weights of `source` in place."""
        if self._asleep and self._can_sleep:
            self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc("load_shared", args=(source.path,))
        # Cached prefixes hold keys and values of the old weights.
        assert self._llm.reset_prefix_cache(), "the prefix cache is in use"
        self._version = version

    def set_version(self, version: int) -> None:
        self._version = version

    def sleep(self) -> None:
        """Give back the GPU memory of KV cache and weights; the weights wait in host memory."""
        if not self._asleep and self._can_sleep:
            self._llm.sleep(level=1)
        self._asleep = True

    def wake(self) -> None:
        """Take the memory again."""
        if self._asleep and self._can_sleep:
            self._llm.wake_up()
        self._asleep = False

    def shutdown(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
