"""Language models: one that is trained (log-probs, update, weights for engines and exports), and frozen ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainer.config.algorithm import TEACHER_TOP
from trainer.errors import LogprobMismatchError
from trainer.files.shared_memory import SharedDirectory, check_free_space
from trainer.models import export_weights
from trainer.models.logprobs import Distributions, distributions, token_scores
from trainer.models.online_softmax import LikeliestTokens
from trainer.models.weight_deltas import WeightsDigest
from trainer.objectives.base import LossResult, Outputs
from trainer.parallel.batching import MicroBatch, RankUpdate
from trainer.parallel.load_balancing import MiniBatch, Share, has_old_logprobs
from trainer.parallel.shard import param_dtype, reshard
from trainer.workers.base import ModelWorker, TrainedWorker, stack_rows

_COLD = 2.0**-20
"""At this temperature the likeliest token has all of the probability. A power of two rounds no logit."""

_DIFFERENCE, _COMPARED = "logprob_difference", "compared_tokens"
"""Sums over a mini-batch: of the differences to the engine's log-probs, and of the tokens that have them."""
_JUMP, _ROUNDING = 100.0, 0.01
"""A mean difference is refused below the limit, too, if it is so many times the largest one before. What is below this
share of the limit is never refused."""


class PolicyWorker(TrainedWorker):
    """A language model and its optimizer: the policy."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.teacher: FrozenWorker | None = None
        self._shared: SharedDirectory | None = None
        self._fresh: list[tuple[list[int], np.ndarray]] = []  # rows and old log-probs that the update has computed
        self._entropy: dict[int, np.ndarray] = {}  # of the tokens of each row, for people
        self._keeps_entropy = False  # in the current step
        self._step, self._is_first = 0, False  # the next optimizer step is the first one of `_step`
        cfg = self.objective.cfg
        dtypes = {param_dtype(dtype, self.device) for dtype in (cfg.rollout.dtype, self.spec.sharding.param_dtype)}
        dtype = "float32" if dtypes == {torch.float32} else "bfloat16"
        compares = cfg.task.generates and self.objective.temperature == cfg.rollout.temperature
        self._logprob_limit = cfg.rollout.logprob_limit(dtype, self.device) if compares else None
        self._largest_difference: float | None = None  # of the means of earlier steps; None: there is none

    def outputs(self, mb: MicroBatch, mini_batch: MiniBatch) -> Outputs:
        needed, settings = self.objective.entropy(mb), self.objective.divergence
        scored, teacher = mb.arrays.get("sampled", mb["mask"]), None
        if settings is not None and self.teacher is not None:
            teacher = self.teacher.distributions(mb, scored)
        elif settings is not None:
            where = mb.packing.has_previous & (scored > 0)
            arrays = (mb[f"{TEACHER_TOP}_{name}"][where] for name in ("ids", "logprobs"))
            teacher = LikeliestTokens(*arrays, settings)
        if needed is None and settings is None:
            scored = mb.arrays.get("mask")
        given = self.module, mb.input_ids, mb.packing, self.objective.temperature, scored
        logprobs, entropy, divergence = token_scores(*given, needed, teacher)
        if self.objective.reads_old_logprobs and not mini_batch.has_old_logprobs:
            mb.arrays["old_logprobs"] = logprobs.detach()
            if mb.rows and self.layout.is_first_of_dp_rank:
                self._fresh.append((mb["row"].tolist(), logprobs.detach().float().cpu().numpy()))
        if self._keeps_entropy and entropy is not None and mb.rows and "row" in mb:
            for row, values in zip(mb["row"].tolist(), entropy.detach().float().cpu().numpy(), strict=True):
                self._entropy.setdefault(row, values)  # of the first epoch
        return Outputs(logprobs=logprobs, entropy=entropy, divergence=divergence)

    def read(self, teacher: FrozenWorker) -> None:
        """Let updates read the distributions of a teacher over the vocabulary. Not a collective."""
        self.teacher = teacher
        self.max_tokens = min(self.max_tokens, teacher.max_tokens)
        self.shares_prompts &= teacher.shares_prompts

    def update(self, share: Share, step: int, totals: Sequence[Any], numbers: Mapping[str, float]) -> RankUpdate:
        """Make all optimizer steps of one step of the loop (see `TrainedWorker.update`).

        If the objective reads old log-probs, the first optimizer step does not need them: they are the log-probs of its
        own forward pass, which are then returned.

        Args:
            share: besides, if they exist, `old_logprobs` and `sampled` (1: the returned log-probs hold this token; else
                `mask`): `(n, T)`; and, if only some rows have old log-probs, `has_old_logprobs` `(n,)`.
        """
        self._step, self._is_first = step, True
        if not self.objective.reads_old_logprobs:
            return super().update(share, step, totals, numbers)
        if not all(mini_batch.has_old_logprobs for mini_batch in share.mini_batches[1:]):
            raise ValueError("optimizer steps after the first need the old log-probs of their rows")
        self._fresh, self._entropy = [], {}
        self._keeps_entropy = self.layout.is_first_of_dp_rank and self.objective.cfg.logger.keeps_rollouts(step)
        batch = {**share.batch, "has_old_logprobs": has_old_logprobs(share.batch), "row": share.rows}
        update = super().update(dataclasses.replace(share, batch=batch), step, totals, numbers)
        if self.teacher is not None:
            reshard(self.teacher.module)
        rows, logprobs = stack_rows(self._fresh)
        entropy = stack_rows([([row], values[None]) for row, values in self._entropy.items()])
        self._fresh, self._entropy = [], {}
        return dataclasses.replace(update, rows=rows, logprobs=logprobs, entropy=entropy)

    def _loss(self, mb: MicroBatch, mini_batch: MiniBatch, totals: Any, numbers: Mapping[str, float]) -> LossResult:
        outputs = self.outputs(mb, mini_batch)
        loss, metrics = self.objective.loss(self.role, outputs, mb, totals, numbers)
        if not self._is_first or self._logprob_limit is None or "rollout_logprobs" not in mb:
            return loss, metrics
        assert outputs.logprobs is not None
        mask = mb.arrays.get("sampled", mb["mask"])
        if "is_stale" in mb:  # other weights sampled them
            mask = mask * ~mb["is_stale"][:, None].bool()
        difference = (outputs.logprobs.detach() - mb["rollout_logprobs"]).abs() * (mask > 0)
        return loss, metrics | {_DIFFERENCE: difference.sum(), _COMPARED: (mask > 0).sum()}

    def check_sums(self, sums: dict[str, float]) -> None:
        """Compare the log-probs of engines and ranks in the first optimizer step, whose weights sampled the tokens.
        Raises LogprobMismatchError: they differ by more than `rollout.max_logprob_diff`, or by far more than in all
        steps before; the weights have not changed."""
        self._is_first = False
        difference, tokens, limit = sums.pop(_DIFFERENCE, 0.0), sums.pop(_COMPARED, 0.0), self._logprob_limit
        if limit is None or tokens == 0:
            return
        mean, earlier = difference / tokens, self._largest_difference
        allowed = limit if earlier is None else min(limit, max(_JUMP * earlier, _ROUNDING * limit))
        if mean <= allowed:
            self._largest_difference = max(mean, earlier or 0.0)
            return
        self.optimizers.zero_grad()
        before = "" if earlier is None or mean > limit else f" after at most {earlier:.2g} in earlier steps"
        raise LogprobMismatchError(
            f"rollout.max_logprob_diff: the log-probs of engines and ranks for the same weights differ by {mean:.2g} "
            f"nats per token in step {self._step}{before}, and at most {allowed:.2g} is rounding, so one of them "
            "computes another model and the step was not trained on; likely causes are rows that see each other in "
            "packed batches (try trainer.pack=false), weights or buffers that were not loaded or not synced (experts "
            "after a sync), dropout, or attention that the engine computes in another way (try the other one of "
            "rollout=transformers and rollout=vllm); a larger value, or null for no limit, lets the run continue"
        )

    def _state(self, kinds: set[str], with_rng: bool) -> dict[str, Any]:
        state = super()._state(kinds, with_rng)
        if "weights" in kinds:
            numbers = (self._largest_difference, self._logprob_limit)
            state[_DIFFERENCE] = torch.tensor([-1.0 if n is None else n for n in numbers], dtype=torch.float64)
        return state

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        if _DIFFERENCE in state:
            largest, limit = state[_DIFFERENCE].tolist()
            is_known = largest >= 0 and limit == self._logprob_limit  # else another engine or dtype computes now
            self._largest_difference = largest if is_known else None

    def is_likeliest(self, share: Share) -> tuple[np.ndarray, np.ndarray]:
        """Return 1 for each token that is the likeliest one after those before it, of this rank's rows of a batch. It
        is 1, too, where the mask is 0 (see `ModelWorker.map_rows`). If two tokens are equally likely, it is 0."""
        return self.map_rows(share, lambda mb: (self.token_logprobs(mb, _COLD) > math.log(0.6)).float())

    # ---------------------------------------------------------------------------------------------------
    # Weights for engines

    def send_weights(self, sender: Any, dtype: str) -> Any:
        """Pass the weights and this rank's number to `sender` (see `trainer.generation.weight_sync`)."""
        return sender.send(self.stream_weights(dtype), self.layout.rank)

    @torch.no_grad()
    def keep_shards(self, keeper: Any, dtype: str) -> Any:
        """Pass this rank's blocks of the weights to `keeper` (see `trainer.generation.weight_shards`)."""
        return keeper.keep(*export_weights.own_blocks(self.module, param_dtype(dtype, self.device)), self.layout.rank)

    @torch.no_grad()
    def stream_weights(self, dtype: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the model's files, full tensor) one by one; each `next` may gather a tensor from all ranks."""
        yield from export_weights.stream_tensors(self.module, param_dtype(dtype, self.device))

    def weight_bytes(self, dtype: str) -> int:
        """Return the size in bytes of the files that `write_weights` writes. Not a collective."""
        return export_weights.file_bytes(self.module, param_dtype(dtype, self.device))

    def check_shared(self, dtype: str, reserved: int) -> None:
        check_free_space(self.weight_bytes(dtype), reserved)

    def write_shared(self, directory: str, dtype: str) -> int:
        """Write the weights as `write_weights` does; return this rank's part of their `WeightsDigest`."""
        self.write_weights(directory, dtype)
        digest = WeightsDigest()
        digest.add_files(directory, self.layout.rank, math.prod(self.layout.sizes.values()))
        return digest.total

    def open_shared(self, dtype: str, reserved: int) -> str:
        """Make a directory in this machine's shared memory for the weights; returns its path. Not a collective."""
        self.close_shared()
        self.check_shared(dtype, reserved)
        self._shared = SharedDirectory()
        return self._shared.path

    def close_shared(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None


class FrozenWorker(ModelWorker):
    """A model that is not trained: a reference, a teacher, a reward model. `sync_from_policy` copies the weights of
    `policy`. If `module` is the policy, its weights without the adapters are this model."""

    def __init__(self, *arguments: Any, policy: nn.Module | None = None):
        super().__init__(*arguments)
        self.policy = policy
        if not self.spec.is_policy_base:
            self.module.requires_grad_(False)
            self.module.eval()

    def distributions(self, mb: MicroBatch, mask: Tensor) -> Distributions:
        """Return the distributions over the vocabulary where `mask` is 1. The head's weight stays gathered."""
        assert self.objective.divergence is not None and isinstance(self.module, FSDPModule)
        self.module.set_reshard_after_forward(False, recurse=False)
        return distributions(self.module, mb.input_ids, mb.packing, mask, self.objective.divergence)

    @torch.no_grad()
    def sync_from_policy(self) -> None:
        """Copy the weights of the policy, adapters merged."""
        assert self.policy is not None and not self.spec.is_policy_base, "the weights of this role never change"
        self.before_weights_change()
        tensors = export_weights.export_tensors(self.module)
        for name, tensor in export_weights.merged_tensors(self.policy):
            tensors[name].copy_(tensor)
