"""The base classes of policy, critic and reference: a sharded module, its optimizer, its state."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from trainer.config import FSDPConfig, RoleSpec
from trainer.errors import NonFiniteError, UserError
from trainer.files.documents import is_count, parse_object
from trainer.models.attention import can_pack, can_share_prefixes, quadratic_cost
from trainer.models.export_weights import write_safetensors
from trainer.models.logprobs import token_logprobs
from trainer.models.lora import adapter_config, adapter_tensors, disabled_adapters
from trainer.objectives.base import GROUP, LossResult, Objective, Outputs
from trainer.parallel.batching import MicroBatch, RankUpdate, take_rows
from trainer.parallel.load_balancing import Limits, MiniBatch, Share
from trainer.parallel.mesh import Layout
from trainer.parallel.rng import capture_rng, restore_rng
from trainer.parallel.shard import frees_after_forward, param_dtype, reshard
from trainer.process.failpoints import failpoint
from trainer.process.tracing import TRACER
from trainer.workers.optimizers import Optimizers

STATE = ("weights", "optimizer", "rng")
SHARDING_FILE = "fsdp_config.json"


class ModelWorker:
    """A sharded module and its checkpoint state. Every method is a collective over the mesh. `before_weights_change` is
    called before weights or optimizer state change, because a save may still copy them."""

    def __init__(
        self,
        spec: RoleSpec,
        module: nn.Module,
        layout: Layout,
        objective: Objective,
        before_weights_change: Callable[[], None],
    ):
        config = objective.cfg.trainer
        self.spec = spec
        self.role = spec.name
        self.objective = objective
        self.module = module
        self.layout = layout
        self.config = config
        self.device = layout.device
        tokens = config.max_tokens_per_micro_batch * layout.sizes["cp"]
        self.max_tokens = tokens if can_pack(module) else 1  # 1: one sequence per micro-batch
        self.shares_prompts = can_share_prefixes(module)
        self.quadratic = quadratic_cost(module)
        self.before_weights_change = before_weights_change
        # The state of the generators. Ranks with the same rows draw the same, and DCP keeps one copy.
        self._rng = f"rng_rank{layout.dp_rank}"

    def limits(self) -> tuple[int, Limits]:
        """Return the index of this rank's share of a batch, and what decides its micro-batches. Not a collective."""
        return self.layout.dp_rank, Limits(self.max_tokens, self.quadratic, self.shares_prompts)

    def micro_batches(self, share: Share, mini_batch: MiniBatch) -> Iterator[MicroBatch]:
        """Make each micro-batch of this rank when it is asked for. Every rank has the same number of them."""
        for rows in mini_batch.micro_batches:
            yield take_rows(share.batch, rows, self.device, self.layout.cp, mini_batch.shared)

    @torch.no_grad()
    def map_rows(self, share: Share, function: Callable[[MicroBatch], Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """Apply `function` (a micro-batch to `(b, t)` values) to the rows of a batch.

        Returns the numbers `(n,)` of the rows and their values `(n, T)`, zero-padded to the longest of them. The rows
        of all ranks together are the whole batch; of the ranks with the same rows, the first returns it.
        """
        results = []
        for mini_batch in share.mini_batches:
            for micro_batch in self.micro_batches(share, mini_batch):
                values = function(micro_batch)
                if micro_batch.rows and self.layout.is_first_of_dp_rank:
                    results.append((share.rows[micro_batch.rows], values.float().cpu().numpy()))
        reshard(self.module)
        return stack_rows(results)

    def num_parameters(self) -> tuple[int, int]:
        """Return the number of parameters, and the number of trained parameters. Not a collective."""
        parameters = list(self.module.parameters())
        return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)

    def logprobs(self, share: Share) -> tuple[np.ndarray, np.ndarray]:
        with disabled_adapters(self.module) if self.spec.is_policy_base else nullcontext():
            return self.map_rows(share, lambda mb: self.token_logprobs(mb, self.objective.temperature))

    def token_logprobs(self, mb: MicroBatch, temperature: float) -> Tensor:
        return token_logprobs(self.module, mb.input_ids, mb.packing, temperature, mb.arrays.get("mask"))

    def values(self, share: Share) -> tuple[np.ndarray, np.ndarray]:
        return self.map_rows(share, lambda mb: self.module(mb.input_ids, mb.packing))

    def weight_tensors(self) -> list[Tensor]:
        reshard(self.module)
        return [parameter for parameter in self.module.parameters() if parameter.device.type == self.device]

    # ---------------------------------------------------------------------------------------------------
    # State

    def state(self) -> dict[str, Any]:
        """Return this rank's checkpoint state: its shards (not copies), the RNG and, if it is trained, the optimizer.
        With LoRA the state has only the adapters; a resume reads the adapted weights from the model again."""
        return self._state(set(STATE), with_rng=True)

    def sharding(self) -> str:
        return json.dumps({"fsdp_version": 2, **self.layout.describe()}, indent=2)

    def load(self, files: Any, kinds: Collection[str] = STATE) -> None:
        """Restore these `kinds` (`weights`, `optimizer` with its schedule, `rng`) of the role on any number of
        ranks."""
        try:
            dp_size = parse_object(files.read_json(self.role, SHARDING_FILE), {"dp_size": is_count})["dp_size"]
        except (OSError, ValueError) as error:
            raise UserError(f"{self.role}/{SHARDING_FILE} of the checkpoint cannot be read ({error})") from error
        # A data-parallel rank that did not exist at the save keeps its start RNG, which is keyed by its index.
        state = self._state(set(kinds), with_rng="rng" in kinds and self.layout.dp_rank < dp_size)
        self.before_weights_change()  # reading fills the tensors in place
        # A checkpoint of CPU ranks has no state of a CUDA generator, which then keeps its start state.
        files.read(self.role, state, optional=(f"{self._rng}.cuda",))
        self._restore(state)

    def _state(self, kinds: set[str], with_rng: bool) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if "weights" in kinds:
            state["model"] = get_model_state_dict(self.module)
            if self.has_frozen_weights:  # the other parameters are frozen
                trained = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
                state["model"] = {name: tensor for name, tensor in state["model"].items() if name in trained}
        if with_rng:
            state[self._rng] = capture_rng()
        return state

    def _restore(self, state: dict[str, Any]) -> None:
        rng = state.get(self._rng)
        if rng is not None:
            restore_rng(rng)

    @property
    def has_frozen_weights(self) -> bool:
        """Whether some weights are trained and some are frozen, as with adapters."""
        return len({parameter.requires_grad for parameter in self.module.parameters()}) > 1


def stack_rows(results: Sequence[tuple[Sequence[int] | np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows `(n,)` of some micro-batches and their values `(n, T)`, zero-padded to the longest."""
    rows = [row for picked, _ in results for row in picked]
    width = max((values.shape[1] for _, values in results), default=0)
    padded = [np.pad(values, ((0, 0), (0, width - values.shape[1]))) for _, values in results]
    stacked = np.concatenate(padded) if padded else np.zeros((0, 0), np.float32)
    return np.asarray(rows, dtype=np.int64), stacked


class Shares:
    """Loss and metrics of micro-batches, added up over a batch (`extremes`: see `Objective.extremes`)."""

    def __init__(self, extremes: Mapping[str, str]):
        self._extremes = extremes
        self._sums: dict[str, Tensor] = {}
        self._largest = dict.fromkeys(extremes, -math.inf)

    def add(self, loss: Tensor, metrics: Mapping[str, Tensor], has_rows: bool) -> Tensor:
        """Add a micro-batch; returns its loss, which is 0 if its row stands for none."""
        loss = loss if has_rows else 0 * loss
        for name, value in {"loss": loss, **metrics}.items():
            if name not in self._extremes:
                value = value if has_rows or name == "loss" else 0 * value
                self._sums[name] = self._sums.get(name, 0.0) + value.detach().double()
            elif has_rows:
                sign = 1 if self._extremes[name] == "max" else -1
                self._largest[name] = max(self._largest[name], sign * float(value))
        return loss

    def total(self, layout: Layout) -> dict[str, float]:
        """Return the numbers over all ranks. A collective."""
        found = layout.sum_over_data({name: float(value) for name, value in self._sums.items()})
        largest = layout.max_over_data(self._largest) if self._extremes else {}
        return found | {name: value if self._extremes[name] == "max" else -value for name, value in largest.items()}


def _means(metrics: Sequence[Mapping[str, float]], tokens: Sequence[float]) -> dict[str, float]:
    """Return the means of the metrics of mini-batches with these numbers of tokens. `kl` is the mean over the tokens,
    and is missing if there are none; `lr` is the last value."""
    means = {name: float(np.mean([m[name] for m in metrics])) for name in metrics[0]}
    if "kl" in means:  # a controller reads the KL, so tokens that the losses leave out must not count as 0
        means.pop("kl")
        if any(tokens):
            means["kl"] = float(np.average([m["kl"] for m in metrics], weights=tokens))
    return {**means, "lr": metrics[-1]["lr"]}


class TrainedWorker(ModelWorker):
    """A sharded module with its optimizer, schedule and checkpoint state. Its arguments are those of `ModelWorker`."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        spec, module, layout, objective = self.spec, self.module, self.layout, self.objective
        if objective.unit == GROUP and not can_pack(module):
            raise UserError(
                f"{spec.path_key}: the {spec.name}, a {type(module).__name__}, takes one sequence at a time, and the "
                "loss needs the rows of a group together; choose another model or loss, or set trainer.pack=true"
            )
        optimizer = spec.optimizer
        assert optimizer is not None and isinstance(spec.sharding, FSDPConfig), "the role is trained"
        shards = layout.fsdp_mesh.size(layout.fsdp_mesh.ndim - 1)
        self.frees_each_micro_batch = frees_after_forward(spec.sharding, layout.device, shards, spec.trained_whole)
        self.optimizer_config = optimizer
        self.tokens_computed = 0  # by this rank, for the updates of the policy or critic
        self.optimizers = Optimizers(module, optimizer, objective.scheduled_steps(spec), layout.fsdp_mesh)

    def outputs(self, mb: MicroBatch, mini_batch: MiniBatch) -> Outputs:
        raise NotImplementedError

    def update(self, share: Share, step: int, totals: Sequence[Any], numbers: Mapping[str, float]) -> RankUpdate:
        """Make all optimizer steps of a step, with the `Objective.totals` of each mini-batch and `numbers`."""
        before = self.tokens_computed
        metrics = []
        for mini_batch, of_all in zip(share.mini_batches, totals, strict=True):
            with TRACER.span("mini-batch", rows=sum(map(len, mini_batch.micro_batches))):
                metrics.append(self.optimizer_step(share, mini_batch, of_all, numbers))
        rows, logprobs = stack_rows([])
        tokens = [mini_batch.tokens for mini_batch in share.mini_batches]
        return RankUpdate(_means(metrics, tokens), rows, logprobs, self.tokens_computed - before)

    def _loss(self, mb: MicroBatch, mini_batch: MiniBatch, totals: Any, numbers: Mapping[str, float]) -> LossResult:
        return self.objective.loss(self.role, self.outputs(mb, mini_batch), mb, totals, numbers)

    def optimizer_step(
        self, share: Share, mini_batch: MiniBatch, totals: Any, numbers: Mapping[str, float]
    ) -> dict[str, float]:
        """Make one optimizer step on a mini-batch, whose gradients are summed over the ranks after each micro-batch.
        Return loss and metrics over the global mini-batch, `grad_norm` and `lr`. Raises NonFiniteError: the loss or the
        gradient norm is NaN or infinite; the weights have not changed."""
        shares = Shares(self.objective.extremes)
        for i, micro_batch in enumerate(self.micro_batches(share, mini_batch), 1):
            last = i == len(mini_batch.micro_batches)
            self.module.set_is_last_backward(last)
            self.module.set_reshard_after_backward(last or self.frees_each_micro_batch)
            if micro_batch.rows and self.layout.is_first_of_dp_rank:
                self.tokens_computed += micro_batch.packing.tokens
            loss = shares.add(*self._loss(micro_batch, mini_batch, totals, numbers), has_rows=bool(micro_batch.rows))
            self.layout.scale_loss(loss).backward()
        sums = shares.total(self.layout)
        self.check_sums(sums)
        grad_norm = self.layout.clip_grad_norm(self.module.parameters(), self.optimizer_config.max_grad_norm)
        for name, value in (("loss", sums["loss"]), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                self.optimizers.zero_grad()
                raise NonFiniteError(f"the {self.role}'s {name} is {value}")
        self.before_weights_change()
        with TRACER.span("optimizer"):
            lr = self.optimizers.step()
        failpoint("updating")
        return {**sums, "grad_norm": grad_norm, "lr": lr}

    @torch.no_grad()
    def evaluate(self, share: Share, totals: Any, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the objective's loss and metrics over a batch of held-out rows (see `Objective.loss`)."""
        shares = Shares(self.objective.extremes)
        for mini_batch in share.mini_batches:
            for mb in self.micro_batches(share, mini_batch):
                result = self.objective.loss(self.role, self.outputs(mb, mini_batch), mb, totals, numbers)
                shares.add(*result, has_rows=bool(mb.rows))
        reshard(self.module)
        return shares.total(self.layout)

    def check_sums(self, sums: dict[str, float]) -> None:
        """Check sums over a mini-batch before its optimizer step, and remove those that are no metrics."""

    def sharding(self) -> str:
        return json.dumps({**json.loads(super().sharding()), "optimizers": self.optimizers.description()}, indent=2)

    # ---------------------------------------------------------------------------------------------------
    # State

    def load(self, files: Any, kinds: Collection[str] = STATE, steps_added: int = 0) -> None:
        """Restore the state (see `ModelWorker.load`), and move the schedule by `steps_added` optimizer steps."""
        super().load(files, kinds)
        if "optimizer" in kinds:
            self.optimizers.steps += steps_added

    def _state(self, kinds: set[str], with_rng: bool) -> dict[str, Any]:
        state = super()._state(kinds, with_rng)
        if "optimizer" in kinds:
            state["optimizer"] = self.optimizers.state()
            state["optimizer_steps"] = torch.tensor(self.optimizers.steps)
        return state

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        if "optimizer" in state:
            self.optimizers.load(state["optimizer"], int(state["optimizer_steps"]))

    # ---------------------------------------------------------------------------------------------------
    # Weights for exports

    def write_weights(self, directory: str, dtype: str) -> str:
        """Write the weights as safetensors, adapters merged; return their dtype. Each rank writes its own rows."""
        written = param_dtype(dtype, self.device)
        write_safetensors(self.module, directory, written)
        return str(written).removeprefix("torch.")

    def adapter_config(self, base_model: str) -> str:
        """Return peft's config of the adapters, which names `base_model` as the adapted model. Not a collective."""
        return adapter_config(self.module, self.spec.lora, base_model)

    def adapter_weights(self) -> bytes | None:
        """Return the adapters as a safetensors file on the rank that reports, and None on the others."""
        from safetensors.torch import save

        tensors = adapter_tensors(self.module)
        return save(tensors, metadata={"format": "pt"}) if self.layout.is_main_rank else None


class CriticWorker(TrainedWorker):
    """The critic and its optimizer."""

    def outputs(self, mb: MicroBatch, mini_batch: MiniBatch) -> Outputs:
        return Outputs(values=self.module(mb.input_ids, mb.packing))
