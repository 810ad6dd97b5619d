"""The components of a checkpoint: each saves and restores one kind of state."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.checkpoint.manifest import Checkpoint, FileEntry, read_object, reading
from trainer.checkpoint.sharded import ShardedFiles
from trainer.checkpoint.storage import Storage
from trainer.checkpoint.store import Ranks
from trainer.config import LOAD_COMPONENTS, Config
from trainer.errors import UserError, as_list
from trainer.files.atomic_io import digest_bytes, digest_file, digest_weights
from trainer.files.documents import ObjectShape, Shape, dump_yaml, parse_yaml
from trainer.files.hf_hub import pinned_data, revision_of
from trainer.files.redaction import redact
from trainer.models.files import (
    ADAPTER_CONFIG,
    BACKBONE_FILES,
    Contents,
    differences,
    read_content,
    read_contents,
    resolve_model_path,
)

LOG = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
_OF_RANKS = ("weights", "optimizer", "rng")


@dataclass(frozen=True)
class Restore:
    """The kinds of state that a resume restores from its checkpoint."""

    kinds: frozenset[str] = frozenset(LOAD_COMPONENTS)  # a subset of `LOAD_COMPONENTS`
    fork: bool = False  # the checkpoint belongs to another run
    added_steps: Mapping[str, int] = field(default_factory=dict)
    """The optimizer steps by which the learning rate schedule of each role moves (see `run.resume.added_steps`)."""

    def chosen(self, components: Sequence[Component], checkpoint: Checkpoint) -> list[Component]:
        """Return the components that hold state to restore. Those of another kind of run may be missing."""
        chosen = [one for one in components if self.kinds.intersection(one.kinds)]
        saved = checkpoint.manifest["parts"]
        for component in chosen:
            if component.if_missing and component.name not in saved:
                LOG.info("%s %s", checkpoint.path, component.if_missing)
        return [one for one in chosen if one.if_missing is None or one.name in saved]


Load = Callable[[Checkpoint, Restore], None]


def _load_nothing(checkpoint: Checkpoint, restore: Restore) -> None: ...


@dataclass(frozen=True)
class Component:
    """One kind of state in a checkpoint."""

    name: str
    begin: Callable[[Storage], Callable[[], list[FileEntry]]]
    """Takes a snapshot of the state and returns a function, without waiting. The function runs on another thread. It
    writes files to the staging area, or waits for the processes that write them, and returns the entries of the
    durable, hashed files."""
    load: Load = _load_nothing  # restores the state
    kinds: Collection[str] = ("state",)
    """The kinds of state that it holds, of `LOAD_COMPONENTS`: it is restored if a resume restores one of them, and then
    the checkpoint must have it. Empty: no resume restores it."""
    if_missing: str | None = None
    """What the log says of a checkpoint without it, which is then accepted. None: such a checkpoint is refused."""
    is_large: bool = False  # restored last, and only if every other component accepts its state


def files_component(
    name: str,
    content: Callable[[], dict[str, bytes]],
    load: Load = _load_nothing,
    kinds: Collection[str] = ("state",),
    if_missing: str | None = None,
) -> Component:
    """Make a component of small files: `content()` returns their bytes by path below the checkpoint."""

    def begin(staging: Storage) -> Callable[[], list[FileEntry]]:
        files = content()

        def write() -> list[FileEntry]:
            return [staging.write(path, data) for path, data in files.items()]

        return write

    return Component(name, begin, load, kinds, if_missing)


def json_component(
    name: str,
    state: Callable[[], dict],
    restore: Callable[[dict], None],
    shape: ObjectShape | None = None,
    kinds: Collection[str] = ("state",),
) -> Component:
    """Make a component that is saved as `{name}.json`. A file with a state of another `shape` is refused."""
    file = f"{name}.json"
    return files_component(
        name,
        lambda: {file: json.dumps(state(), indent=2, sort_keys=True).encode()},
        lambda checkpoint, _: restore(read_object(checkpoint, file, shape)),
        kinds,
    )


def config_component(cfg: Config) -> Component:
    """Make the component that holds the resolved config, without secrets, which a resume does not need."""
    return files_component(
        "config", lambda: {CONFIG_FILE: dump_yaml(redact(asdict(cfg))).encode()}, kinds=LOAD_COMPONENTS
    )


def config_digest(cfg: Config) -> str:
    """Return the xxh3-128 of the config. Secrets have no part in it, so they cannot be guessed from it."""
    import yaml

    return digest_bytes(yaml.safe_dump(redact(asdict(cfg), references=False), sort_keys=False).encode())


def read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the resolved config that a checkpoint was saved with, without secrets. Raises CorruptCheckpointError:
    `config.yaml` is missing, or is not a mapping of sections."""
    with reading(checkpoint.path, CONFIG_FILE):
        return parse_yaml(checkpoint.files.get(CONFIG_FILE), {str: dict})


