"""Load tokenizers, and check that they have a chat template, an end token and a pad token."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any

from trainer.episodes import REPLY_MARK
from trainer.errors import UserError
from trainer.files.atomic_io import open_regular
from trainer.files.documents import is_count, mismatch, parse_object
from trainer.files.hf_hub import first_line
from trainer.import_utils import user_code
from trainer.process import time_limits
from trainer.process.startup import importing
from trainer.process.watchdog import deadline

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_MAX_TEMPLATE_BYTES = 1 << 20
_DATE = {"%Y": "2024", "%y": "24", "%m": "07", "%d": "26", "%b": "Jul", "%B": "July", "%a": "Fri", "%A": "Friday"}
"""The day that a template gets if it asks for today (Llama 3.2, gpt-oss), so that a run has the same prompts tomorrow.
The template of Llama 3.2 writes this day where it cannot ask."""


_CHANGES = "_trainer_changes"
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": REPLY_MARK}}}
_REPLIES = ({"content": REPLY_MARK}, {"content": "", "tool_calls": [_CALL]})


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a completion.

    They are those that the tokenizer, the generation config or the model's config call end tokens, and those with which
    the chat template ends a reply. Chat models have several. Qwen, for example, has an end of turn and an end of text.
    Raises UserError: the generation config is corrupt."""
    stops = [tokenizer.eos_token_id, *_configured_stops(path, "generation_config.json")]
    stops += _configured_stops(path, "config.json") + _template_stops(tokenizer, str(tokenizer.chat_template))
    return tuple(dict.fromkeys(stop for stop in stops if stop is not None))


def _configured_stops(path: str, name: str) -> list[int]:
    file = os.path.join(path, name)
    if not os.path.exists(file):
        return []
    stops: list[int] = []
    try:
        with open(file, "rb") as handle:
            config = parse_object(handle.read())
        for part in (config, config.get("text_config") or {}):
            configured = part.get("eos_token_id")
            problem = mismatch(configured, (NoneType, is_count, [is_count]), "eos_token_id")
            if problem is None:
                stops += configured if isinstance(configured, list) else [configured]
            elif name == "generation_config.json":  # some configs have -1 where there is none
                raise ValueError(problem)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"model.path={path}: its {name} cannot be read ({error})") from error
    return stops


@functools.lru_cache(maxsize=16)
def _template_stops(tokenizer: PreTrainedTokenizerBase, template: str) -> list[int]:
    """Return the tokens with which a chat template ends the last reply of a chat.

    After a text it is the first token, if that is an added one: some templates write an end of text, too. After a call
    of a tool it is the last special token, because tokens of the format precede it. In earlier turns some templates
    write another token, which does not end a reply (gpt-oss).
    """
    added, found = tokenizer.added_tokens_decoder, []
    for reply in _REPLIES:
        try:
            chat = [{"role": "user", "content": "x"}, {"role": "assistant", **reply}]
            with deadline(time_limits.RENDER_S):
                text = tokenizer.apply_chat_template(chat, tokenize=False)
        except Exception:  # it has no calls, or no chat at all
            continue
        _, is_written, end = text.rpartition(REPLY_MARK)
        tokens = tokenizer.encode(end, add_special_tokens=False) if is_written else []
        written = [token for token in tokens if token in added or tokenizer.decode([token]).strip()]
        if "tool_calls" in reply:
            found += [token for token in written[-1:] if token in added and added[token].special]
        else:
            found += [token for token in written[:1] if token in added]
    return found


def load_tokenizer(
    path: str,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model in the directory `path`, with an end token, a pad token and a template whose date
    is fixed. See `tokenizer_changes`.

    Args:
        chat_template: a Jinja file that replaces the tokenizer's template, or the name of one of its templates.
        chat_template_kwargs: variables to set at the beginning of the template. They are saved with it.

    Raises:
        UserError: there is no tokenizer, chat template or end token; or there are several templates and no default.
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
    own_template = tokenizer.chat_template
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if chat_template in named and not os.path.exists(chat_template):
        tokenizer.chat_template = named[chat_template]
    elif chat_template is not None:
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
    variables, changes = chat_template_kwargs or {}, {}
    if (template := _prepared(tokenizer.chat_template, path, variables, has_fixed_date=False)) != own_template:
        changes["chat_template"] = template
    tokenizer.chat_template = _prepared(tokenizer.chat_template, path, variables)
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.path={path}: the tokenizer has no end-of-sequence token")
    if tokenizer.pad_token_id is None:
        changes["pad_token"] = tokenizer.pad_token = tokenizer.eos_token
    setattr(tokenizer, _CHANGES, changes)
    return tokenizer


def token_table(path: str, trust_remote_code: bool = False) -> dict[str, int] | None:
    """Return the ids of a model's tokens, by their texts; None without a tokenizer. Raises UserError: it cannot be
    loaded."""
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any(os.path.exists(os.path.join(path, file)) for file in files):
        return None
    with importing():
        from transformers import AutoTokenizer
    with user_code(f"{path}: its tokenizer cannot be loaded ({{}})"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code).get_vocab()


def tokenizer_changes(tokenizer: Any) -> Mapping[str, Any]:
    """Return what a loaded tokenizer has and its files do not: `chat_template` and `pad_token`, if they differ. The
    fixed date is not among them: it holds for the run, and not for those who use what the run has trained."""
    return getattr(tokenizer, _CHANGES, {})


def _prepared(template: Any, path: str, variables: Mapping[str, Any], has_fixed_date: bool = True) -> Any:
    """Return a chat template with a fixed date and variables; of several ones, each. transformers chooses among
    several: `tool_use` where there are tools, or else `default`, which must be there."""
    if isinstance(template, dict):
        if "default" not in template:
            names = ", ".join(sorted(template))
            raise UserError(
                f"model.path={path}: its tokenizer has the chat templates {names}, and none with the name default; "
                "choose one of these names, or a Jinja file, in model.chat_template"
            )
        return {name: _prepared(one, path, variables, has_fixed_date) for name, one in template.items()}
    template = _with_fixed_date(template) if has_fixed_date else template
    return _with_variables(template, variables) if variables else template


def _with_variables(template: str, variables: Mapping[str, Any]) -> str:
    literals = {name: "none" if value is None else json.dumps(value) for name, value in variables.items()}
    return "".join(f"{{%- set {name} = {literal} %}}" for name, literal in literals.items()) + template


def _with_fixed_date(template: str) -> str:
    if "strftime_now" not in template or "macro strftime_now(" in template:
        return template
    replacements = "".join(f" | replace({code!r}, {text!r})" for code, text in _DATE.items())
    return f"{{%- macro strftime_now(format) %}}{{{{ format{replacements} }}}}{{%- endmacro %}}{template}"
