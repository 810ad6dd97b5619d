"""The components of a checkpoint: each saves and restores one kind of state."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from trainer.checkpoint.manifest import Checkpoint, CheckpointFiles, FileEntry, read_object, reading
from trainer.checkpoint.sharded import ShardedFiles
from trainer.config import LOAD_COMPONENTS, Config
from trainer.files.atomic_io import digest_bytes
from trainer.files.documents import ObjectShape, dump_yaml, parse_yaml
from trainer.files.redaction import redact
from trainer.models.files import ADAPTER_CONFIG

LOG = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
_OF_RANKS = ("weights", "optimizer", "rng")


@dataclass(frozen=True)
class Restore:
    """The kinds of state that a resume restores from its checkpoint."""

    kinds: frozenset[str] = frozenset(LOAD_COMPONENTS)
    """A subset of `LOAD_COMPONENTS`."""
    fork: bool = False
    """The checkpoint belongs to another run."""
    added_steps: Mapping[str, int] = field(default_factory=dict)
    """The optimizer steps by which the learning rate schedule of each role moves (see `compatibility.added_steps`)."""

    def chosen(self, components: Sequence[Component], checkpoint: Checkpoint) -> list[Component]:
        """Return the components that hold state to restore. Those of another kind of run may be missing."""
        chosen = [one for one in components if self.kinds.intersection(one.kinds)]
        saved = checkpoint.manifest["parts"]
        for component in chosen:
            if component.if_missing and component.name not in saved:
                LOG.info("%s %s", checkpoint.path, component.if_missing)
        return [one for one in chosen if one.if_missing is None or one.name in saved]


def _load_nothing(checkpoint: Checkpoint, restore: Restore) -> None:
    pass


@dataclass(frozen=True)
class Component:
    """One kind of state in a checkpoint."""

    name: str
    begin: Callable[[CheckpointFiles], Callable[[], list[FileEntry]]]
    """Takes a snapshot of the state and returns a function, without waiting. The function runs on another thread. It
    writes files to the staging area, or waits for the processes that write them, and returns the entries of the
    durable, hashed files."""
    load: Callable[[Checkpoint, Restore], None] = _load_nothing
    """Restores the state."""
    kinds: Collection[str] = ("state",)
    """The kinds of state that it holds, of `LOAD_COMPONENTS`: it is restored if a resume restores one of them, and then
    the checkpoint must have it. Empty: no resume restores it."""
    if_missing: str | None = None
    """What the log says of a checkpoint without it, which is then accepted. None: such a checkpoint is refused."""
    is_large: bool = False
    """Restored last, and only if every other component accepts its state."""


def files_component(
    name: str,
    content: Callable[[], dict[str, bytes]],
    load: Callable[[Checkpoint, Restore], None] = _load_nothing,
    kinds: Collection[str] = ("state",),
    if_missing: str | None = None,
) -> Component:
    """Make a component of small files: `content()` returns their bytes by path below the checkpoint."""

    def begin(staging: CheckpointFiles) -> Callable[[], list[FileEntry]]:
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
    """Make a component that is saved as `{name}.json`.

    Args:
        shape: the shape of the state; a file of another shape is refused.
    """
    file = f"{name}.json"
    return files_component(
        name,
        lambda: {file: json.dumps(state(), indent=2, sort_keys=True).encode()},
        lambda checkpoint, _: restore(read_object(checkpoint, file, shape)),
        kinds,
    )


def config_component(cfg: Config) -> Component:
    """Make the component that holds the resolved config, without secrets."""
    return files_component("config", lambda: {CONFIG_FILE: config_yaml(cfg)}, kinds=LOAD_COMPONENTS)


def config_yaml(cfg: Config) -> bytes:
    """Return the content of `config.yaml`: the resolved config without secrets, which a resume does not need."""
    return dump_yaml(redact(asdict(cfg))).encode()


def config_digest(cfg: Config) -> str:
    """Return the xxh3-128 of the config. Secrets have no part in it, so they cannot be guessed from it."""
    import yaml

    return digest_bytes(yaml.safe_dump(redact(asdict(cfg), references=False), sort_keys=False).encode())


def read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the resolved config that a checkpoint was saved with, without secrets.

    Raises:
        CorruptCheckpointError: `config.yaml` is missing, or is not a mapping of sections.
    """
    with reading(checkpoint.path, CONFIG_FILE):
        return parse_yaml(checkpoint.files.read(CONFIG_FILE), {str: dict})


class SavingRanks(Protocol):
    """The ranks that hold the models."""

    @property
    def saved_roles(self) -> list[str]: ...

    def begin_save(self, files: Any) -> Callable[[], list[dict]]: ...

    def load(self, role: str, files: Any, kinds: Collection[str], steps_added: int = 0) -> None: ...


def models_component(ranks: SavingRanks) -> Component:
    """Make the component that the ranks write: weights, optimizers, schedules and RNG states of the saved roles."""

    def begin(staging: CheckpointFiles) -> Callable[[], list[FileEntry]]:
        finish = ranks.begin_save(ShardedFiles(staging.path))
        return lambda: [FileEntry(**entry) for entry in finish()]

    def load(checkpoint: Checkpoint, restore: Restore) -> None:
        files = ShardedFiles(checkpoint.files.path)
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
