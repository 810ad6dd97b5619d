"""Find or download model directories, and read, check and compare their files. Cheap to import."""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trainer.config import ModelConfig
from trainer.config.tasks import POLICY_KEY
from trainer.errors import UserError, one_line
from trainer.files.atomic_io import digest_bytes, file_problem, open_regular
from trainer.files.documents import parse_json, parse_object
from trainer.files.hf_hub import first_line, pinned, why_missing, with_retries
from trainer.process.startup import importing

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

Contents = dict[str, Any]
"""By file name: the digests of the values of a JSON object by key, or a digest of another file's content."""

MODEL_FILES = (
    *("config.json", "generation_config.json", "adapter_config.json", "*processor_config.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "tekken.json"),
    *("*.model", "*.spm", "*.tiktoken", "chat_template*", "*.jinja", "additional_chat_templates/*"),
)
BACKBONE_FILES = ("config.json",)  # all that the critic's directory gives besides weights
_CODE = "**/*.py"
_BACKUPS = ("~", ".bak", ".orig", ".old")
"""Endings of the copies that editors and users leave. Nothing reads them."""
_HARMLESS = (
    *("transformers_version", "_name_or_path", "name_or_path", "_commit_hash"),
    *("tokenizer_file", "special_tokens_map_file", "is_local", "local_files_only"),
)
"""Keys that say who wrote a file, and where. They act on nothing."""
_RENAMED = {"torch_dtype": "dtype"}  # keys that newer versions of transformers write under another name
_SHOWN = 4  # changed keys that a message names


def read_contents(directory: str, with_code: bool, patterns: tuple[str, ...] = MODEL_FILES) -> Contents:
    """Return what the files of a model directory say, whatever the layout of JSON and the order of its keys; with those
    of its code if `with_code`. Raises UserError: a file cannot be read."""
    return {name: read_content(os.path.join(directory, name)) for name in content_files(directory, with_code, patterns)}


def content_files(directory: str, with_code: bool, patterns: tuple[str, ...]) -> list[str]:
    patterns = (*patterns, _CODE) if with_code else patterns
    found = {name for one in patterns for name in glob.glob(one, root_dir=directory, recursive=True)}
    is_read = {name for name in found if os.path.isfile(os.path.join(directory, name))}
    return sorted(name for name in is_read if not name.endswith(_BACKUPS))


def read_file(path: str) -> bytes:
    """Return the content of a file. Raises UserError: it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def read_content(path: str) -> Any:
    """Return what one file says (see `Contents`). Raises UserError: it cannot be read."""
    data = read_file(path)
    if path.endswith(".json"):
        with contextlib.suppress(ValueError):
            content = _without_harmless(parse_json(data))
            if isinstance(content, dict):
                return {key: _digest(value) for key, value in content.items()}
            return _digest(content)
    return digest_bytes(data)


def differences(name: str, saved: Any, now: Any) -> str:
    """Return in what two contents of the file `name` (None: there is no file) differ; empty if they are the same."""
    if saved == now:
        return ""
    if saved is None or now is None:
        return f"{name} is {'new' if saved is None else 'missing'}"
    if not (isinstance(saved, Mapping) and isinstance(now, Mapping)):
        return f"{name} has another content"
    keys = sorted(key for key in {*saved, *now} if saved.get(key) != now.get(key))
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"{name} has other values of {', '.join(map(one_line, keys[:_SHOWN]))}{more}"


def _without_harmless(value: Any) -> Any:
    """Return a JSON value without the keys that act on nothing, and with the newer names of others."""
    if isinstance(value, dict):
        return {_RENAMED.get(key, key): _without_harmless(one) for key, one in value.items() if key not in _HARMLESS}
    return value


def _digest(value: Any) -> str:
    return digest_bytes(json.dumps(value, sort_keys=True).encode())


_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")
"""Names of modules and buffers with a row for each position that a model knows."""
_LOWER = "lower rollout.max_prompt_tokens, rollout.max_response_tokens or environment.max_tokens (sft.max_length)"


def fit_rotations(config: PretrainedConfig, longest: int, setting: str) -> None:
    """Choose the factors of the rotations in `config` by the run's longest sequence, as vLLM does.

    transformers chooses LongRoPE's factors by the longest sequence of a batch, and stretches dynamic rotations by it:
    the log-probs of a sequence would depend on the sequences that are computed with it. Raises UserError: the rotations
    are dynamic, and a sequence of `longest` tokens would stretch them. It names `setting`."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or longest
    for rotations in rotations_of(text):
        if rotations["rope_type"] == "longrope":
            original = rotations.get("original_max_position_embeddings")
            original = original or getattr(text, "original_max_position_embeddings", None) or positions
            for name in ("factor", "mscale") if longest > original else ():
                if f"long_{name}" in rotations:
                    rotations[f"short_{name}"] = rotations[f"long_{name}"]
        elif "dynamic" in rotations["rope_type"] and longest > positions:
            raise UserError(
                f"{setting}: its rotations are dynamic, which depend on the longest sequence of a batch beyond "
                f"{positions} tokens (max_position_embeddings), and the run has sequences of up to {longest}; {_LOWER}"
            )


def check_position_table(module: nn.Module, longest: int, setting: str) -> None:
    """Raise a `UserError` for a model whose table of positions is shorter than the longest sequence."""
    for name, table in (*module.named_parameters(), *module.named_buffers()):
        if table.ndim == 2 and any(part in _TABLES for part in name.split(".")):
            owner = module.get_submodule(name.rpartition(".")[0])
            positions = table.shape[0] - getattr(owner, "offset", 0)
            if longest > positions:
                raise UserError(
                    f"{setting}: has a table of {positions} positions, and the run has sequences of up to {longest} "
                    f"tokens; {_LOWER}"
                )


def rotations_of(text: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of the rotations of all layers, or of each type of layers."""
    found = getattr(text, "rope_parameters", None)
    every = [found, *(found.values() if isinstance(found, Mapping) else ())]
    return [one for one in every if isinstance(one, dict) and "rope_type" in one]


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as peft names them
_MODEL_FILES = ("*.json", "model*.safetensors", "*.bin", "*.py", *MODEL_FILES)
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
_ROWS = 1 << 14  # rows of a vocabulary that are compared at a time


def resolve_model_path(path: str, key: str = POLICY_KEY, files: Iterable[str] = _MODEL_FILES) -> str:
    """Return the absolute local directory of a model: `path` itself, or the Hub snapshot with that id.

    A snapshot is downloaded once. Its commit is that with which the run started (see `trainer.files.hf_hub.pin`),
    otherwise that of `main`.

    Args:
        key: names the path in messages (see `RoleSpec.path_key`).
        files: patterns of the files to download.

    Raises:
        UserError: neither exists, or a file of the model cannot be used (see `check_model_files`).
    """
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "config.json")):
            below = ("*", "*/*", "exports/global_step_*/policy")
            found = [glob.glob(f"{glob.escape(path)}/{directory}/config.json") for directory in below]
            inside = [max(files, key=lambda file: (len(file), file)) for files in found if files]
            instead = f"; {os.path.dirname(inside[-1])} has one" if inside else ""
            if not inside and os.path.exists(os.path.join(path, "metrics.jsonl")):
                instead = f"; it is a run: trainer checkpoint export {shlex.quote(path)} DIRECTORY makes one of it"
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
        snapshot = with_retries(lambda: snapshot_download(path, revision=commit, allow_patterns=[*files]))
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
    """Let `config` say that head and embedding are not tied, if those in the files in `path` differ. transformers and
    vLLM use such a head, whatever the config says."""
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
    """Return whether two tensors, each named by its file and its name there, have different values. `written` is the
    time of the first file, so that a new file is read again."""
    import torch
    from safetensors import safe_open

    with safe_open(one[0], framework="pt") as first, safe_open(other[0], framework="pt") as second:
        a, b = first.get_slice(one[1]), second.get_slice(other[1])
        return not all(
            torch.equal(a[row : row + _ROWS].float(), b[row : row + _ROWS].float())
            for row in range(0, a.get_shape()[0], _ROWS)
        )


def load_trained_config(
    model: ModelConfig, path: str, key: str = POLICY_KEY, longest: int | None = None
) -> PretrainedConfig:
    """Return the architecture config of a model that ranks compute with (see `load_config`). Engines can do more.

    Args:
        longest: most tokens of a sequence in the run (see `fit_rotations`). None: the model is not to compute.

    Raises:
        UserError: its weights are quantised, it reads more than text, its config.json cannot be used, or its rotations
            depend on the batch.
    """
    config = load_config(model, path, key)
    check_trained(config, f"{key}={path}")
    if longest is not None:
        fit_rotations(config, longest, f"{key}={path}")
    if os.path.isdir(path) and (tensor := quantised_tensor(path)) is not None:
        raise UserError(f"{key}={path}: its weights are quantised ({tensor}); {_UNQUANTISED}")
    return config


def check_torchvision(model: ModelConfig, path: str) -> None:
    """Raise a `UserError` for a model whose class in vLLM imports torchvision, if that cannot be imported."""
    kind = load_config(model, path).model_type
    if not kind.startswith(_WITH_TORCHVISION):
        return
    if find_spec("torchvision") is None:
        raise UserError(
            f"rollout.engine=vllm: vLLM's class of {POLICY_KEY}={path} ({kind}) imports torchvision, which the CPU set "
            "leaves out; install the torchvision that fits this torch, or choose rollout=transformers"
        )
    from trainer.parallel import mesh

    mesh.check_torchvision(is_needed=True)


def check_trained(config: PretrainedConfig, setting: str) -> None:
    """Refuse a config, named by `setting`, of quantised weights, or of a model that reads more than text."""
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
    """Refuse the config of a language model, named by `setting` (`KEY=VALUE`), if one of these fields is below 1."""
    for name in names:
        size = getattr(text, name, None)
        if isinstance(size, int) and size < 1:
            raise UserError(f"{setting}: {name} of its config.json must be at least 1, and is {size}")


# ---------------------------------------------------------------------------------------------------
# The files by type and header, before a library reads them

_READ = (".json", ".txt", ".model", ".tiktoken", ".spm", ".safetensors", ".bin", ".jinja", ".py")
"""Endings of the files that the libraries read, or could read."""
_QUANTISED_TYPES = ("F8", "F6", "F4")
_SINGLE_FILE, _INDEX_IN_USE = "model.safetensors", "model.safetensors.index.json"
_START_OF_POINTER = b"version https://git-lfs.github.com/"
_STARTS_OF_BIN = (b"PK\x03\x04", b"\x80\x02")  # a zip file, or the pickle of torch's older format


def check_model_files(path: str, key: str) -> None:
    """Check the files of the model directory `path`. Files that this process has checked before are not read again.

    Args:
        key: names the directory in messages.

    Raises:
        UserError: a file is no regular file, or has a header that cannot be true; or an index names a file outside of
            the directory; or there is an adapter, which transformers would apply, with the weights that it saves whole.
    """
    if os.path.exists(os.path.join(path, ADAPTER_CONFIG)):
        problem = f"has an adapter ({ADAPTER_CONFIG}), which would not be applied"
        raise UserError(f"{key}={path}: {problem}; merge it (peft: merge_and_unload), and name the merged model")
    for name in sorted(os.listdir(path)):
        if name.endswith(_READ):
            try:
                file = os.path.join(path, name)
                if (problem := file_problem(file)) is not None:
                    raise ValueError(f"it {problem}")
                status = os.stat(file)
                _check_content(file, name, status.st_size, status.st_mtime_ns)
            except (OSError, ValueError) as error:
                raise UserError(f"{key}={path}: its {name} cannot be used ({one_line(str(error))})") from error


def tensors_in(file: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of the tensors in a safetensors file, by name. The library checks the header.

    Raises:
        OSError: the file cannot be read, or is no regular file.
        ValueError: its header cannot be true.
    """
    from safetensors import SafetensorError, safe_open

    with open_regular(file):
        pass
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in slices.items()}
    except SafetensorError as error:
        raise ValueError(first_line(error)) from error


def weight_files(path: str) -> list[str]:
    """Return the safetensors files that hold the weights of the directory `path`, as transformers chooses them. One
    file of the usual name goes before an index, even if the index names others. Empty: there is neither. OSError,
    ValueError: see `_files_of_index`."""
    single, index = os.path.join(path, _SINGLE_FILE), os.path.join(path, _INDEX_IN_USE)
    if os.path.isfile(single):
        return [single]
    return _files_of_index(index) if os.path.isfile(index) else []


def weight_shapes(path: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the file and the shape of each tensor in the `weight_files` of the directory `path`, by name. Raises
    ValueError: a file cannot be used, or a tensor is in two files."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    try:
        files = weight_files(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"its {_INDEX_IN_USE} cannot be used ({one_line(str(error))})") from error
    for file in files:
        for name, (_, shape) in _usable_tensors(file).items():
            if name in found:
                names = [os.path.basename(one) for one in (found[name][0], file)]
                raise ValueError(f"its {names[0]} and {names[1]} both hold {one_line(name)}; remove one of them")
            found[name] = file, shape
    return found


def _usable_tensors(file: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    try:
        return tensors_in(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"its {os.path.basename(file)} cannot be used ({one_line(str(error))})") from error


def check_one_reading(path: str, key: str) -> None:
    """Raise a `UserError` if vLLM would read a weight in `path`, which messages call `key`, from another file than
    transformers. vLLM reads the files of the index, and without an index all safetensors files."""
    try:
        own = weight_shapes(path)
        index, every = os.path.join(path, _INDEX_IN_USE), os.path.join(glob.escape(path), "*.safetensors")
        others = _files_of_index(index) if os.path.isfile(index) else glob.glob(every)
        for file in sorted(set(others) - {file for file, _ in own.values()}):
            if twice := own.keys() & _usable_tensors(file).keys():
                name = min(twice)
                raise ValueError(
                    f"transformers reads {one_line(name)} from {os.path.basename(own[name][0])}, and vLLM from "
                    f"{os.path.basename(file)}; remove the file that is not of this model"
                )
    except (OSError, ValueError) as error:
        raise UserError(f"{key}={path}: {error}") from error


def _files_of_index(index: str) -> list[str]:
    """Return the files that an index names, sorted. Raises OSError: it cannot be read. Raises ValueError: it is no
    index, or names a file outside of its directory."""
    with open_regular(index) as opened:
        files = sorted(set(parse_object(opened.read(), {"weight_map": {str: str}})["weight_map"].values()))
    for file in files:
        if os.path.isabs(file) or ".." in file.split("/") or not file.isprintable():
            raise ValueError(f"it names the file {one_line(repr(file))}, which is not in its directory")
    return [os.path.join(os.path.dirname(index), file) for file in files]


def quantised_tensor(path: str) -> str | None:
    """Return the name and the type of a quantised weight in the safetensors files of the directory `path`, if any.

    A library that does not know of the quantisation would read the numbers without their scales. Integers are weights
    only under the name of one: masks and tables of tokens are integers too. Files that cannot be read are left out.
    """
    with contextlib.suppress(OSError, ValueError):
        for file in weight_files(path):
            for name, (kind, _) in tensors_in(file).items():
                if kind.startswith(_QUANTISED_TYPES) or (kind in ("I8", "U8") and name.endswith("weight")):
                    return f"{one_line(name)} has the type {kind}"
    return None


@functools.cache
def _check_content(file: str, name: str, size: int, written: int) -> None:
    with open_regular(file) as opened:
        if opened.read(len(_START_OF_POINTER)) == _START_OF_POINTER:
            raise ValueError("it is a pointer of Git LFS, not the file itself; run `git lfs pull` in that directory")
    if name == "config.json":
        with open_regular(file) as opened:
            parse_object(opened.read())
    elif name.endswith(".index.json"):
        shards = _files_of_index(file)
        # Downloads often leave out weights in a second format, but not their index.
        if name != _INDEX_IN_USE and not any(map(os.path.lexists, shards)):
            return
        for shard in shards:
            if (problem := file_problem(shard)) is not None:
                raise ValueError(f"it names {os.path.relpath(shard, os.path.dirname(file))}, which {problem}")
    elif name.endswith(".safetensors"):
        tensors_in(file)
    elif name.startswith("pytorch_model") and name.endswith(".bin"):
        with open_regular(file) as opened:
            if not opened.read(4).startswith(_STARTS_OF_BIN):
                raise ValueError("it is no file of torch")
