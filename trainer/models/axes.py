"""What a model must have so that several ranks can share its tokens or its matrices. Cheap to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.config import Config
from trainer.errors import UserError
from trainer.models.files import load_config, resolve_model_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_axes(cfg: Config, model_path: str) -> None:
    """Check that the models of a run can be split over the ranks as the config says, before they are loaded.

    Args:
        model_path: directory of the start weights.

    Raises:
        UserError: a model cannot be split.
    """
    if cfg.trainer.context_parallel == 1:
        return
    paths = [model_path, *([cfg.trainer.critic.path] if cfg.trainer.critic.path else [])]
    for path in map(resolve_model_path, paths):
        check_model_axes(cfg, load_config(cfg.model, path).get_text_config())


def check_model_axes(cfg: Config, model: PretrainedConfig | Any) -> None:
    """Check one model (see `check_axes`)."""
    context = cfg.trainer.context_parallel
    heads = getattr(model, "num_attention_heads", None)
    if context > 1 and (heads is None or heads % context):
        refuse_axis("context_parallel", context, f"must divide the attention heads of the model, and it has {heads}")


def refuse_axis(axis: str, size: int, problem: str) -> None:
    """Refuse the size of an axis.

    Raises:
        UserError: always.
    """
    raise UserError(f"trainer.{axis}={size}: {problem}")
