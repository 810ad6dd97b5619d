"""Load tokenizers, and check that they have a chat template, an end token and a pad token."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.files.atomic_io import open_regular
from trainer.files.documents import is_count, mismatch, parse_object
from trainer.files.hf_hub import first_line
from trainer.process.startup import importing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_MAX_TEMPLATE_BYTES = 1 << 20
_DATE = {"%Y": "2024", "%y": "24", "%m": "07", "%d": "26", "%b": "Jul", "%B": "July", "%a": "Fri", "%A": "Friday"}
"""The day that a template gets if it asks for today (Llama 3.2, gpt-oss), so that a run has the same prompts tomorrow.
The template of Llama 3.2 writes this day where it cannot ask."""


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a completion: the tokenizer's end token and those of the generation config.

    Chat models have several. Qwen, for example, has an end of turn and an end of text.

    Raises:
        UserError: the generation config is corrupt.
    """
    stops = [tokenizer.eos_token_id]
    file = os.path.join(path, "generation_config.json")
    if os.path.exists(file):
        try:
            with open(file, "rb") as handle:
                config = parse_object(handle.read())
            problem = mismatch(config.get("eos_token_id"), (NoneType, is_count, [is_count]), "eos_token_id")
            if problem is not None:
                raise ValueError(problem)
        except (OSError, ValueError) as error:
            raise UserError(f"model.path={path}: its generation_config.json cannot be read ({error})") from error
        configured = config.get("eos_token_id")
        stops += configured if isinstance(configured, list) else [] if configured is None else [configured]
    return tuple(dict.fromkeys(stops))


def load_tokenizer(
    path: str,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        path: the model's directory.
        chat_template: a Jinja file that replaces the tokenizer's template.
        chat_template_kwargs: variables to set at the beginning of the template. They are saved with it.

    Raises:
        UserError: there is no tokenizer, chat template or end token.
    """
    with importing():
        from transformers import AutoTokenizer  # late, because the import takes seconds

    if not os.path.isdir(path):
        raise UserError(f"model.path={path}: no such directory; name a directory with a Hugging Face model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except BaseException as error:  # a corrupt file can raise any exception; tokenizers raises plain `Exception`
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # raised by Rust code
            raise
        raise UserError(f"model.path={path}: no tokenizer can be loaded from there ({first_line(error)})") from error
    # If there is only a config.json, transformers creates an empty tokenizer of the model's type.
    files = {"tokenizer.json", *tokenizer.vocab_files_names.values()} - {"tokenizer_config.json"}
    if not any(os.path.exists(os.path.join(path, file)) for file in files):
        raise UserError(f"model.path={path}: the directory has no tokenizer (none of {', '.join(sorted(files))})")
    if chat_template is not None:
        try:
            with open_regular(chat_template) as file:
                tokenizer.chat_template = file.read(_MAX_TEMPLATE_BYTES + 1).decode()
            if len(tokenizer.chat_template) > _MAX_TEMPLATE_BYTES:
                raise ValueError(f"it has more than {_MAX_TEMPLATE_BYTES >> 20} MiB")
        except (OSError, ValueError) as error:
            raise UserError(f"model.chat_template={chat_template}: cannot be read ({first_line(error)})") from error
    if not tokenizer.chat_template:
        raise UserError(
            f"model.path={path}: its tokenizer has no chat template; name a Jinja file in model.chat_template"
        )
    tokenizer.chat_template = _with_fixed_date(tokenizer.chat_template)
    if chat_template_kwargs:
        tokenizer.chat_template = _with_variables(tokenizer.chat_template, chat_template_kwargs)
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.path={path}: the tokenizer has no end-of-sequence token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _with_variables(template: str, variables: Mapping[str, Any]) -> str:
    literals = {name: "none" if value is None else json.dumps(value) for name, value in variables.items()}
    return "".join(f"{{%- set {name} = {literal} %}}" for name, literal in literals.items()) + template


def _with_fixed_date(template: Any) -> Any:
    if not isinstance(template, str) or "strftime_now" not in template or "macro strftime_now(" in template:
        return template
    replacements = "".join(f" | replace({code!r}, {text!r})" for code, text in _DATE.items())
    return f"{{%- macro strftime_now(format) %}}{{{{ format{replacements} }}}}{{%- endmacro %}}{template}"
