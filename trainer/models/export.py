"""Write models as Hugging Face directories. Cheap to import: two other modules write the tensors.

`export_sharded` writes the tensors of sharded modules: each rank writes its own shards. `export_checkpoint` writes the
tensors of a checkpoint.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.config import Config
from trainer.errors import UserError
from trainer.files.atomic_io import sync_path, sync_tree
from trainer.models.assets import CONFIG, WEIGHTS_ONLY, with_dtype
from trainer.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.process.failpoints import failpoint

MADE_LAST = ("config.json", ADAPTER_CONFIG)
"""No model can be loaded without one of these files. An export is whole where one is there."""
_WRITING = ".writing-"
MAX_FILE_BYTES = 5 * 10**9  # Hugging Face's own shard size


class WritingRanks(Protocol):
    """The ranks that have the policy."""

    def call(self, role: str, method: str, *args: Any) -> Any: ...
    def call_one(self, role: str, method: str, *args: Any) -> Any: ...


def export_target(cfg: Config, step: int) -> str:
    """Return the directory for the exported policy of a step."""
    return os.path.join(cfg.trainer.export_path, f"global_step_{step}", "policy")


@dataclass(frozen=True)
class PolicyExporter:
    """Exports the policy of a job.

    Args:
        model_path: directory of the initial weights.
        assets: the files except weights (see `model_assets`).
        adapter_alone: write only the adapter in peft's format and the tokenizer, and not the merged model.
        fence: raises if this process no longer holds the run directory. Then nothing is published.
    """

    ranks: WritingRanks
    model_path: str
    assets: Mapping[str, bytes]
    adapter_alone: bool
    fence: Callable[[], None]

    def export(self, target: str, dtype: str) -> None:
        """Write the policy to the directory `target`, atomically. Replaces an earlier export there.

        Args:
            dtype: dtype of the weights (see `RolloutConfig.dtype`).
        """
        self.fence()
        for leftover in glob.glob(f"{glob.escape(target)}{_WRITING}*"):  # of a killed export
            shutil.rmtree(leftover, ignore_errors=True)
        with atomic_directory(target, self._before_publishing) as writing:
            if self.adapter_alone:
                files = {name: data for name, data in self.assets.items() if name not in WEIGHTS_ONLY}
                files[ADAPTER_CONFIG] = self.ranks.call_one("policy", "adapter_config", self.model_path).encode()
                files[ADAPTER_WEIGHTS] = self.ranks.call("policy", "adapter_weights")
            else:
                written = self.ranks.call("policy", "write_weights", writing, dtype)
                files = {**self.assets, CONFIG: with_dtype(self.assets[CONFIG], written)}
            write_files(writing, files)
            failpoint("export:written")

    def _before_publishing(self, target: str) -> None:
        self.fence()
        check_replaceable(target)
        shutil.rmtree(target, ignore_errors=True)  # written by the killed run, with identical content


def check_replaceable(target: str) -> None:
    """Check that an export may replace what is at `target`: nothing, an empty directory, or an earlier export.

    Raises:
        UserError: there is something else, such as the policy of a checkpoint.
    """
    place = f"trainer.export_path={os.path.dirname(os.path.dirname(target))}"
    if os.path.lexists(os.path.join(os.path.dirname(target), "manifest.json")):
        raise UserError(f"{place}: {os.path.dirname(target)} is a checkpoint; choose another directory for exports")
    if (
        not os.path.lexists(target)
        or os.path.isdir(target)
        and not os.path.islink(target)
        and (not (names := os.listdir(target)) or not {*MADE_LAST}.isdisjoint(names))
    ):
        return
    raise UserError(
        f"{place}: {target} is not an export of a policy, so no export replaces it; move it away, or choose another "
        "directory for exports"
    )


@contextmanager
def atomic_directory(target: str, before_publishing: Callable[[str], None] = lambda target: None) -> Iterator[str]:
    """Yield a new directory to fill, and rename it to `target` at the end of the block. Delete it if the block fails.

    The name of each directory contains a random token, so that a surviving process of a killed run cannot write into
    it.

    Args:
        before_publishing: called with `target` immediately before the rename.
    """
    target = os.path.abspath(target)
    writing = f"{target}{_WRITING}{secrets.token_hex(4)}"
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.mkdir(writing)
    try:
        yield writing
        _apply_umask(writing)
        sync_tree(writing)
        before_publishing(target)
        os.rename(writing, target)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    sync_path(os.path.dirname(target))


def write_files(directory: str, files: Mapping[str, bytes]) -> None:
    """Write files by their paths in `directory`."""
    for name, data in files.items():
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)


def _apply_umask(directory: str) -> None:
    """Give all files the default mode of this process, because safetensors makes its files readable by one user."""
    with open(os.path.join(directory, ".mode"), "xb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    os.remove(os.path.join(directory, ".mode"))
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            if stat.S_IMODE(os.stat(path).st_mode) != mode:
                os.chmod(path, mode)


def assign_to_files(sizes: Mapping[str, int], max_file_bytes: int, stem: str = "model") -> dict[str, list[str]]:
    """Assign tensors, in order, to files of at most `max_file_bytes`. A larger tensor has a file of its own.

    Args:
        sizes: bytes of each tensor, by name.

    Returns:
        for each file name, the names of its tensors.
    """
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > max_file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups)}


def write_index(directory: str, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write the index file, which contains the file of each tensor."""
    with open(os.path.join(directory, "model.safetensors.index.json"), "w") as index:
        json.dump({"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}, index, indent=2)
