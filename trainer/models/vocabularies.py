"""Check that every model of a run knows the tokens that it reads. Cheap to import."""

from __future__ import annotations

from trainer.config import Config, RoleSpec
from trainer.errors import UserError
from trainer.models.files import load_config, resolve_model_path


def check_vocabularies(cfg: Config, model_path: str) -> None:
    """Check that no model of the run has fewer tokens in its vocabulary than the policy, before one is loaded.

    Every model reads the tokens that the policy has sampled, and a rank ends at a token without an embedding.

    Args:
        model_path: directory of the initial weights of the policy.

    Raises:
        UserError: one has.
    """
    others = {role.key: role for role in cfg.roles if role.path is not None}
    tokens = _vocabulary(cfg, None, model_path) if others else None
    for role in others.values():
        known = _vocabulary(cfg, role, model_path)
        if tokens is not None and known is not None and known < tokens:
            raise UserError(
                f"{role.key}={role.path}: the vocabulary of the {role.name} has {known} tokens, and that of the "
                f"policy, {cfg.model.path or model_path}, has {tokens}; choose a {role.name} with the tokenizer of the "
                f"policy, or resize its embeddings to {tokens} tokens"
            )


def _vocabulary(cfg: Config, role: RoleSpec | None, model_path: str) -> int | None:
    """Return the number of tokens that a role has embeddings of. None: its config does not say it."""
    if role is None or role.path is None:
        config = load_config(cfg.model, model_path)
    else:
        config = load_config(cfg.model, resolve_model_path(role.path, role.key), role.key)
    return getattr(config.get_text_config(), "vocab_size", None)
