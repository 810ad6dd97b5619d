"""The policy (log-probs, update, weights for engines and exports) and the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.algorithms import POLICY_LOSSES, Totals, aggregate, kl_penalty, resolve
from trainer.config import LOSS, Config, RoleSpec, aggregation_of, chosen_options
from trainer.files.shared_memory import SharedDirectory, check_room
from trainer.models.export_sharded import export_tensors, merged_tensors, plan_layout, write_safetensors
from trainer.models.logprobs import logprobs_and_entropy, token_logprobs
from trainer.models.lora import adapted_modules, adapter_config, adapter_tensors, adapters_off
from trainer.parallel.batching import Batch, MicroBatch, mini_batches
from trainer.parallel.layout import Layout
from trainer.parallel.shard import param_dtype
from trainer.workers.base import ModelWorker, TrainedWorker, stack_rows

_COLD = 2.0**-20
"""At this temperature the likeliest token has all of the probability. A power of two rounds no logit."""


class WeightSender(Protocol):
    """Sends weights from the ranks to the engines when they do not go through shared memory."""

    def send(self, weights: Any, rank: int) -> Any: ...


@dataclass(frozen=True)
class PolicyUpdate:
    """The result of the update of one step."""

    metrics: dict[str, float]
    """Means over the mini-batches (see `TrainedWorker.train`)."""
    rows: np.ndarray
    """`(n,)`: the rows of the batch whose old log-probs this rank computed; empty if the batch had them all."""
    logprobs: np.ndarray
    """`(n, T)`: the old log-probs of these rows, zero-padded."""
    tokens: int
    """Number of tokens that this rank computed; those that rows share count once in a micro-batch."""


class PolicyWorker(TrainedWorker):
    """The policy and its optimizer.

    Args:
        cfg: the worker reads `algorithm`, `rollout.temperature`, `rollout.max_response_tokens` and `trainer`.
    """

    def __init__(
        self,
        spec: RoleSpec,
        module: nn.Module,
        layout: Layout,
        cfg: Config,
        before_weights_change: Callable[[], None],
    ):
        super().__init__(spec, module, layout, cfg.trainer, before_weights_change)
        self.algorithm = cfg.algorithm
        self.temperature = cfg.rollout.temperature
        self.max_response_tokens = cfg.rollout.max_response_tokens
        self._shared: SharedDirectory | None = None

    def logprobs(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probs of this rank's share of `batch` (see `ModelWorker.map_rows`)."""
        return self.map_rows(batch, self._logprobs)

    def _logprobs(self, mb: MicroBatch) -> Tensor:
        return _token_logprobs(self.module, mb, self.temperature)

    def update(self, batch: Batch, step: int, kl_coef: float | None = None) -> PolicyUpdate:
        """Make all optimizer steps of one step of the loop.

        The first optimizer step does not need old log-probs: they are the log-probs of its own forward pass, which are
        then returned.

        Args:
            batch: `input_ids`, `mask`, `advantages` and, if they exist, `old_logprobs`, `ref_logprobs`,
                `rollout_logprobs` and `sampled` (1: the returned log-probs hold this token; else `mask`): `(B, T)`;
                `lengths`, `group_ids` and, if only some rows have old log-probs, `has_old_logprobs`: `(B,)`.
            kl_coef: weight of the KL in the loss; None: the weight in the config.

        Returns:
            the metrics `loss`, `grad_norm`, `lr` and, if the batch was sampled (`rollout_logprobs`), `kl` (to the
            reference; without a reference, of the old policy to the new), `clip_frac` and `entropy`.
        """
        coef = self.algorithm.kl_coef if kl_coef is None else kl_coef
        size = len(batch["lengths"])
        known = batch.get("has_old_logprobs", np.full(size, "old_logprobs" in batch))
        first, *others = mini_batches(batch["group_ids"], self.config, step)
        if not all(known[rows].all() for rows in others) or known[first].any() != known[first].all():
            raise ValueError("optimizer steps after the first need the old log-probs of their rows")
        batch = {**batch, "has_old_logprobs": known, "row": np.arange(size)}
        fresh: list[tuple[list[int], np.ndarray]] = []
        before = self.tokens_computed
        metrics = self.train(batch, step, lambda mini_batch: self._update_mini_batch(mini_batch, coef, fresh))
        rows, logprobs = stack_rows(fresh, batch["input_ids"].shape[1])
        return PolicyUpdate(metrics, rows, logprobs, self.tokens_computed - before)

    def _update_mini_batch(
        self, batch: Batch, kl_coef: float, fresh: list[tuple[list[int], np.ndarray]]
    ) -> dict[str, float]:
        """Make one optimizer step. Old log-probs that it computes itself are appended to `fresh`, with their rows."""
        algorithm = self.algorithm
        if not batch["has_old_logprobs"].all():
            batch = {name: array for name, array in batch.items() if name != "old_logprobs"}
        totals = self._totals(batch)
        policy_loss = resolve(POLICY_LOSSES, algorithm.policy_loss, "algorithm.policy_loss")
        aggregation = aggregation_of(policy_loss, algorithm)
        options = chosen_options(policy_loss, algorithm, LOSS) | {"aggregation": aggregation, "totals": totals}
        sampled, has_bonus = "rollout_logprobs" in batch, algorithm.entropy_coef > 0

        def loss_function(mb: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            mask, entropy = mb["mask"], None
            scored = mb.arrays.get("sampled", mask)
            if sampled or has_bonus:
                logprobs, entropy = logprobs_and_entropy(
                    self.module, mb.input_ids, mb.packing, self.temperature, scored, entropy_grad=has_bonus
                )
            else:
                logprobs = self._logprobs(mb)
            old = mb["old_logprobs"] if "old_logprobs" in mb else logprobs.detach()
            if "old_logprobs" not in mb and mb.rows and self.layout.reports_share:
                fresh.append((mb["row"].tolist(), old.float().cpu().numpy()))
            loss, metrics = policy_loss(logprobs, old, mb["advantages"], mask, **options)
            metrics["kl"] = metrics.pop("approx_kl")
            if "ref_logprobs" in mb:
                kl = kl_penalty(logprobs, mb["ref_logprobs"], algorithm.kl_estimator, mask)
                metrics["kl"] = aggregate(kl.detach(), mask, "token_mean", totals)
                if algorithm.kl_in == "loss":
                    loss = loss + kl_coef * aggregate(kl, mask, aggregation, totals)
            if entropy is not None:
                metrics["entropy"] = aggregate(entropy.detach(), mask, "token_mean", totals)
                if has_bonus:
                    loss = loss - algorithm.entropy_coef * aggregate(entropy, mask, aggregation, totals)
            return loss, metrics if sampled else {}

        return self.optimizer_step(batch, loss_function)

    @torch.no_grad()
    def loss(self, batch: Batch) -> float:
        """Return the cross-entropy (nats per token) of the tokens whose mask is 1, for held-out data."""
        totals = self._totals(batch)
        share = 0.0
        for take in self.micro_batches(batch):
            mb = take()
            share += float(aggregate(-self._logprobs(mb), mb["mask"], "token_mean", totals))
        return self.layout.sum_over_data({"loss": share})["loss"]

    def is_likeliest(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return 1 for each token that is the likeliest one after those before it, of this rank's share of `batch`.

        It is 1, too, where the mask is 0 (see `ModelWorker.map_rows`). If two tokens are equally likely, it is 0.
        """
        return self.map_rows(batch, lambda mb: (_token_logprobs(self.module, mb, _COLD) > math.log(0.6)).float())

    def _totals(self, batch: Batch) -> Totals:
        return Totals.of(torch.from_numpy(np.ascontiguousarray(batch["mask"])), self.max_response_tokens)

    def num_parameters(self) -> tuple[int, int]:
        """Return the number of parameters, and the number of trained parameters. Not a collective."""
        parameters = list(self.module.parameters())
        return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)

    # ---------------------------------------------------------------------------------------------------
    # Weights for engines and exports

    def write_weights(self, directory: str, dtype: str) -> list[str]:
        """Write the weights as safetensors, adapters merged; returns the file names. Each rank writes its own rows.

        Args:
            dtype: dtype of the weights (see `RolloutConfig.dtype`).
        """
        return write_safetensors(self.module, directory, param_dtype(dtype, self.device))

    def send_weights(self, sender: WeightSender, dtype: str) -> Any:
        """Pass the tensors, one by one, to `sender`."""
        return sender.send(self.stream_weights(dtype), self.layout.rank)

    @torch.no_grad()
    def stream_weights(self, dtype: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) one by one; each `next` gathers one tensor from all ranks."""
        for name, tensor in merged_tensors(self.module):
            if tensor.dtype.is_floating_point:
                tensor = tensor.to(
                    param_dtype(dtype, self.device)
                )  # before the gather, to halve the traffic (bfloat16)
            if isinstance(tensor, DTensor):
                tensor = tensor.to(self.device).full_tensor()  # `.to`, because shards may be offloaded
            yield name, tensor

    def weight_bytes(self, dtype: str) -> int:
        """Return the size in bytes of the files that `write_weights` writes. Not a collective."""
        return sum(plan_layout(export_tensors(self.module), param_dtype(dtype, self.device)).sizes.values())

    def check_shared(self, dtype: str, reserved: int) -> None:
        """Check that shared memory has room for the weights as `dtype` (see `check_room`). Not a collective."""
        check_room(self.weight_bytes(dtype), reserved)

    def open_shared(self, dtype: str, reserved: int) -> str:
        """Make a directory in this machine's shared memory for the weights; returns its path. Not a collective."""
        self.close_shared()
        self.check_shared(dtype, reserved)
        self._shared = SharedDirectory()
        return self._shared.path

    def close_shared(self) -> None:
        """Delete the directory that `open_shared` made. Not a collective."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def adapter_config(self, base_model: str) -> str:
        """Return peft's config of the adapters, which names `base_model` as the adapted model. Not a collective."""
        return adapter_config(self.spec.lora, adapted_modules(self.module), base_model)

    def adapter_weights(self) -> bytes | None:
        """Return the adapters as a safetensors file on the rank that reports, and None on the others."""
        from safetensors.torch import save

        tensors = adapter_tensors(self.module)
        return save(tensors, metadata={"format": "pt"}) if self.layout.reports else None


class FrozenWorker(ModelWorker):
    """A language model that is not trained: a reference, a teacher.

    Args:
        policy: the policy whose weights `sync_from_policy` copies; None: the policy is in other processes. If `module`
            is the policy, its weights without the adapters are this model.
    """

    def __init__(
        self,
        spec: RoleSpec,
        module: nn.Module,
        layout: Layout,
        cfg: Config,
        before_weights_change: Callable[[], None],
        policy: nn.Module | None = None,
    ):
        super().__init__(spec, module, layout, cfg.trainer, before_weights_change)
        self.temperature = cfg.rollout.temperature
        self.policy = policy
        if not spec.is_policy_base:
            self.module.requires_grad_(False)
            self.module.eval()

    def logprobs(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probs of this rank's share of `batch` (see `ModelWorker.map_rows`)."""
        with adapters_off(self.module) if self.spec.is_policy_base else nullcontext():
            return self.map_rows(batch, lambda mb: _token_logprobs(self.module, mb, self.temperature))

    @torch.no_grad()
    def sync_from_policy(self) -> None:
        """Copy the weights of the policy, adapters merged."""
        assert self.policy is not None and not self.spec.is_policy_base, "the weights of this role never change"
        self.before_weights_change()
        tensors = export_tensors(self.module)
        for name, tensor in merged_tensors(self.policy):
            tensors[name].copy_(tensor)


def _token_logprobs(module: nn.Module, mb: MicroBatch, temperature: float) -> Tensor:
    return token_logprobs(module, mb.input_ids, mb.packing, temperature, mb.arrays.get("mask"))