def models_component(ranks: Ranks, files_of: Callable[[str], Any] = ShardedFiles) -> Component:
    """Make the component that the ranks write: weights, optimizers, schedules and RNG states of the saved roles.
    `files_of`: returns what writes and reads the states below a directory."""

    def begin(staging: Storage) -> Callable[[], list[FileEntry]]:
        finish = ranks.begin_save(files_of(staging.root))
        return lambda: [FileEntry(**entry) for entry in finish()]

    def load(checkpoint: Checkpoint, restore: Restore) -> None:
        files = files_of(checkpoint.files.root)
        kinds = set(restore.kinds.intersection(_OF_RANKS))
        for role in ranks.saved_roles:
            if role not in checkpoint.manifest["roles"] and restore.fork:
                LOG.info("the checkpoint holds no %s: it starts from scratch", role)
                continue
            ranks.load(role, files, kinds, restore.added_steps.get(role, 0))

    return Component("models", begin, load, kinds=_OF_RANKS, is_large=True)


def assets_component(assets: Mapping[str, bytes], adapter_config: Callable[[], str] | None = None) -> Component:
    """Make the component that holds the policy's config and tokenizer, in Hugging Face format.

    Args:
        assets: see `trainer.models.export.model_assets`.
        adapter_config: returns peft's config of the policy's adapters; None: the policy has no adapters.
    """

    def content() -> dict[str, bytes]:
        files = dict(assets)
        if adapter_config is not None:
            files[ADAPTER_CONFIG] = adapter_config().encode()
        return {f"policy/huggingface/{name}": data for name, data in files.items()}

    return files_component("huggingface", content, kinds=())


