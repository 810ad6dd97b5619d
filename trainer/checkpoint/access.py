"""Access of ranks to the storage of the checkpoints."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.checkpoint.lock import NAME
from trainer.checkpoint.storage import open_storage
from trainer.checkpoint.store import open_store
from trainer.errors import UserError, one_line
from trainer.files.uris import absolute, is_url, store_spec


class AskedRanks(Protocol):
    """The ranks of a run."""

    def ask(self, numbers: Collection[int] | None, value: Any, method: str, *args: Any) -> dict[int, Any]:
        """Call `method` of a copy of `value` on these ranks (None: on all), and return their answers by number.

        Any thread may ask, while the ranks do other things.
        """
        ...


@dataclass(frozen=True)
class StorageProbe:
    """Looks at the storage of the checkpoints from the machine of a rank. It is plain data, so that it can be sent."""

    root: str

    def take(self, variables: Mapping[str, str], identity: Collection[str]) -> None:
        """Set variables that this machine has not set itself, but none that names a file that it does not have.

        A machine that has a variable of `identity` keeps its own (see `StoreSpec.identity`).
        """
        has_identity = any(name in os.environ for name in identity)
        for name, value in variables.items():
            if has_identity and name in identity:
                continue
            if not os.path.isabs(value) or os.path.exists(value):
                os.environ.setdefault(name, value)
        if (config := sys.modules.get("fsspec.config")) is not None:  # it has read its variables already
            config.set_conf_env(config.conf)

    def problem(self, driver: str, lock: bytes) -> tuple[str, str]:
        """Return the name of this machine, and why checkpoints cannot be written from it; empty if they can.

        Args:
            driver: the name of the driver's machine.
            lock: the content of the lock that the driver holds there.
        """
        host = socket.gethostname()
        if host == driver:
            return host, ""
        if (storage := open_storage(self.root)).disk is not None:
            with contextlib.suppress(OSError):
                if storage.get(NAME) == lock:
                    return host, ""
            return host, "it is not the directory of the driver"
        try:
            open_store(self.root).probe()
        except (OSError, UserError) as error:
            return host, one_line(str(error))
        return host, ""


def give_access(roots: Collection[str | None], ranks: AskedRanks) -> None:
    """Let ranks use the credentials of the driver for the object stores that these roots are in.

    They go from process to process: unlike the environment of an actor, Ray does not show them. Ranks on the driver's
    own machine need them, too: on a cluster that was there before, they have the environment of `ray start`.
    """
    urls = [root for root in roots if root and is_url(root)]
    stores = {store: url for url in urls if (store := store_spec(url))}
    for store, root in stores.items():
        variables = {name: value for name, value in os.environ.items() if _is_named(name, store.variables)}
        ranks.ask(None, StorageProbe(root), "take", variables, store.identity)


def _is_named(variable: str, names: Collection[str]) -> bool:
    return any(variable.startswith(name) if name.endswith("_") else variable == name for name in names)


def check_access(key: str, root: str, ranks: AskedRanks) -> None:
    """Check that checkpoints can be written from all machines with ranks. This process must hold the lock of `root`.

    Args:
        key: the config key that names `root`.

    Raises:
        UserError: from some they cannot.
    """
    probe = StorageProbe(absolute(root))  # ranks on other machines have another working directory
    storage, lock = open_storage(root), b""
    if is_disk := storage.disk is not None:
        with contextlib.suppress(FileNotFoundError):
            lock = storage.get(NAME)
    answers = ranks.ask(None, probe, "problem", socket.gethostname(), lock).values()
    if failed := {host: problem for host, problem in sorted(answers) if problem}:
        remedy = "mount it on all of them" if is_disk else "give every machine with ranks access to the store"
        hosts, reason = ", ".join(failed), next(iter(failed.values()))
        raise UserError(f"{key}={root}: ranks on {hosts} cannot write checkpoints there ({reason}); {remedy}")
