"""Tokenizers with what training needs of them: a chat template and a pad token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(
    path: str, chat_template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of the model at `path`.

    Args:
        chat_template: a Jinja file that replaces the tokenizer's own template.

    Raises:
        UserError: there is no tokenizer, chat template or end token.
    """
    from transformers import AutoTokenizer  # takes seconds, in which the driver's workers can start

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model.path={path}: no tokenizer can be loaded from there ({reason})") from error
    if chat_template is not None:
        try:
            with open(chat_template) as file:
                tokenizer.chat_template = file.read()
        except OSError as error:
            raise UserError(f"model.chat_template={chat_template}: {error.strerror}") from error
    if not tokenizer.chat_template:
        raise UserError(f"model.path={path}: the tokenizer has no chat template; name a Jinja file in model.chat_template")
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.path={path}: the tokenizer has no end-of-sequence token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
