"""The memory of a rank, by phase of a step and by kind: states by arithmetic, activations from traces."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from trainer.config import Config, RoleSpec
from trainer.parallel.ac_and_compile import compiles_blocks
from trainer.parallel.axes import AXES
from trainer.parallel.shard import frees_after_forward, prefetch_depth
from trainer.plan.activations import Activations, head_bytes, trace
from trainer.plan.hardware import CONTEXT_BYTES, FRAGMENTATION, Device
from trainer.plan.model_shape import ModelShape, forward_dtype, shape_of
from trainer.plan.workload import Row, Sizes, Workload, scored_share

SYNC_BUCKET_BYTES = 256 * 2**20
"""Size of a bucket of `trainer.generation.transport`."""

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
        """Return the phase with what the software of a GPU takes for so many processes."""
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
        return (self.gradients if self.spec.has_adapters else weights) + optimizer

    @property
    def gradients(self) -> int:
        """Bytes of all gradients of a rank after a backward pass."""
        return _MASTER * self.model.shard(self.shards, trained=True)

    def gathered(self, blocks: float) -> int:
        """Return the bytes of the unit around the blocks, and of this number of blocks, put together."""
        model = self.model
        together = min(blocks, model.blocks) if self.frees_gathered else model.blocks
        return int(self.itemsize * (model.numel(-1) + together * model.largest_block[False]))

    def ahead(self) -> int:
        """Return how many blocks are gathered or kept beside the one that computes."""
        return max(1, prefetch_depth(self.device, self.shards)) if self.shards > 1 else 0

    def moments_of_update(self, carried: bool) -> list[dict[str, int]]:
        """Return what an update holds besides the states: at the output layer, in the last block, and at the end.

        Args:
            carried: gradients of micro-batches before this one are there.
        """
        assert self.update is not None
        model, text = self.model, self.model.text
        of_block, of_rest = model.largest_block[True], model.numel(-1, trained=True)
        before = self.gradients if carried else 0
        # FSDP2 keeps what it has reduced last, the rest of the model, until the next reduction of the same update.
        held = 4 * of_rest if carried and self.shards > 1 else 0
        softcap = bool(getattr(text, "final_logit_softcapping", None))
        options = self.entropy, self.cp, self.compiled, softcap
        head = head_bytes(
            model.head_rows, text.hidden_size, self.rows[0], self.itemsize, self.device, of_rest > 0, *options
        )
        of_head = self.itemsize * min(model.head_rows * text.hidden_size, of_rest)
        in_flight = 2 if self.device == "cuda" and self.shards > 1 else 1
        tied = 2 if model.head_rows and text.tie_word_embeddings else 1
        return [
            {
                "gradients": before + held,
                "gathered": self.gathered(self.ahead()),
                "activations": self.update.saved,
                "head": max(head),
            },
            {
                "gradients": before + of_head + self.itemsize * of_block + max(held, 4 * in_flight * of_block),
                "gathered": self.gathered(1 + self.ahead()),
                "activations": self.update.peak,
            },
            {
                "gradients": self.gradients + (self.itemsize * tied + 4) * of_rest + 4 * of_rest // self.shards,
                "gathered": self.gathered(0),
            },
        ]

    def moments_of_scores(self) -> list[dict[str, int]]:
        """Return what a pass without gradients holds besides the states: in a block, and at the output layer."""
        width, row = self.model.text.hidden_size, self.rows[1]
        head, _ = head_bytes(self.model.head_rows, width, row, self.itemsize, self.device, False, cp=self.cp)
        hidden = self.itemsize * row.tokens_of_rank(self.cp) * width
        return [
            {"gathered": self.gathered(1 + self.ahead()), "activations": self.scores.forward},
            {"gathered": self.gathered(self.ahead()), "activations": hidden, "head": head},
        ]


def plan_role(
    cfg: Config, spec: RoleSpec, sizes: Sizes, workload: Workload, device: str, traced: bool = True
) -> PlannedRole:
    """Return what a role's model takes on a rank. `traced` False: activations count as nothing."""
    model = shape_of(cfg, spec, sizes)
    rows = workload.largest_row(workload.groups_in_update), workload.largest_row(workload.groups)

    def activations(row: Row, backward: bool) -> Activations:
        return trace(cfg, spec, model, sizes, row, device, backward) if traced else Activations()

    update, scores = activations(rows[0], True) if spec.trained else None, activations(rows[1], False)
    itemsize = torch.finfo(forward_dtype(spec, device)).bits // 8
    compiled = compiles_blocks(spec.sharding, device, sizes, cfg.trainer.deterministic)
    of_loss = "gradient" if cfg.algorithm.entropy_coef > 0 else "value"
    entropy = of_loss if cfg.task.generates else None
    shards = math.prod(size for name, size in sizes.items() if AXES[name].shards_weights)
    return PlannedRole(spec, model, itemsize, shards, update, scores, rows, device, entropy, sizes["cp"], compiled)


