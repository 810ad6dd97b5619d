"""How many tokens the policy can read at a time. Cheap to import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.config import Config
from trainer.config.fields import config_error
from trainer.models.files import load_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_episode_length(cfg: Config, model_path: str) -> None:
    """Check that the policy can read the longest episode of the environment. Of the engines, vLLM alone checks it.

    Args:
        cfg: of a run on one source alone.
        model_path: directory of the policy.

    Raises:
        UserError: it cannot.
    """
    if cfg.environment.name is None:
        return
    positions = positions_of(load_config(cfg.model, model_path))
    if positions is not None and cfg.environment.max_tokens > positions:
        problem = f"model.path={cfg.model.path} reads at most {positions} tokens (max_position_embeddings); lower it"
        raise config_error(cfg, "environment.max_tokens", problem)


def positions_of(config: PretrainedConfig) -> int | None:
    """Return `max_position_embeddings`. None: the config has none, or it scales its rotations for longer texts."""
    text = config.get_text_config()
    rotations = getattr(text, "rope_parameters", None)
    return None if _is_scaled(rotations) else getattr(text, "max_position_embeddings", None)


def _is_scaled(rotations: Any) -> bool:
    """Whether parameters of rotations, or those of a kind of layers among them, have a factor."""
    if not isinstance(rotations, Mapping):
        return False
    return "factor" in rotations or any(map(_is_scaled, rotations.values()))
