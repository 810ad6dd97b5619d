"""Write models as Hugging Face directories: their files but the weights, and the directory as one. Cheap to import."""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trainer.config import SCORE, VALUE, Config, ModelConfig
from trainer.config.fields import config_error
from trainer.errors import UserError
from trainer.files.atomic_io import sync_path, sync_tree
from trainer.files.documents import parse_object
from trainer.files.hf_hub import first_line
from trainer.models import files as model_files
from trainer.models.checks import classifier_fields
from trainer.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.models.tokenizer import tokenizer_changes
from trainer.process.failpoints import failpoint

CONFIG = "config.json"
WEIGHTS_ONLY = (CONFIG, "generation_config.json")
"""Files that describe whole weights. A directory with adapters alone lacks them."""
_TOKENIZER_CONFIG, _TEMPLATE, _TEMPLATES = "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/"


def policy_assets(cfg: Config, model_path: str, tokenizer: Any) -> dict[str, bytes]:
    """Return the files of a run's policy (see `model_assets`). Raises UserError: a file cannot be read, or the policy
    has a head that no export can have."""
    policy = cfg.roles[0]
    changes = config_changes(cfg.model, model_path)
    if policy.head == VALUE and cfg.trainer.hf_save_interval > 0:
        raise config_error(
            cfg,
            "trainer.hf_save_interval",
            "the policy has a head for values, which no class of transformers reads; choose -1, or the head score",
        )
    if policy.head == SCORE:
        if policy.has_adapters and cfg.trainer.hf_save_lora == "adapter":
            raise config_error(
                cfg, "trainer.hf_save_lora", "the policy has a score head, which an adapter's files lack; choose merged"
            )
        config = model_files.load_config(cfg.model, model_path)
        changes |= classifier_fields(config, tokenizer, f"model.path={model_path}", cfg.model.trust_remote_code)
    return model_assets(model_path, tokenizer, changes)


