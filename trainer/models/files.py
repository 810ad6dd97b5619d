"""Find or download model directories, and read their files except weights. Cheap to import."""

from __future__ import annotations

import functools
import glob
import os
import shlex
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trainer.config import Config, ModelConfig
from trainer.config.role_specs import POLICY_KEY
from trainer.errors import UserError
from trainer.files.hf_hub import first_line, pinned, why_missing, with_retries
from trainer.models.given import MODEL_FILES
from trainer.models.heads import check_head
from trainer.models.rotations import fit_rotations
from trainer.models.untrusted import check_model_files, quantised_tensor, weight_shapes
from trainer.process.startup import importing

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as peft names them
_MODEL_FILES = ["*.json", "model*.safetensors", "*.bin", "*.py", *MODEL_FILES]
"""The files to download. They include all files that a checkpoint compares, on every machine."""
_SIZES = ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")
"""Fields of a config.json by which the code of a model divides. None but these fails without naming the field."""
_QUANTISED = ("quantization_config", "compression_config")
"""Fields of the config.json of a model with quantised weights."""
_MEDIA = ("vision", "image", "video", "audio", "speech", "vq")
"""Words in the names of the parts of a config.json that describe how a model reads more than text."""

_WITH_TORCHVISION = ("qwen3_5",)
"""Beginnings of the types of models whose classes in vLLM stand in modules that also read images."""

_UNQUANTISED = "save the model with weights of 16 bits, as docs/models.md shows, and name that directory"

_HEAD, _EMBEDDING = "lm_head.weight", ("embed", "wte")
"""End of the name of an output head, and parts of those of the embeddings that families tie to it."""
_ROWS = 1 << 14
"""Rows of a vocabulary that are compared at a time."""


def resolve_model_path(path: str, key: str = POLICY_KEY) -> str:
    """Return the absolute local directory of a model: `path` itself, or the Hub snapshot with that id.

    A snapshot is downloaded once. Its commit is that with which the run started (see `trainer.files.hf_hub.pin`),
    otherwise that of `main`.

    Args:
        key: names the path in messages (see `RoleSpec.key`).

    Raises:
        UserError: neither exists, or a file of the model cannot be used (see `check_model_files`).
    """
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "config.json")):
            below = (os.path.join(glob.escape(path), *depth, "config.json") for depth in (["*"], ["*", "*"]))
            inside = [file for pattern in below for file in sorted(glob.glob(pattern))]
            instead = f"; {os.path.dirname(inside[-1])} has one" if inside else ""
            if os.path.exists(os.path.join(path, "manifest.json")):
                instead = f"; it is a checkpoint: trainer checkpoint export {shlex.quote(path)} DIRECTORY converts it"
            raise UserError(
                f"{key}={path}: the directory has no config.json, so it contains no Hugging Face model{instead}"
            )
        check_model_files(path, key)
        return os.path.abspath(path)  # ranks on an existing cluster have a different working directory
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    commit = pinned(path)
    try:
        snapshot = with_retries(lambda: snapshot_download(path, revision=commit, allow_patterns=_MODEL_FILES))
    except (HFValidationError, OSError) as error:  # the Hub's HTTP errors are OSErrors
        at = "" if commit is None else f" at the commit {commit} that the run began with"
        raise UserError(
            f"{key}={path}{at}: {why_missing(error)}; name a directory with a Hugging Face model, or the id of one of "
            "the Hub"
        ) from error
    check_model_files(snapshot, key)
    return snapshot


def cache_directory(model: ModelConfig) -> str:
    """Return the directory of what is kept from one run for later ones."""
    return os.path.expanduser(model.cache_dir or os.environ.get("TRAINER_CACHE") or "~/.cache/trainer")


def import_configs() -> None:
    """Import the part of transformers that `load_config` needs, which takes about a second."""
    with importing():
        from transformers import AutoConfig  # noqa: F401


def load_config(model: ModelConfig, path: str, key: str = POLICY_KEY) -> PretrainedConfig:
    """Return the architecture config of the model at `path`, which messages call `key`."""
    with importing():
        from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
        text = config.get_text_config()
    except Exception as error:  # a corrupt config.json can raise any exception
        raise UserError(f"{key}={path}: its config.json cannot be used ({first_line(error)})") from error
    check_sizes(text, _SIZES, f"{key}={path}")
    untie_own_head(config, path)
    return config