def is_allowed(key: str, allowed: Collection[str]) -> bool:
    """Return whether `trainer.allow_config_change` names this key or a section that contains it."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


# ---------------------------------------------------------------------------------------------------
# What the model directories gave to the run, so that a resume finds the same

WEIGHTS_FILE = "start_weights.json"
FILES_FILE = "start_files.json"
_FILES: dict[Any, Shape] = {"files": {str: dict}, "revisions": {str: str}}
_TEMPLATE = "model.chat_template"
_SMALL_MODEL_BYTES = 1 << 30  # models up to this size are read in about a second
_SAME_EMBEDDED = "give data and model.tiny.start_accuracy as in that run, so that the built-in model is the same"


def start_weights_component(cfg: Config, model_path: str) -> Component:
    """Make the component that holds fingerprints of the base weights, and the content of the model's other files.

    Checkpoints of LoRA runs, and of runs with a frozen reference, do not contain the base weights, so a resume must
    find the same files. The other files act on every run. The files are read on a thread while the ranks start. The
    files of the built-in model are not compared: this package makes them of the config.
    """
    allowed = cfg.trainer.allow_config_change
    names, on_servers = _path_names(cfg), {spec.path_key: spec.url for spec in cfg.servers}
    directories = _directories(cfg, model_path)
    needed = {key: directories.get(key, model_path) for key in _compared_keys(cfg) if key not in on_servers}
    threads = ThreadPoolExecutor(1)
    digests = {name: threads.submit(digest_weights, path) for name, path in needed.items()}
    digests |= {spec.path_key: threads.submit(lambda spec=spec: spec.server.weights) for spec in cfg.servers}
    named = needed | on_servers
    given = {name: threads.submit(_read, cfg, name, path) for name, path in directories.items()}
    threads.shutdown(wait=False)

    def content() -> dict[str, bytes]:
        weights = {name: digest.result() for name, digest in digests.items()}
        revisions = {names[key]: commit for key, path in directories.items() if (commit := revision_of(path))}
        revisions |= pinned_data()
        files = {"files": {name: found.result() for name, found in given.items()}, "revisions": revisions}
        documents = {WEIGHTS_FILE: weights, FILES_FILE: files}
        return {name: json.dumps(one, indent=1, sort_keys=True).encode() for name, one in documents.items()}

    def load(checkpoint: Checkpoint, restore: Restore) -> None:
        compared = _compared_keys(cfg, restore.fork)
        if restore.fork and not compared:
            return
        saved = read_object(checkpoint, WEIGHTS_FILE, {str: str})
        refused = []
        for name in compared:
            if saved.get(name) not in (None, digests[name].result()) and not is_allowed(name, allowed):
                remedy = _SAME_EMBEDDED if name == "model.path" and cfg.model.path is None else "restore them"
                remedy = remedy if name in needed else "start the server with those"
                refused.append(
                    f"{name}={named[name]}: its weights are not those that the run began with, and the checkpoint "
                    f"depends on those; {remedy}, or allow others with trainer.allow_config_change=[{name}]"
                )
        if refused := [*refused, *_refused_files(cfg, checkpoint, given, directories)]:
            raise UserError(as_list(f"{checkpoint.path} cannot be used with these models:", refused))

    return files_component("start_weights", content, load, ("weights",))


def _path_names(cfg: Config) -> dict[str, str]:
    """Return the directories and ids that the config names for initial weights, by the keys that name them."""
    names = {} if cfg.model.path is None else {"model.path": cfg.model.path}
    return names | {role.path_key: role.path for role in cfg.roles if role.path is not None}


def _directories(cfg: Config, model_path: str) -> dict[str, str]:
    """Return the directories of the initial weights that the config names, by the keys that name them."""
    paths = _path_names(cfg).items()
    return {key: model_path if key == "model.path" else resolve_model_path(name, key) for key, name in paths}


def _compared_keys(cfg: Config, fork: bool = False) -> list[str]:
    """Return the keys of the initial weights that a resume compares with those that the run began with.

    They are those with which the run still computes. A fork may replace a model that checkpoints do not hold.
    """
    roles = [role for role in cfg.roles if role.needs_initial_weights and (role.saved or not fork)]
    return list(dict.fromkeys(one.path_key for one in (*roles, *(() if fork else cfg.servers))))


def fingerprint_weights(cfg: Config, model_path: str, begins: bool) -> str:
    """Return a fingerprint of the initial weights with which the run still computes, and of the files beside them.

    The files beside the policy's weights, such as its tokenizer and its chat template, always count: no checkpoint
    replaces them. `begins`: of all initial weights: the run begins with them."""
    directories = _directories(cfg, model_path)
    if begins:
        directories["model.path"] = model_path
    on_servers = {spec.path_key: spec for spec in cfg.servers}
    compared = [key for key in _compared_keys(cfg) if key not in on_servers]
    needed = directories if begins else {key: directories.get(key, model_path) for key in compared}
    found = [f"{key}:{_fingerprint(path)}" for key, path in sorted(needed.items())]
    found += [f"{key}:{spec.server.weights}" for key, spec in sorted(on_servers.items())]
    if cfg.model.path is not None and not begins:
        given = read_contents(model_path, with_code=cfg.model.trust_remote_code)
        found.append(f"files of model.path:{digest_bytes(json.dumps(given, sort_keys=True).encode())}")
    return " ".join(found)


def _fingerprint(directory: str) -> str:
    """Return a digest of the files of a model. Large files of no known commit stand for their sizes and times."""
    commit = revision_of(directory)
    if commit is not None:
        return commit
    with os.scandir(directory) as entries:
        files = sorted((entry.name, entry.stat()) for entry in entries if entry.is_file())
    is_small = sum(status.st_size for _, status in files) <= _SMALL_MODEL_BYTES
    read = [
        digest_file(os.path.join(directory, name)) if is_small else f"{status.st_size} {status.st_mtime_ns}"
        for name, status in files
    ]
    return digest_bytes(" ".join(f"{name}:{one}" for (name, _), one in zip(files, read, strict=True)).encode())


def movable_paths(checkpoint: Checkpoint, cfg: Config) -> tuple[str, ...]:
    """Return the keys of model directories that may have another path now, because a resume compares their content.

    Weights need no comparison if the checkpoint holds all of them. Raises CorruptCheckpointError: a record of the
    checkpoint cannot be read."""
    files = _saved_files(checkpoint).get("files", {})
    weights = read_object(checkpoint, WEIGHTS_FILE, {str: str}, missing_ok=True)
    compared = _compared_keys(cfg)
    movable = [
        key
        for key, path in _path_names(cfg).items()
        if os.path.isdir(path)
        and key in files
        and (key in weights or key not in compared)
        and not is_allowed(key, cfg.trainer.allow_config_change)
    ]
    of_sources = [role for role in cfg.roles if role.source]  # one config key holds their paths
    if all(role.path_key in movable for role in of_sources):
        movable += [role.config_key for role in of_sources[:1]]
    return tuple(movable)


def read_revisions(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the commits of the Hub that the run began with, by the ids of models and data sets. Raises
    CorruptCheckpointError: the file cannot be read."""
    return _saved_files(checkpoint).get("revisions", {})


