"""A kind of training that is not shipped: direct preference optimisation (Rafailov et al., 2023) with its reference.

Each group is a pair: the episode with the higher reward was preferred to the other one.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from trainer.algorithms.aggregation import masked
from trainer.checkpoint.components import Component, json_component
from trainer.config import Config, OptimizerConfig, RoleSpec, policy_role, reference_role
from trainer.data.ledger import Ledger, SampleIndex
from trainer.episodes import Episode, Sample
from trainer.objectives import Experience, Objective, Outputs
from trainer.objectives.base import GROUP, LossResult
from trainer.parallel.batching import Batch, MicroBatch
from trainer.sources.supervised import LedgerSource
from trainer.tasks import Metric, Task, TaskSpec

BETA = 0.5


def roles(cfg: Config) -> tuple[RoleSpec, ...]:
    return policy_role(cfg), reference_role(cfg)


class Preference(Objective):
    """L = -log sigmoid(beta ((log pi - log ref)(chosen) - (log pi - log ref)(rejected))), mean over pairs."""

    unit = GROUP

    def experience(self, episodes: Sequence[Episode], batch: Batch) -> Experience:
        rewards, groups = np.asarray([episode.reward for episode in episodes]), batch["group_ids"]
        assert (np.bincount(groups) == 2).all(), "each group is a pair"
        means = np.bincount(groups, rewards) / 2
        return Experience(batch | {"sign": np.sign(rewards - means[groups]).astype(np.float32)}, {})

    def totals(self, role: str, batch: Batch) -> int:
        return len(np.unique(batch["group_ids"]))

    def loss(
        self, role: str, outputs: Outputs, mb: MicroBatch, totals: Any, numbers: Mapping[str, float]
    ) -> LossResult:
        gains = masked(outputs.logprobs - mb["ref_logprobs"], mb["mask"]).sum(dim=1) * mb["sign"]
        pairs, pair = torch.unique(mb["group_ids"], return_inverse=True)
        margins = gains.new_zeros(len(pairs)).index_add(0, pair, gains)
        is_pair = gains.new_zeros(len(pairs)).index_add(0, pair, mb["sign"].abs()) > 1.5  # not so without rows
        losses = -F.logsigmoid(BETA * margins) * is_pair
        accuracy = ((margins > 0) & is_pair).float()
        return losses.sum() / totals, {"accuracy": accuracy.sum() / totals, "margin": margins.detach().sum() / totals}


class PairSource(LedgerSource):
    """`trainer.train_batch_size` pairs a step, of `data.train_files`: JSON lines with prompt, chosen and rejected.

    Their order in a step follows from a number that a part of the checkpoint holds.
    """

    def __init__(self, cfg: Config, tokenizer: Any):
        self.size, self.tokenizer, self.number = cfg.trainer.train_batch_size, tokenizer, 0
        lines = [line for path in cfg.data.train_files for line in Path(path).read_text().splitlines()]
        self.rows = [json.loads(line) for line in lines]
        super().__init__(Ledger(self.rows, cfg.trainer.seed, "pairs", lambda: "".join(lines)), f"{len(lines)} pairs")

    def draw(self, step: int) -> list[tuple[SampleIndex, Sequence[Episode]]]:
        drawn = [(index, self.pair(index)) for index in self.ledger.peek(self.size)]
        first = self.number % self.size
        return drawn[first:] + drawn[:first]

    def commit(self, step: int) -> None:
        super().commit(step)
        self.number = zlib.crc32(f"{self.number} {step}".encode())

    def components(self) -> list[Component]:
        def load(state: dict) -> None:
            self.number = state["number"]

        return [json_component("pairs", lambda: {"number": self.number}, load, {"number": int}, kinds=("data",))]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.number = 0

    def pair(self, index: SampleIndex) -> list[Episode]:
        row, group = self.rows[index.index], f"{index.epoch}:{index.index}"
        samples = [self.sample(row["prompt"], row[name]) for name in ("chosen", "rejected")]
        return [Episode(f"{group}:{i}", group, [sample], reward=1.0 - i) for i, sample in enumerate(samples)]

    def sample(self, prompt: str, answer: str) -> Sample:
        texts = f"<|user|>{prompt}<|assistant|>", f"{answer}{self.tokenizer.eos_token}"
        first, last = (self.tokenizer.encode(text) for text in texts)
        mask = np.asarray([0] * len(first) + [1] * len(last), np.float32)
        return Sample(np.asarray([*first, *last], np.int32), mask)


def build(cfg: Config) -> Task:
    return Task(cfg, source=lambda given: (PairSource(cfg, given.tokenizer), None))


TASK = TaskSpec(
    build,
    objective=Preference,
    roles=roles,
    best="policy/accuracy",
    unused=tuple(f"{name}.*" for name in ("algorithm", "rollout", "reward", "environment", "sft", "trainer.critic")),
    metrics={
        "policy/accuracy": Metric(
            "Pairs whose chosen answer gains more than the rejected one.", "share", "max", "Pairs"
        ),
        "policy/margin": Metric("How much more the chosen answer gains.", "nats", "max", "Margin", watched=True),
    },
)


def roles_with_second(cfg: Config) -> tuple[RoleSpec, ...]:
    """Another policy, which learns the same more slowly, beside the first."""
    policy, reference = roles(cfg)
    second = RoleSpec(
        "second",
        trained=True,
        saved=True,
        optimizer=OptimizerConfig(lr=3e-4),
        computes="second_logprobs",
        updates_per_step=policy.updates_per_step,
    )
    return policy, second, reference


TWO = dataclasses.replace(TASK, roles=roles_with_second)
