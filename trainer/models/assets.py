"""The files of a model's directory except weights: the user's own, with what a run has changed in them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from trainer.config import SCORE, VALUE, Config, ModelConfig
from trainer.config.fields import config_error
from trainer.errors import UserError
from trainer.files.documents import parse_object
from trainer.files.hf_hub import first_line
from trainer.models.files import ADAPTER_CONFIG, load_config, untie_own_head
from trainer.models.given import MODEL_FILES, given_files
from trainer.models.heads import classifier_fields
from trainer.models.tokenizer import tokenizer_changes

CONFIG = "config.json"
WEIGHTS_ONLY = (CONFIG, "generation_config.json")
"""Files that describe whole weights. A directory with adapters alone lacks them."""
_TOKENIZER_CONFIG, _TEMPLATE, _TEMPLATES = "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/"


def policy_assets(cfg: Config, model_path: str, tokenizer: Any) -> dict[str, bytes]:
    """Return the files of a run's policy (see `model_assets`).

    Raises:
        UserError: a file cannot be read, or the policy has a head that no export can have.
    """
    policy = cfg.roles[0]
    changes = config_changes(cfg.model, model_path)
    if policy.head == VALUE and cfg.trainer.hf_save_interval > 0:
        raise config_error(cfg, "trainer.hf_save_interval", "the policy has a head for values, which no class of "
                           "transformers reads; choose -1, or the head score")  # fmt: skip
    if policy.head == SCORE:
        if policy.has_adapters and cfg.trainer.hf_save_lora == "adapter":
            raise config_error(cfg, "trainer.hf_save_lora", "the policy has a score head, which an adapter's files "
                               "lack; choose merged")  # fmt: skip
        config = load_config(cfg.model, model_path)
        changes |= classifier_fields(config, tokenizer, f"model.path={model_path}", cfg.model.trust_remote_code)
    return model_assets(model_path, tokenizer, changes)


def model_assets(model_path: str, tokenizer: Any, changes: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """Return the files, by their paths in the directory.

    They are copies, because a library that writes them again loses or refuses something: invalid generation configs,
    modules of the model's own code, unknown fields. Code is among them if a config names it.

    Args:
        tokenizer: of the run (see `load_tokenizer`).
        changes: of config.json (see `config_changes`).

    Raises:
        UserError: a file cannot be read.
    """
    patterns = (*MODEL_FILES, *getattr(tokenizer, "vocab_files_names", {}).values())
    files = {name: _read(model_path, name) for name in given_files(model_path, False, patterns)}
    if any(name.endswith(CONFIG) and b'"auto_map"' in data for name, data in files.items()):
        code = [name for name in given_files(model_path, True, ()) if name not in files]
        files |= {name: _read(model_path, name) for name in code}
    files.pop(ADAPTER_CONFIG, None)  # the weights are merged
    try:
        if changes:
            files[CONFIG] = changed_json(files[CONFIG], changes)
        return _with_changes(files, tokenizer_changes(tokenizer))
    except ValueError as error:
        raise UserError(f"model.path={model_path}: a JSON file there cannot be read ({first_line(error)})") from error


def config_changes(model: ModelConfig, path: str) -> dict[str, Any]:
    """Return the fields of the policy's config.json that differ from the one in the directory `path`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    is_tied = config.tie_word_embeddings
    untie_own_head(config, path)
    return {} if config.tie_word_embeddings == is_tied else {"tie_word_embeddings": config.tie_word_embeddings}


def _read(directory: str, name: str) -> bytes:
    path = os.path.join(directory, name)
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _with_changes(files: dict[str, bytes], changes: Mapping[str, Any]) -> dict[str, bytes]:
    if not changes:
        return files
    config = parse_object(files.get(_TOKENIZER_CONFIG, b"{}"))
    if "pad_token" in changes:
        config["pad_token"] = changes["pad_token"]
    if "chat_template" in changes:
        config.pop("chat_template", None)
        replaced = (_TEMPLATE, "chat_template.json")
        files = {name: data for name, data in files.items() if name not in replaced and not name.startswith(_TEMPLATES)}
        template = changes["chat_template"]
        for name, text in (template if isinstance(template, dict) else {"default": template}).items():
            files[_TEMPLATE if name == "default" else f"{_TEMPLATES}{name}.jinja"] = text.encode()
    return files | {_TOKENIZER_CONFIG: _json(config)}


def with_dtype(config: bytes, dtype: str) -> bytes:
    """Return a config.json that says that its weights are `dtype`."""
    names = [name for name in ("dtype", "torch_dtype") if name in parse_object(config)]  # the latter is the older name
    return changed_json(config, dict.fromkeys(names or ["dtype"], dtype))


def changed_json(data: bytes, changes: Mapping[str, Any]) -> bytes:
    """Return a JSON file with other values of some fields. It stays as it is if it has these values already."""
    content = parse_object(data)
    return data if content == {**content, **changes} else _json({**content, **changes})


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