def model_assets(model_path: str, tokenizer: Any, changes: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """Return the files, by their paths in the directory, with these changes of config.json.

    They are copies, because a library that writes them again loses or refuses something: invalid generation configs,
    modules of the model's own code, unknown fields. Code is among them if a config names it. Raises UserError: a file
    cannot be read."""
    patterns = (*model_files.MODEL_FILES, *getattr(tokenizer, "vocab_files_names", {}).values())

    def read(names: list[str]) -> dict[str, bytes]:
        return {name: model_files.read_file(os.path.join(model_path, name)) for name in names}

    files = read(model_files.content_files(model_path, False, patterns))
    if any(name.endswith(CONFIG) and b'"auto_map"' in data for name, data in files.items()):
        files |= read([name for name in model_files.content_files(model_path, True, ()) if name not in files])
    files.pop(ADAPTER_CONFIG, None)  # the weights are merged
    of_tokenizer = tokenizer_changes(tokenizer)
    try:
        if changes:
            files[CONFIG] = changed_json(files[CONFIG], changes)
        if not of_tokenizer:
            return files
        config = parse_object(files.get(_TOKENIZER_CONFIG, b"{}"))
    except ValueError as error:
        raise UserError(f"model.path={model_path}: a JSON file there cannot be read ({first_line(error)})") from error
    if "pad_token" in of_tokenizer:
        config["pad_token"] = of_tokenizer["pad_token"]
    if "chat_template" in of_tokenizer:
        config.pop("chat_template", None)
        replaced = (_TEMPLATE, "chat_template.json")
        files = {name: data for name, data in files.items() if name not in replaced and not name.startswith(_TEMPLATES)}
        template = of_tokenizer["chat_template"]
        for name, text in (template if isinstance(template, dict) else {"default": template}).items():
            files[_TEMPLATE if name == "default" else f"{_TEMPLATES}{name}.jinja"] = text.encode()
    return files | {_TOKENIZER_CONFIG: _json(config)}


def config_changes(model: ModelConfig, path: str) -> dict[str, Any]:
    """Return the fields of the policy's config.json that differ from the one in `path`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    is_tied = config.tie_word_embeddings
    model_files.untie_own_head(config, path)
    return {} if config.tie_word_embeddings == is_tied else {"tie_word_embeddings": config.tie_word_embeddings}


def with_dtype(config: bytes, dtype: str) -> bytes:
    names = [name for name in ("dtype", "torch_dtype") if name in parse_object(config)]  # the latter is the older name
    return changed_json(config, dict.fromkeys(names or ["dtype"], dtype))


def changed_json(data: bytes, changes: Mapping[str, Any]) -> bytes:
    """Return a JSON file with other values of some fields. It stays as it is if it has these values already."""
    content = parse_object(data)
    return data if content == {**content, **changes} else _json({**content, **changes})


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


MADE_LAST = ("config.json", ADAPTER_CONFIG)
"""No model can be loaded without one of these files. An export is whole where one is there."""
_WRITING = ".writing-"


def export_target(cfg: Config, step: int) -> str:
    return os.path.join(cfg.trainer.export_path, f"global_step_{step}", "policy")


@dataclass(frozen=True)
class PolicyExporter:
    """Exports the policy of a job.

    Args:
        ranks: those that have the policy (`TrainWorkers`).
        model_path: directory of the initial weights.
        assets: the files except weights (see `model_assets`).
        adapter_alone: write only the adapter in peft's format and the tokenizer.
        fence: raises if this process no longer holds the run directory. Then nothing is published.
    """

    ranks: Any
    model_path: str
    assets: Mapping[str, bytes]
    adapter_alone: bool
    fence: Callable[[], None]

    def export(self, target: str, dtype: str) -> None:
        """Write the policy as `dtype` to the directory `target`, atomically, in place of an earlier export there."""

        def before_publishing(target: str) -> None:
            self.fence()
            check_replaceable(target)
            shutil.rmtree(target, ignore_errors=True)  # written by the killed run, with identical content

        self.fence()
        for leftover in glob.glob(f"{glob.escape(target)}{_WRITING}*"):  # of a killed export
            shutil.rmtree(leftover, ignore_errors=True)
        with atomic_directory(target, before_publishing) as writing:
            if self.adapter_alone:
                files = {name: data for name, data in self.assets.items() if name not in WEIGHTS_ONLY}
                files[ADAPTER_CONFIG] = self.ranks.call_one("policy", "adapter_config", self.model_path).encode()
                files[ADAPTER_WEIGHTS] = self.ranks.call("policy", "adapter_weights")
            else:
                # First: a disk without room then fails here, and not in a rank, whose failure ends the ranks.
                write_files(writing, {name: data for name, data in self.assets.items() if name != CONFIG})
                written = self.ranks.call("policy", "write_weights", writing, dtype)
                files = {CONFIG: with_dtype(self.assets[CONFIG], written)}
            write_files(writing, files)
            failpoint("export:written")


def check_replaceable(target: str) -> None:
    """Raise a `UserError` if there is more at `target` than an empty directory or an earlier export."""
    place = f"trainer.export_path={os.path.dirname(os.path.dirname(target))}"
    if os.path.lexists(os.path.join(os.path.dirname(target), "manifest.json")):
        raise UserError(f"{place}: {os.path.dirname(target)} is a checkpoint; choose another directory for exports")
    if not os.path.lexists(target):
        return
    names = os.listdir(target) if os.path.isdir(target) and not os.path.islink(target) else ["no directory"]
    if not names or not {*MADE_LAST}.isdisjoint(names):
        return
    raise UserError(
        f"{place}: {target} is not an export of a policy, so no export replaces it; move it away, or choose another "
        "directory for exports"
    )


@contextmanager
def atomic_directory(target: str, before_publishing: Callable[[str], None] = lambda target: None) -> Iterator[str]:
    """Yield a new directory to fill, and rename it to `target` at the end of the block. Delete it if the block fails.

    Its name has a random token, so that a surviving process of a killed run cannot write into it. `before_publishing`
    is called with `target` immediately before the rename.
    """
    target = os.path.abspath(target)
    writing = f"{target}{_WRITING}{secrets.token_hex(4)}"
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.mkdir(writing)
    try:
        yield writing
        sync_tree(writing)
        before_publishing(target)
        os.rename(writing, target)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    sync_path(os.path.dirname(target))


def write_files(directory: str, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
