"""The policy: log-probs, the policy update, supervised steps, and its weights for the engines."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.algorithms import POLICY_LOSSES, Totals, aggregate, kl_penalty, resolve
from trainer.config import AlgorithmConfig, chosen_options
from trainer.models.export import export_tensors, write_safetensors
from trainer.models.logprobs import token_logprobs
from trainer.parallel.batching import Batch
from trainer.workers.base import ModelWorker, TrainedWorker


class PolicyWorker(TrainedWorker):
    role = "policy"

    def logprobs(self, batch: Batch, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs of this rank's share of `batch` (see `ModelWorker.map_rows`)."""
        return self.map_rows(batch, lambda mb: token_logprobs(self.module, mb["input_ids"], temperature)[0])

    def update(
        self, batch: Batch, algorithm: AlgorithmConfig, temperature: float, max_tokens: int, kl_coef: float
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch of experience.

        Args:
            batch: `input_ids`, `response_mask`, `old_logprobs`, `advantages` and, with a reference,
                `ref_logprobs`: `(B, T)`; `lengths`: `(B,)`.
            max_tokens: the L of `seq_mean_token_sum_norm`.
            kl_coef: weight of the KL in the loss.

        Returns:
            `loss`, `kl` (to the reference; without one, of the old policy to the new), `clip_frac`,
            `entropy`, `grad_norm`, `lr`.
        """
        totals = Totals.of(torch.from_numpy(np.ascontiguousarray(batch["response_mask"])), max_tokens)

        policy_loss = resolve(POLICY_LOSSES, algorithm.policy_loss, "algorithm.policy_loss")
        options = chosen_options(policy_loss, algorithm)

        def loss_function(mb: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            mask = mb["response_mask"]
            logprobs, entropy = token_logprobs(
                self.module, mb["input_ids"], temperature, entropy_grad=algorithm.entropy_coef > 0
            )
            loss, metrics = policy_loss(
                logprobs, mb["old_logprobs"], mb["advantages"], mask,
                aggregation=algorithm.aggregation, totals=totals, **options,
            )  # fmt: skip
            kl_mean = metrics.pop("approx_kl")
            if "ref_logprobs" in mb:
                kl = kl_penalty(logprobs, mb["ref_logprobs"], algorithm.kl_estimator)
                kl_mean = aggregate(kl.detach(), mask, "token_mean", totals)
                if algorithm.kl_in == "loss":
                    loss = loss + kl_coef * aggregate(kl, mask, algorithm.aggregation, totals)
            if algorithm.entropy_coef > 0:
                loss = loss - algorithm.entropy_coef * aggregate(entropy, mask, algorithm.aggregation, totals)
            entropy_mean = aggregate(entropy.detach(), mask, "token_mean", totals)
            return loss, {**metrics, "kl": kl_mean, "entropy": entropy_mean}

        return self.optimizer_step(batch, loss_function)

    def supervised_update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step of cross-entropy on packed rows.

        Args:
            batch: `input_ids`, `position_ids`, `loss_mask` (1 = token to be learnt): `(B, T)`.

        Returns:
            `loss` (nats a token), `grad_norm`, `lr`.
        """
        totals = Totals.of(torch.from_numpy(np.ascontiguousarray(batch["loss_mask"])))

        def loss_function(mb: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs, _ = token_logprobs(
                self.module, mb["input_ids"], position_ids=mb["position_ids"], entropy_grad=False
            )
            loss = aggregate(-logprobs, mb["loss_mask"], "token_mean", totals)
            return loss, {}

        return self.optimizer_step(batch, loss_function)

    def write_weights(self, directory: str, dtype: torch.dtype) -> list[str]:
        """Write the weights as safetensors; each rank its own rows. Returns the file names."""
        return write_safetensors(self.module, directory, dtype)

    @torch.no_grad()
    def stream_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) one by one; each `next` gathers one tensor from all ranks."""
        for name, tensor in export_tensors(self.module).items():
            if tensor.dtype.is_floating_point:
                tensor = tensor.to(dtype)  # before gathering: half the traffic in bfloat16
            if isinstance(tensor, DTensor):
                tensor = tensor.to(self.device).full_tensor()  # offloaded shards come back for the gather
            yield name, tensor


class ReferenceWorker(ModelWorker):
    """The start policy, frozen."""

    role = "reference"

    def __init__(self, module: torch.nn.Module, mesh, max_tokens_per_micro_batch: int):
        super().__init__(module, mesh, max_tokens_per_micro_batch)
        self.module.requires_grad_(False)
        self.module.eval()

    def logprobs(self, batch: Batch, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs of this rank's share of `batch` (see `ModelWorker.map_rows`)."""
        return self.map_rows(batch, lambda mb: token_logprobs(self.module, mb["input_ids"], temperature)[0])
