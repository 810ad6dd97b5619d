"""Check that every model of a run knows the tokens that it reads. Cheap to import."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trainer.config import Config
from trainer.errors import UserError, one_line
from trainer.models.files import load_config, resolve_model_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_MEDIA = re.compile("(image|video|audio|vision|bo[iva]|eo[iva])_.*")
"""Names of special tokens that stand for something else than text."""


def check_vocabularies(cfg: Config, model_path: str) -> None:
    """Check that no model of the run has fewer tokens in its vocabulary than the policy, before one is loaded.

    Every model reads the tokens that the policy has sampled, and a rank ends at a token without an embedding.

    Args:
        model_path: directory of the initial weights of the policy.

    Raises:
        UserError: one has.
    """
    others = {role.key: (role.name, role.path) for role in cfg.roles if role.path is not None}
    if not others:
        return
    tokens = _vocab_size(load_config(cfg.model, model_path))
    for key, (name, path) in others.items():
        known = _vocab_size(load_config(cfg.model, resolve_model_path(path, key), key))
        if tokens is not None and known is not None and known < tokens:
            raise UserError(
                f"{key}={path}: the vocabulary of the {name} has {known} tokens, and that of the policy, "
                f"{cfg.model.path or model_path}, has {tokens}; choose a {name} with the tokenizer of the policy, or "
                f"resize its embeddings to {tokens} tokens"
            )


def check_tokenizer(cfg: Config, path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the model in the directory `path` has an embedding of each token that its tokenizer writes.

    A tokenizer may have a token for images or sound without one, as those of Gemma 3 with text alone have.

    Raises:
        UserError: a token has none.
    """
    rows = _vocab_size(load_config(cfg.model, path))
    if rows is None:
        return
    media = {token for name, token in tokenizer.special_tokens_map.items() if _MEDIA.match(name)}
    without = {number: token for token, number in tokenizer.get_vocab().items() if number >= rows}
    without = {number: token for number, token in without.items() if token not in media}
    if without:
        first = min(without)
        raise UserError(
            f"model.path={path}: the model has {rows} embeddings, and {len(without)} tokens of its tokenizer none, "
            f"such as {one_line(repr(without[first]))} ({first}); take the tokenizer that the model was trained with, "
            "or resize its embeddings (resize_token_embeddings)"
        )


def _vocab_size(config: PretrainedConfig) -> int | None:
    """Return the number of tokens that a model has embeddings of. None: its config does not say it."""
    return getattr(config.get_text_config(), "vocab_size", None)