def untie_own_head(config: PretrainedConfig, path: str) -> None:
    """Let `config` say that head and embedding are not tied, if those in the files in `path` differ.

    transformers and vLLM use such a head, whatever the config says.
    """
    text = config.get_text_config()
    if not (getattr(config, "tie_word_embeddings", False) or getattr(text, "tie_word_embeddings", False)):
        return
    try:
        found = weight_shapes(path)
    except ValueError:  # whoever loads the weights says so
        return
    heads = [name for name in found if name.endswith(_HEAD)]
    for head in heads:
        file, shape = found[head]
        same = [name for name in found if found[name][1] == shape and any(word in name for word in _EMBEDDING)]
        if any(_differ((file, head), (found[name][0], name), os.stat(file).st_mtime_ns) for name in same):
            config.tie_word_embeddings = text.tie_word_embeddings = False


@functools.cache
def _differ(one: tuple[str, str], other: tuple[str, str], written: int) -> bool:
    """Return whether two tensors, each named by its file and its name there, have different values.

    Args:
        written: when the first file was written, so that a new file is read again.
    """
    import torch
    from safetensors import safe_open

    with safe_open(one[0], framework="pt") as first, safe_open(other[0], framework="pt") as second:
        a, b = first.get_slice(one[1]), second.get_slice(other[1])
        return not all(
            torch.equal(a[row : row + _ROWS].float(), b[row : row + _ROWS].float())
            for row in range(0, a.get_shape()[0], _ROWS)
        )


def check_trained_models(cfg: Config) -> None:
    """Check the models that the config names for the ranks, before anything expensive starts.

    Raises:
        UserError: one cannot be used (see `load_trained_config`).
    """
    for role in cfg.roles:
        if (path := role.path or cfg.model.path) is not None:
            path = resolve_model_path(path, role.key)
            config = load_trained_config(cfg.model, path, role.key, cfg.longest_row)
            check_head(config, role, path, cfg.model.trust_remote_code)


def load_trained_config(
    model: ModelConfig, path: str, key: str = POLICY_KEY, longest: int | None = None
) -> PretrainedConfig:
    """Return the architecture config of a model that ranks compute with (see `load_config`).

    Engines alone can do more: an evaluation may be of a quantised model.

    Args:
        longest: most tokens of a sequence in the run (see `fit_rotations`). None: the model is not to compute.

    Raises:
        UserError: its weights are quantised, or it reads more than text, or its config.json cannot be used, or its
            rotations depend on the batch.
    """
    config = load_config(model, path, key)
    check_trained(config, f"{key}={path}")
    if longest is not None:
        fit_rotations(config, longest, f"{key}={path}")
    if os.path.isdir(path) and (tensor := quantised_tensor(path)) is not None:
        raise UserError(f"{key}={path}: its weights are quantised ({tensor}); {_UNQUANTISED}")
    return config


def check_torchvision(model: ModelConfig, path: str) -> None:
    """Refuse a model whose class in vLLM imports torchvision where that is not installed, before an engine starts.

    Raises:
        UserError: see above.
    """
    kind = load_config(model, path).model_type
    if kind.startswith(_WITH_TORCHVISION) and find_spec("torchvision") is None:
        raise UserError(
            f"rollout.engine=vllm: vLLM's class of {POLICY_KEY}={path} ({kind}) imports torchvision, which the CPU set "
            "leaves out; install the torchvision that fits this torch, or choose rollout=transformers"
        )


def check_trained(config: PretrainedConfig, setting: str) -> None:
    """Refuse a config of quantised weights, and one of a model that reads more than text.

    Args:
        setting: what the user has set, `KEY=VALUE`.
    """
    for field in _QUANTISED:
        if values := getattr(config, field, None):
            method = values.get("quant_method") if isinstance(values, dict) else getattr(values, "quant_method", None)
            raise UserError(f"{setting}: its weights are quantised ({method or field}); {_UNQUANTISED}")
    parts = [
        name
        for name, value in vars(config).items()
        if value is not None and name.endswith("_config") and any(word in name for word in _MEDIA)
    ]
    if parts or config.get_text_config() is not config:
        kind = (config.architectures or [f"a model of the type {config.model_type}"])[0]
        parts = " and ".join(parts) or "a text model inside another"
        raise UserError(
            f"{setting}: {kind} reads more than text (config.json has {parts}), and only text models can be trained; "
            "save its text part as a directory of its own, as docs/models.md shows, and name that"
        )


def check_sizes(text: PretrainedConfig, names: Iterable[str], setting: str) -> None:
    """Refuse the config of a language model if one of these fields is below 1.

    Args:
        setting: what the user has set, `KEY=VALUE`.
    """
    for name in names:
        size = getattr(text, name, None)
        if isinstance(size, int) and size < 1:
            raise UserError(f"{setting}: {name} of its config.json must be at least 1, and is {size}")
