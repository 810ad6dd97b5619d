"""The memory of a rank, by phase of a step and by kind: states by arithmetic, activations from traces."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from trainer.config import Config, FSDPConfig, RoleSpec
from trainer.config.axes import weight_shards
from trainer.parallel.ac_and_compile import compiles_blocks
from trainer.parallel.shard import frees_after_forward, prefetch_depth
from trainer.plan.activations import Activations, Row, head_bytes, recomputation_of, trace
from trainer.plan.hardware import CONTEXT_BYTES, FRAGMENTATION, Device
from trainer.plan.model_shape import ModelShape, forward_dtype, shape_of
from trainer.plan.workload import Workload, scored_share

ENGINE_KINDS = ("engine_weights", "kv_cache", "engine_buffers")
"""Kinds of memory of an engine that shares its GPU with a rank. `engine_buffers`: its workspace and its graphs."""
KINDS = (
    *("weights", "optimizer", "gradients", "gathered", "activations", "head", "buffers"),
    *ENGINE_KINDS,
    "reserved",
)
"""Kinds of memory. `gathered`: the blocks that FSDP2 has put together for the computation. `head`: the output layer.
An engine with a GPU of its own has `weights`, `kv_cache` and `buffers`. `reserved`: the context of CUDA, workspaces,
and memory that torch's allocator keeps without using it."""
_MASTER, _MOMENTS = 4, 8
"""Bytes of a trained number, and of its two moments of AdamW."""


