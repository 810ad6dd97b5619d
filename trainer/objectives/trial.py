"""Try an objective of the user on a few episodes, before anything starts."""

from __future__ import annotations

import numpy as np
import torch

from trainer.config import LM
from trainer.import_utils import user_code
from trainer.objectives.base import Experience, Objective, Outputs
from trainer.objectives.batches import batch_of
from trainer.objectives.check import check_result
from trainer.parallel.batching import Batch, MicroBatch, select, take_rows


def try_objective(objective: Objective) -> None:
    """Compute the experience and the losses of `Objective.examples`, if the class is not one of this package.

    The models are replaced: all log-probs and values are -1.

    Raises:
        UserError: a method of the objective raises an error, or does not return what it must.
    """
    kind = type(objective)
    if kind.__module__.startswith("trainer."):
        return
    message = (
        f"trainer.task={objective.cfg.trainer.task}: the objective {kind.__name__}, tried on the episodes of its "
        "method `examples`, ended in {}"
    )
    with user_code(message, has_place=True):
        _try(objective)


def _try(objective: Objective) -> None:
    episodes, step = objective.examples(), objective.cfg.total_steps
    if not episodes:
        return
    batch = batch_of(episodes)
    size = len(batch["lengths"])
    experience = objective.experience(episodes, _with_scores(objective, batch, step))
    if not isinstance(experience, Experience):
        raise TypeError(f"`experience` must return an Experience, not a {type(experience).__name__}")
    batch, metrics = dict(experience.batch), dict(experience.metrics)
    for name, array in batch.items():
        if not isinstance(array, np.ndarray) or array.shape[:1] != (size,):
            raise TypeError(f"`experience` must return arrays with a row for each sample, and {name} is none")
    for role in objective.updates(step):
        found = _try_loss(objective, role, batch, step)
        metrics |= dict.fromkeys(objective.metric_names(role, found), 0.0)
    objective.end_step(batch, metrics, None)


def _with_scores(objective: Objective, batch: Batch, step: int) -> Batch:
    """Return `batch` with what the roles compute before the update."""
    found: Batch = {}
    for score in objective.scores(batch, step):
        chosen = np.ones(len(batch["lengths"]), bool)
        if score.rows is not None:
            chosen = np.isin(np.arange(len(chosen)), score.rows)
            found[f"has_{score.name}"] = chosen
        known = batch["mask"] if score.output == "logprobs" else np.ones_like(batch["mask"])
        found[score.name] = -known * chosen[:, None]
    return batch | found


def _try_loss(objective: Objective, role: str, batch: Batch, step: int) -> list[str]:
    """Compute the loss of the first mini-batch; return the names of its metrics."""
    mini_batch = select(batch, objective.mini_batches(batch, step)[0])
    totals, numbers = objective.totals(role, mini_batch), objective.numbers()
    size = len(mini_batch["lengths"])
    for rows in (range(size), ()):
        micro_batch = take_rows(mini_batch, rows, "cpu")
        outputs = _outputs(objective, role, micro_batch)
        loss, metrics = check_result(objective.loss(role, outputs, micro_batch, totals, numbers), "outputs")
        if not rows and loss.item() != 0:
            raise ValueError(
                f"its loss is {loss.item():g} for a row whose float arrays, mask included, are 0; it must be 0, "
                "because a rank without rows computes such a row"
            )
        loss.backward()
    return [*metrics, "loss", "grad_norm", "lr"]


def _outputs(objective: Objective, role: str, mb: MicroBatch) -> Outputs:
    """Return what a model would compute, as `TrainedWorker.outputs` does."""
    given = torch.full(mb["mask"].shape, -1.0, requires_grad=True)
    if objective.roles[role].head != LM:
        return Outputs(values=given)
    if objective.reads_old_logprobs and "old_logprobs" not in mb:
        mb.arrays["old_logprobs"] = given.detach()
    return Outputs(logprobs=given, entropy=None if objective.entropy(mb) is None else given.abs())