def _saved_files(checkpoint: Checkpoint) -> dict[str, Any]:
    return read_object(checkpoint, FILES_FILE, _FILES, missing_ok=True)


def _read(cfg: Config, name: str, path: str) -> Contents:
    if name != "model.path":
        return read_contents(path, cfg.model.trust_remote_code, BACKBONE_FILES)
    given = read_contents(path, cfg.model.trust_remote_code)
    if cfg.model.chat_template is not None and os.path.exists(cfg.model.chat_template):  # else it is a name
        given[_TEMPLATE] = read_content(cfg.model.chat_template)
    return given


def _refused_files(
    cfg: Config, checkpoint: Checkpoint, given: Mapping[str, Future[Contents]], paths: Mapping[str, str]
) -> list[str]:
    """Return a sentence for each model directory whose files are not those that the run began with."""
    saved, refused, allowed = _saved_files(checkpoint).get("files", {}), [], cfg.trainer.allow_config_change
    for name, found in given.items():
        before, now = saved.get(name), found.result()
        if before is None:
            continue
        files = sorted({*before, *now})
        if is_allowed(_TEMPLATE, allowed):
            files = [file for file in files if file != _TEMPLATE]
        changed = [change for file in files if (change := differences(file, before.get(file), now.get(file)))]
        if changed and not is_allowed(name, allowed):
            can_fork = not _compared_keys(cfg, fork=True)
            fork = "fork the checkpoint (trainer.resume_mode=from_path), " if can_fork else ""
            refused.append(
                f"{name}={paths[name]}: its files are not those that the run began with ({'; '.join(changed)}); "
                f"restore them, {fork}or allow others with trainer.allow_config_change=[{name}]"
            )
    return refused
