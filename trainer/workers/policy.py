"""The policy: log-probs, the policy update, supervised steps, and its weights for the engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.algorithms import POLICY_LOSSES, Totals, aggregate, importance_weighted_ce, kl_penalty, resolve
from trainer.config import AlgorithmConfig, chosen_options
from trainer.models.export_live import export_tensors, merged_tensors, plan_layout, write_safetensors
from trainer.models.logprobs import logprobs_and_entropy, token_logprobs
from trainer.models.lora import adapters_off
from trainer.parallel.batching import Batch, plan_micro_batches, take_rows
from trainer.parallel.mesh import sum_over_ranks
from trainer.workers.base import ModelWorker, TrainedWorker


class PolicyWorker(TrainedWorker):
    role = "policy"

    def logprobs(self, batch: Batch, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs of this rank's share of `batch` (see `ModelWorker.map_rows`)."""
        return self.map_rows(batch, lambda mb: token_logprobs(self.module, mb["input_ids"], temperature))

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
            logprobs, entropy = logprobs_and_entropy(
                self.module, mb["input_ids"], temperature, entropy_grad=algorithm.entropy_coef > 0
            )
            loss, metrics = policy_loss(
                logprobs, mb["old_logprobs"], mb["advantages"], mask,
                aggregation=algorithm.aggregation, totals=totals, **options,
            )  # fmt: skip
            kl_mean = metrics.pop("approx_kl")
            if "ref_logprobs" in mb:
                kl = kl_penalty(logprobs, mb["ref_logprobs"], algorithm.kl_estimator, mask)
                kl_mean = aggregate(kl.detach(), mask, "token_mean", totals)
                if algorithm.kl_in == "loss":
                    loss = loss + kl_coef * aggregate(kl, mask, algorithm.aggregation, totals)
            if algorithm.entropy_coef > 0:
                loss = loss - algorithm.entropy_coef * aggregate(entropy, mask, algorithm.aggregation, totals)
            entropy_mean = aggregate(entropy.detach(), mask, "token_mean", totals)
            return loss, {**metrics, "kl": kl_mean, "entropy": entropy_mean}

        return self.optimizer_step(batch, loss_function)

    def supervised_update(self, batch: Batch, max_weight: float | None = None) -> dict[str, float]:
        """One optimizer step of cross-entropy on packed rows.

        Args:
            batch: `input_ids`, `position_ids`, `loss_mask` (1 = token to be learnt) and, for `max_weight`,
                `old_logprobs` under the policy that sampled: `(B, T)`.
            max_weight: weigh tokens by importance, at most this (`importance_weighted_ce`); None: not.

        Returns:
            `loss` (nats a token), `grad_norm`, `lr` and, with weights, `kl` (of that policy to this one) and
            `clip_frac` (tokens whose weight was cut).
        """
        totals = Totals.of(torch.from_numpy(np.ascontiguousarray(batch["loss_mask"])))

        def loss_function(mb: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs, mask = self._packed_logprobs(mb), mb["loss_mask"]
            if max_weight is None:
                return aggregate(-logprobs, mask, "token_mean", totals), {}
            loss, metrics = importance_weighted_ce(
                logprobs, mb["old_logprobs"], torch.ones_like(logprobs), mask, max_weight=max_weight, totals=totals
            )
            return loss, {"kl": metrics["approx_kl"], "clip_frac": metrics["clip_frac"]}

        return self.optimizer_step(batch, loss_function)

    @torch.no_grad()
    def supervised_loss(self, batch: Batch) -> float:
        """Cross-entropy (nats a token) of packed rows; a collective."""
        totals = Totals.of(torch.from_numpy(np.ascontiguousarray(batch["loss_mask"])))
        plan = plan_micro_batches(batch["lengths"].tolist(), dist.get_world_size(), self.max_tokens)
        share = 0.0
        for rows in plan[dist.get_rank()]:
            mb = take_rows(batch, rows, self.device)
            share += float(aggregate(-self._packed_logprobs(mb), mb["loss_mask"], "token_mean", totals))
        return sum_over_ranks({"loss": share})["loss"]

    def _packed_logprobs(self, mb: dict[str, Tensor]) -> Tensor:
        return token_logprobs(self.module, mb["input_ids"], position_ids=mb["position_ids"])

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the files that `write_weights` writes."""
        return sum(plan_layout(export_tensors(self.module), dtype).sizes.values())

    def write_weights(self, directory: str, dtype: torch.dtype) -> list[str]:
        """Write the weights as safetensors, adapters merged; each rank its own rows. Returns the file names."""
        return write_safetensors(self.module, directory, dtype)

    @torch.no_grad()
    def stream_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) one by one; each `next` gathers one tensor from all ranks."""
        for name, tensor in merged_tensors(self.module):
            if tensor.dtype.is_floating_point:
                tensor = tensor.to(dtype)  # before gathering: half the traffic in bfloat16
            if isinstance(tensor, DTensor):
                tensor = tensor.to(self.device).full_tensor()  # offloaded shards come back for the gather
            yield name, tensor


class ReferenceWorker(ModelWorker):
    """The start policy, frozen, or the policy of a later step (see `refresh`).

    Args:
        of_policy: `module` is the policy's own, and its weights without the adapters are the reference.
    """

    role = "reference"

    def __init__(self, module: nn.Module, mesh: DeviceMesh, max_tokens_per_micro_batch: int, of_policy: bool = False):
        super().__init__(module, mesh, max_tokens_per_micro_batch)
        self.of_policy = of_policy
        if not of_policy:
            self.module.requires_grad_(False)
            self.module.eval()

    def logprobs(self, batch: Batch, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs of this rank's share of `batch` (see `ModelWorker.map_rows`)."""
        with adapters_off(self.module) if self.of_policy else nullcontext():
            return self.map_rows(batch, lambda mb: token_logprobs(self.module, mb["input_ids"], temperature))

    @torch.no_grad()
    def refresh(self, policy: nn.Module) -> None:
        """Take over the weights of `policy`, adapters merged."""
        assert not self.of_policy, "a reference without weights of its own cannot move"
        self.before_weights_change()
        own = export_tensors(self.module)
        for name, tensor in merged_tensors(policy):
            own[name].copy_(tensor)