@dataclass(frozen=True)
class Phase:
    """What a process holds at the largest moment of a phase."""

    name: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each kind of `KINDS`."""

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    def with_reserve(self, device: Device, processes: int = 1) -> Phase:
        """Return the phase with what the GPU's software takes.

        Args:
            processes: of the GPU.
        """
        if device.is_cpu:
            return self
        tensors = sum(size for kind, size in self.sizes.items() if kind not in ENGINE_KINDS)
        return Phase(self.name, {**self.sizes, "reserved": int(FRAGMENTATION * tensors) + processes * CONTEXT_BYTES})


@dataclass(frozen=True)
class PlannedRole:
    """A role, and what its model takes."""

    spec: RoleSpec
    model: ModelShape
    itemsize: int
    """Bytes of a number in forward and backward passes."""
    shards: int
    """Ranks over which FSDP2 shards the weights."""
    update: Activations | None
    """Of a full micro-batch of an update. None: the role is not trained."""
    scores: Activations
    """Of a full micro-batch without gradients."""
    rows: tuple[Row, Row]
    """Those micro-batches."""
    device: str
    """`cpu` or `cuda`."""
    entropy: str | None
    """What updates compute of entropies (see `Objective.entropy`)."""
    cp: int = 1
    """Ranks that have a slice of each micro-batch."""
    compiled: bool = False
    """Blocks and softmax are compiled."""

    @property
    def fsdp(self) -> FSDPConfig:
        return self.spec.sharding  # type: ignore[return-value]

    @property
    def recomputation(self) -> str:
        """Which activations the backward pass computes again (see `FSDPConfig.activation_checkpointing`)."""
        return recomputation_of(self.spec)

    @property
    def frees_gathered(self) -> bool:
        """What FSDP2 has gathered is freed after a block's pass."""
        return frees_after_forward(self.spec.sharding, self.device, self.shards, self.spec.trained_whole)

    @property
    def is_on_host(self) -> bool:
        """Parameters, gradients and the optimizer's states wait in host memory."""
        return self.spec.sharding.cpu_offload and self.device == "cuda"

    @property
    def state(self) -> tuple[int, int]:
        """Bytes of weights and of the optimizer's states that a rank holds, wherever they are."""
        if self.spec.is_policy_base:
            return 0, 0
        trained = self.model.shard(self.shards, trained=True)
        frozen = self.model.shard(self.shards) - trained
        return _MASTER * trained + self.itemsize * frozen, _MOMENTS * trained

    @property
    def saved(self) -> int:
        """Bytes of what a save copies of this rank's state. With adapters, the weights below them are not saved."""
        if not self.spec.saved:
            return 0
        weights, optimizer = self.state
        trained = _MASTER * self.model.shard(self.shards, trained=True)
        return (trained if self.spec.has_adapters else weights) + optimizer

    @property
    def gradients(self) -> int:
        """Bytes of all gradients of a rank after a backward pass."""
        return _MASTER * self.model.shard(self.shards, trained=True)

    def gathered(self, blocks: float) -> int:
        """Return the bytes of the unit around the blocks, and of this number of blocks, put together."""
        model = self.model
        together = min(blocks, model.blocks) if self.frees_gathered else model.blocks
        return int(self.itemsize * (model.numel(-1) + together * model.largest_block[False]))

    @property
    def held_by_gloo(self) -> int:
        """Bytes of collectives that have ended. On CPU, a thread of gloo holds them until it is scheduled again.

        How many depends on timing. None to three buffers of the unit around the blocks were seen. One is counted.
        """
        return self.gathered(0) if self.device == "cpu" and self.shards > 1 else 0

    def ahead(self) -> int:
        """Return how many blocks are gathered or kept beside the one that computes."""
        depth = prefetch_depth(self.fsdp, self.device, self.shards)
        return max(1, depth) if self.shards > 1 else 0

    def moments_of_update(self, carried: bool) -> list[dict[str, int]]:
        """Return what an update holds besides the states: at the output layer, in the last block, and at the end.

        Args:
            carried: gradients of micro-batches before this one are there.
        """
        assert self.update is not None
        fsdp, model = self.fsdp, self.model
        reduced = 2 if fsdp.reduce_dtype == "bfloat16" else 4
        kept = self.gradients if fsdp.reduce_gradients == "micro_batch" else reduced * model.numel(trained=True)
        before = kept if carried else 0
        # FSDP2 keeps what it has reduced last, the rest of the model, until the next reduction of the same update.
        reduces_each = fsdp.reduce_gradients == "micro_batch" and self.shards > 1
        held = reduced * model.numel(-1, trained=True) if carried and reduces_each else 0
        width = model.config.get_text_config().hidden_size
        forward, backward = head_bytes(
            model.head_rows,
            width,
            self.rows[0],
            self.itemsize,
            self.device,
            model.numel(-1, trained=True) > 0,
            self.entropy,
            self.cp,
            self.compiled,
            bool(getattr(model.config.get_text_config(), "final_logit_softcapping", None)),
        )
        of_head = self.itemsize * min(model.head_rows * width, model.numel(-1, trained=True))
        of_block, of_rest = model.largest_block[True], model.numel(-1, trained=True)
        in_flight = 2 if self.device == "cuda" and self.shards > 1 else 1
        tied = 2 if model.head_rows and model.config.get_text_config().tie_word_embeddings else 1
        return [
            {
                "gradients": before + held,
                "gathered": self.gathered(self.ahead()),
                "activations": self.update.saved,
                "head": max(forward, backward),
            },
            {
                "gradients": before + of_head + self.itemsize * of_block + max(held, reduced * in_flight * of_block),
                "gathered": self.gathered(1 + self.ahead()),
                "activations": self.update.peak,
            },
            {
                "gradients": kept + (self.itemsize * tied + reduced) * of_rest + reduced * of_rest // self.shards,
                "gathered": self.gathered(0),
            },
        ]

    def moments_of_scores(self) -> list[dict[str, int]]:
        """Return what a pass without gradients holds besides the states: in a block, and at the output layer."""
        model, row = self.model, self.rows[1]
        width = model.config.get_text_config().hidden_size
        head, _ = head_bytes(model.head_rows, width, row, self.itemsize, self.device, False, cp=self.cp)
        hidden = self.itemsize * row.tokens_of_rank(self.cp) * width
        return [
            {"gathered": self.gathered(1 + self.ahead()), "activations": self.scores.forward},
            {"gathered": self.gathered(self.ahead()), "activations": hidden, "head": head},
        ]


def plan_role(
    cfg: Config,
    spec: RoleSpec,
    sizes: Mapping[str, int],
    workload: Workload,
    device: str,
    traced: bool = True,
    bounded: Collection[str] = (),
) -> PlannedRole:
    """Return what a role's model takes on a rank.

    Args:
        sizes: sizes of the layout's axes.
        device: `cpu` or `cuda`.
        traced: False: activations count as nothing.
        bounded: passes that are not traced, `update` or `scores`: see `make_plan`.
    """
    model = shape_of(cfg, spec, sizes)
    rows = workload.row_of_update(), workload.row_of_scores()

    def activations(row: Row, backward: bool) -> Activations:
        only_known = ("update" if backward else "scores") in bounded
        return trace(cfg, spec, model.config, sizes, row, device, backward, only_known) if traced else Activations()

    shards = weight_shards(sizes)
    itemsize = torch.finfo(forward_dtype(spec, device)).bits // 8
    update = activations(rows[0], True) if spec.trained else None
    scores = activations(rows[1], False)
    compiled = compiles_blocks(spec.sharding, device, sizes, cfg.trainer.deterministic)
    of_loss = "gradient" if cfg.algorithm.entropy_coef > 0 else "value"
    entropy = of_loss if cfg.task.generates else None
    return PlannedRole(spec, model, itemsize, shards, update, scores, rows, device, entropy, sizes["cp"], compiled)