def rank_phases(cfg: Config, roles: Sequence[PlannedRole], workload: Workload) -> list[Phase]:
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

    def largest(name: str, states: Mapping[str, int], moments: Sequence[Mapping[str, int]]) -> Phase:
        return Phase(name, {**states, **max(moments, key=lambda moment: sum(moment.values()))})

    phases = [Phase("rollout", held((), ()))] if cfg.task.generates else []
    scored = [role for role in roles if scored_share(cfg, role.spec, workload) > 0]
    needed = {"policy" if role.spec.is_policy_base else role.spec.name for role in scored}
    for role in scored:
        phases.append(largest(f"scores of the {role.spec.name}", held(needed, ()), role.moments_of_scores()))
    for role in (role for role in roles if role.spec.trained):
        name, moments = role.spec.name, role.moments_of_update(workload.may_accumulate)
        if role.is_on_host:  # the sharded gradients go to host memory as they are complete
            moments = [{**one, "gradients": max(0, one["gradients"] - role.gradients)} for one in moments]
        read = {other.spec.name for other in roles if other.spec.read_by == name}
        phases.append(largest(f"update of the {name}", held({name} | read, {name}), moments))
    saved = [role.spec for role in roles if role.spec.saved]
    # What is in host memory is saved from there (see `Rank.begin_save`). The policy has just been trained.
    here = {spec.name for spec in saved if mode != "all" or spec.name == "policy" or spec.has_adapters}
    if mode != "none" and saved:
        phases.append(Phase("save", held(here, here)))
    policy = next((role for role in roles if role.spec.name == "policy"), None)
    if cfg.task.generates and policy is not None:
        largest = policy.itemsize * max(parameter.numel for parameter in policy.model.parameters)  # before FSDP2 shards
        # Into shared memory each rank writes its own rows of a tensor; else it gathers one, and holds two buckets.
        is_written = writes_shared_memory(cfg, policy.device)
        buffers = largest // policy.shards if is_written else 2 * largest + 2 * SYNC_BUCKET_BYTES
        phases.append(Phase("weights to engines", {**held({"policy"}, ()), "buffers": buffers}))
    return phases


def writes_shared_memory(cfg: Config, device: str) -> bool:
    """Return whether engines read weights in shared memory. `device` is `cpu` or `cuda`."""
    transport = cfg.rollout.weight_sync
    return device == "cpu" if transport == "auto" else transport in ("shared_memory", "delta")


def host_bytes_of_rank(cfg: Config, roles: Sequence[PlannedRole]) -> int:
    """Return the host memory of a rank: copies for saves and `trainer.offload`, and states that are offloaded.

    `trainer.offload` uses the copy of the last save.
    """
    total = 0
    for role in roles:
        weights, optimizer = role.state
        moved = {"none": 0, "optimizer": optimizer, "all": weights + optimizer}[cfg.trainer.offload]
        total += max(role.saved, moved) + role.is_on_host * (weights + optimizer + role.gradients)
    return total
