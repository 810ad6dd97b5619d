"""Checks that a model supports the context and tensor parallelism of a config. Cheap to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.config import Config
from trainer.errors import UserError
from trainer.models.files import load_config, resolve_model_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
        model_path: directory of the initial weights.

    Raises:
        UserError: a model cannot be split.
    """
    if cfg.trainer.context_parallel_size == cfg.trainer.tensor_parallel_size == 1:
        return
    paths = [model_path, *([cfg.trainer.critic.path] if cfg.trainer.critic.path else [])]
    for path in map(resolve_model_path, paths):
        check_model_axes(cfg, load_config(cfg.model, path).get_text_config())


def check_model_axes(cfg: Config, model: PretrainedConfig | Any) -> None:
    """Check one model (see `check_axes`)."""
    context, tensor = cfg.trainer.context_parallel_size, cfg.trainer.tensor_parallel_size
    heads = getattr(model, "num_attention_heads", None)
    if tensor > 1:
        plan, kind = getattr(model, "base_model_tp_plan", None), f"models of the type {model.model_type}"
        if not plan:
            refuse_axis("tensor_parallel_size", tensor, f"{kind} have no tensor parallel plan in transformers")
        unknown = sorted(set(plan.values()) - {*COLWISE, *ROWWISE, *PARTIAL, *EMBEDDING})
        if unknown:
            refuse_axis(
                "tensor_parallel_size", tensor, f"{kind} need the parallel style {unknown[0]}, which is not supported"
            )
        sizes = {"attention heads": heads, "tokens in the vocabulary": model.vocab_size}
        sizes["key and value heads"] = getattr(model, "num_key_value_heads", None) or heads
        for name, size in sizes.items():
            if size is None or size % tensor:
                refuse_axis("tensor_parallel_size", tensor, f"must divide the number of {name} of the model, {size}")
    if context > 1 and (heads is None or heads // tensor % context):
        on_each = " on each rank of trainer.tensor_parallel_size" if tensor > 1 else ""
        share = heads and heads // tensor
        refuse_axis(
            "context_parallel_size",
            context,
            f"must divide the number of attention heads of the model{on_each}, {share}",
        )


def refuse_axis(axis: str, size: int, problem: str) -> None:
    """Raise an error about the size of an axis.

    Raises:
        UserError: always.
    """
    raise UserError(f"trainer.{axis}={size}: {problem}")
