"""Checks that the models of a run can be split over the axes of its ranks. Cheap to import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from trainer.config import Config
from trainer.config.axes import AXES, axis_sizes
from trainer.errors import UserError
from trainer.import_utils import import_function
from trainer.models.files import load_config, resolve_model_path

COLWISE = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True}
"""Styles of Hugging Face plans that split the outputs of a layer, and whether the outputs are gathered."""
ROWWISE = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True}
"""Styles that split the inputs of a layer, and whether the layer gets complete inputs."""
PARTIAL = {"replicated_with_grad_allreduce"}
"""Styles of replicated parameters whose gradients are summed over the ranks."""
EMBEDDING = {"embedding_rowwise"}
"""Styles of embeddings that are split by vocabulary. Embeddings are always split, even without a style."""


def check_axes(cfg: Config, model_path: str) -> None:
    """Check that the models of a run can be split over the ranks as the config requires, before they are loaded.

    Args:
        model_path: directory of the initial weights of the policy, and of each role without a path of its own.

    Raises:
        UserError: a model cannot be split.
    """
    if not any(size > 1 and AXES[name].check for name, size in axis_sizes(cfg.trainer).items()):
        return
    for role in {role.key: role for role in reversed(cfg.roles)}.values():
        path = resolve_model_path(role.path, role.key) if role.path else model_path
        name = "the model" if role.path is None else f"the {role.name}"
        check_model_axes(cfg, load_config(cfg.model, path, role.key).get_text_config(), name)


def check_model_axes(cfg: Config, model: Any, name: str = "the model") -> None:
    """Check one model (see `check_axes`).

    Args:
        model: its Hugging Face config.
        name: what messages call it.
    """
    sizes = axis_sizes(cfg.trainer)
    for axis, size in sizes.items():
        if size > 1 and (path := AXES[axis].check):
            problem = import_function(path, f"the check of {axis}")(model, sizes, name)
            if problem is not None:
                refuse_axis(axis, size, problem)


def cp_problem(model: Any, sizes: Mapping[str, int], name: str) -> str | None:
    """Return why the attention of a model cannot be split over the ranks of `cp`, or None."""
    heads, tp = getattr(model, "num_attention_heads", None), sizes["tp"]
    if heads is not None and heads // tp % sizes["cp"] == 0:
        return None
    on_each = " on each rank of trainer.tensor_parallel_size" if tp > 1 else ""
    return f"must divide the number of attention heads of {name}{on_each}, {heads and heads // tp}"


def tp_problem(model: Any, sizes: Mapping[str, int], name: str) -> str | None:
    """Return why the matrices of a model cannot be split over the ranks of `tp`, or None."""
    plan, kind = getattr(model, "base_model_tp_plan", None), f"models of the type {model.model_type}"
    if not plan:
        return f"{kind} have no tensor parallel plan in transformers"
    unknown = sorted(set(plan.values()) - {*COLWISE, *ROWWISE, *PARTIAL, *EMBEDDING})
    if unknown:
        return f"{kind} need the parallel style {unknown[0]}, which is not supported"
    heads = getattr(model, "num_attention_heads", None)
    counts = {"attention heads": heads, "tokens in the vocabulary": model.vocab_size}
    counts["key and value heads"] = getattr(model, "num_key_value_heads", None) or heads
    for counted, count in counts.items():
        if count is None or count % sizes["tp"]:
            return f"must divide the number of {counted} of {name}, {count}"
    return None


def refuse_axis(axis: str, size: int, problem: str) -> NoReturn:
    """Raise an error about the size of an axis.

    Raises:
        UserError: always.
    """
    raise UserError(f"trainer.{AXES[axis].key}={size}: {problem}")
