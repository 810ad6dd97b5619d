"""The base class of objectives, and what goes into and comes out of their methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.algorithms import FixedKL, MovingAverages, Totals
from trainer.algorithms.kl import AdaptiveKL
from trainer.config import LM, Config, RoleSpec
from trainer.config.algorithm import TEACHER_TOP, TeacherConfig
from trainer.episodes import Episode
from trainer.import_utils import import_function
from trainer.parallel.batching import Batch, MicroBatch, mini_batches

ROW, GROUP = "row", "group"
SOURCES = "sources"
"""Array of a batch `(B,)`: the source of each row, by its number among the sorted names of `data.mix`."""


@dataclass(frozen=True)
class Computation:
    """An array `(B, T)` that a role computes for the rows of a step, before the update."""

    name: str  # of the array in the batch, such as `ref_logprobs`
    role: str
    output: str
    """`logprobs` or `values`; or `top_k` of a teacher on a server: `{name}_ids` and `{name}_logprobs` `(B, T, k)`."""
    rows: np.ndarray | None = None
    """The rows to compute; the others stay 0, and `has_{name}` `(B,)` tells them apart. None: all rows."""


@dataclass(frozen=True)
class Experience:
    batch: Batch
    metrics: dict[str, float]  # of its rewards, lengths, log-probs and values
    sampled: np.ndarray | None = None
    """`(B, T)`, the masks of the samples. Those of `batch` may leave rows out. None: they do not."""


@dataclass(frozen=True)
class Outputs:
    """What a model computed for a micro-batch, each `(b, t)`; None: its head does not compute it."""

    logprobs: Tensor | None = None  # log-probs of the tokens where the mask is 1
    entropy: Tensor | None = None  # entropy of the distribution of each token (see `Objective.entropy`)
    values: Tensor | None = None
    divergence: Tensor | None = None  # divergence from the teacher at each token (see `Objective.divergence`)


LossResult = tuple[Tensor, dict[str, Tensor]]


class Objective:
    """What a run optimises. The driver and every rank build one from the same config.

    A subclass says what is computed before the update (`computes`), what the ranks train on (`experience`), and the
    `loss` on the ranks. Its task says which models there are (`TaskSpec.roles`). The loop, the ranks and the
    checkpoints know no objective by its name.
    """

    unit = ROW
    """What no split over ranks, micro-batches and mini-batches may divide: a `row`, or a `group` of rows."""
    temperature = 1.0  # log-probs are those of the softmax of logits divided by this
    reads_old_logprobs = False
    """The loss of the policy reads `old_logprobs`. Where the batch has none, the first optimizer step of the policy
    takes the log-probs of its own forward pass, whose weights are still the old ones."""
    computes_as_updated = False
    """What is computed before the update is computed in the micro-batches of the update, so that a role with the
    policy's weights gives the numbers of the policy to the last bit."""
    extremes: Mapping[str, str] = {}
    """Metrics of `loss` that are no shares of a sum, but the `min` or `max` of a micro-batch."""
    divergence: TeacherConfig | None = None
    """The divergence over the vocabulary from the role that the policy reads (`RoleSpec.read_by`). None: there is
    none."""
    compares_completions = False  # the objective compares the rows of a group, so these must be able to differ

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.roles = {spec.name: spec for spec in cfg.roles}
        self.options = {**cfg.task.options, **cfg.algorithm.options}
        """The options of the task (`TaskSpec.options`), by name."""
        self.kl: FixedKL | AdaptiveKL = FixedKL(0.0)
        """The weight of a KL in the objective. Its state is saved in checkpoints."""
        self.averages: MovingAverages | None = None
        """The moving averages of players' rewards, if the objective reads them. They are saved in checkpoints."""

    def check(self) -> None:
        """Check the functions and values of the config that this objective alone reads, before anything starts. Raises
        UserError: names what the user must change."""

    # ---------------------------------------------------------------------------------------------------
    # On the driver

    def computes(self, batch: Batch, step: int) -> list[Computation]:
        """Return what is computed for the rows before the update: what each role with `RoleSpec.computes` computes."""
        outputs = {name: "logprobs" if spec.head == LM else "values" for name, spec in self.roles.items()}
        roles = [(spec.computes, spec.name, outputs[spec.name], spec.source) for spec in self.roles.values()]
        for spec in self.cfg.servers:
            roles += [(spec.computes, spec.name, "logprobs", spec.source)]
            roles += [(TEACHER_TOP, spec.name, "top_k", spec.source)] if spec.top_k else []
        numbers = {name: i for i, name in enumerate(sorted(self.cfg.data.mix))}
        rows = {name: np.flatnonzero(batch[SOURCES] == numbers[name]) for array, *_, name in roles if array and name}
        return [Computation(*named, rows.get(source)) for *named, source in roles if named[0]]

    def experience(self, episodes: Sequence[Episode], batch: Batch) -> Experience:
        """Return what the ranks train on, from a row for each sample (see `build_batch`) with the arrays of
        `computes`."""
        return Experience(batch, {})

    def updates(self, step: int) -> list[str]:
        """Return the roles that are trained in `step`, in their order: the policy is the last."""
        names = [name for name, spec in self.roles.items() if spec.trained and step > spec.skipped_steps]
        return sorted(names, key=lambda name: name == "policy")

    def numbers(self) -> dict[str, float]:
        """Return numbers of the current step that losses read, such as the weight of a KL."""
        return {}

    def metric_names(self, role: str, names: Sequence[str]) -> list[str]:
        """Return the names, as they are logged, of metrics of the update of `role`."""
        return [f"{role}/{name}" for name in names]

    def end_step(self, batch: Batch, metrics: Mapping[str, float], logprobs: np.ndarray | None) -> dict[str, float]:
        """Return further metrics of a step, and adapt what follows the update.

        Args:
            batch, metrics: what the ranks were trained on, and what they have measured.
            logprobs: `(B, T)`, the old log-probs that the update computed itself (see `reads_old_logprobs`).
        """
        return {}

    def token_scores(self, batch: Batch, logprobs: np.ndarray | None) -> dict[str, np.ndarray]:
        """Return what is kept with the rollouts of a step: fields of `TokenScores`, each `(B, T)` (see `end_step`)."""
        return {}

    def mini_batches(self, batch: Batch, step: int) -> list[np.ndarray]:
        """Return the rows of each optimizer step: whole prompts, with the groups of all their players."""
        return mini_batches(batch.get("prompt_ids", batch["group_ids"]), self.cfg.trainer, step)

    def totals(self, role: str, batch: Batch) -> Any:
        """Return what `loss` divides by: numbers of the whole mini-batch `batch`, of which it sees pieces on a rank.

        By default a `Totals`, as `aggregate` takes it. Each rank gets a copy, and what this method stores in the
        objective stays on the driver.
        """
        return Totals.of(torch.from_numpy(np.ascontiguousarray(batch["mask"])))

    # ---------------------------------------------------------------------------------------------------
    # On the ranks

    def scheduled_steps(self, spec: RoleSpec) -> int:
        """Return the number of optimizer steps over which the learning rate of a trained role is scheduled."""
        assert spec.optimizer is not None, f"{spec.name} is not trained"
        return spec.optimizer_steps(spec.optimizer.schedule_steps or self.cfg.total_steps)

    def entropy(self, batch: Batch | MicroBatch) -> str | None:
        """Return whether the loss needs the entropy of the tokens: as a `value`, with its `gradient`, or None: not.
        Only the names of the arrays may decide, which may be those of some rows."""
        return None

    def loss(
        self, role: str, outputs: Outputs, mb: MicroBatch, totals: Any, numbers: Mapping[str, float]
    ) -> LossResult:
        """Return the micro-batch's share of the loss of the mini-batch, a scalar, and its shares of metrics.

        The shares of all micro-batches on all ranks are added up, so divide by `totals`. They are of held-out rows,
        too, where an evaluation asks for them. A rank without rows computes
        one row whose float arrays, `mask` included, are 0; its share counts as 0.

        Args:
            outputs: of the model of `role`, with gradients.
            mb: the arrays of the experience. With `unit` "group" it holds whole groups.
            totals: what the method `totals` returns.
            numbers: see the method `numbers`.
        """
        raise NotImplementedError


_BUILT_IN = {
    "policy_gradient": "trainer.objectives.policy_gradient:PolicyGradient",
    "cross_entropy": "trainer.objectives.cross_entropy:CrossEntropy",
    "dpo": "trainer.objectives.preferences:DPO",
    "reward_model": "trainer.objectives.preferences:RewardModel",
}
"""The objectives of this package, by the names that `TaskSpec.objective` takes."""


def make_objective(cfg: Config) -> Objective:
    named = cfg.task.objective
    if not isinstance(named, str):
        return named(cfg)
    return import_function(_BUILT_IN.get(named, named), "the objective of trainer.task", _BUILT_IN)(cfg)