def rank_phases(cfg: Config, roles: Sequence[PlannedRole], workload: Workload, device: Device) -> list[Phase]:
    """Return the phases of a rank that holds these roles, without what an engine on its GPU takes.

    What `trainer.offload` moves is on the GPU for the roles that a phase needs, and for no others (see `Rank.call`).
    """
    mode, on_device = cfg.trainer.offload, [role for role in roles if not role.is_on_host]

    def held(weights: Collection[str], optimizer: Collection[str]) -> dict[str, int]:
        """What is on the device while a phase needs the weights, and the optimizer's states, of these roles."""
        return {
            "weights": sum(role.state[0] for role in on_device if mode != "all" or role.spec.name in weights),
            "optimizer": sum(role.state[1] for role in on_device if mode == "none" or role.spec.name in optimizer),
        }

    phases = []
    if cfg.task.generates:
        phases.append(Phase("rollout", held((), ())))
    scored = [role for role in roles if scored_share(cfg, role.spec, workload) > 0]
    needed = {"policy" if role.spec.is_policy_base else role.spec.name for role in scored}
    for role in scored:
        states = {**held(needed, ()), "buffers": role.held_by_gloo}
        phases.append(_largest(f"scores of the {role.spec.name}", states, role.moments_of_scores()))
    trained = [role for role in roles if role.spec.trained]
    for role in trained:
        moments = [_on_device(role, moment) for moment in role.moments_of_update(workload.may_accumulate)]
        name = role.spec.name
        states = {**held({name}, {name}), "buffers": role.held_by_gloo}
        phases.append(_largest(f"update of the {name}", states, moments))
    saved = [role.spec for role in roles if role.spec.saved]
    # What is in host memory is saved from there (see `Rank.begin_save`). The policy has just been trained.
    here = {spec.name for spec in saved if mode != "all" or spec.name == "policy" or spec.has_adapters}
    if mode != "none" and saved:
        phases.append(Phase("save", held(here, here)))
    if cfg.task.generates and any(role.spec.name == "policy" for role in roles):
        phases.append(Phase("weights to engines", {**held({"policy"}, ()), "buffers": sync_buffers(cfg, roles)}))
    return phases


def _largest(name: str, held: Mapping[str, int], moments: Sequence[Mapping[str, int]]) -> Phase:
    """Return the phase at the largest of its moments. `held`: what the rank holds in all of them."""
    return Phase(name, {**held, **max(moments, key=lambda moment: sum(moment.values()))})


def _on_device(role: PlannedRole, moment: dict[str, int]) -> dict[str, int]:
    if role.is_on_host:  # the sharded gradients go to host memory as they are complete
        return {**moment, "gradients": max(0, moment["gradients"] - role.gradients)}
    return moment


def sync_buffers(cfg: Config, roles: Sequence[PlannedRole]) -> int:
    """Return the bytes that a rank holds while weights go to the engines: a gathered tensor, and two buckets.

    Into shared memory each rank writes its own rows, one tensor after the other.
    """
    policy = next(role for role in roles if role.spec.name == "policy")
    largest = policy.model.largest_parameter
    if writes_shared_memory(cfg, policy.device):
        return largest * policy.itemsize // policy.shards
    return 2 * largest * policy.itemsize + 2 * cfg.rollout.weight_sync_bucket_mb * 2**20


def writes_shared_memory(cfg: Config, device: str) -> bool:
    """Return whether weights go to the engines through shared memory. `device` is `cpu` or `cuda`."""
    way = cfg.rollout.weight_sync
    return device == "cpu" if way == "auto" else way == "shared_memory"


def host_bytes_of_rank(cfg: Config, roles: Sequence[PlannedRole]) -> int:
    """Return the host memory of a rank: copies for saves and `trainer.offload`, and states that are offloaded.

    Every save copies, also with `trainer.ckpt_async=false`. `trainer.offload` uses the copy of the last save.
    """
    total = 0
    for role in roles:
        weights, optimizer = role.state
        moved = {"none": 0, "optimizer": optimizer, "all": weights + optimizer}[cfg.trainer.offload]
        total += max(role.saved, moved)
        if role.is_on_host:
            total += weights + optimizer + role.gradients
    return total
