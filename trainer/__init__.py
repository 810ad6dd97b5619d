"""FSDP2-native GRPO and PPO post-training that survives being killed.

`from trainer import train` starts a run from Python (docs/python.md). The names are imported when they are first used,
so that `import trainer` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.api.results import load_checkpoint as load_checkpoint
    from trainer.api.results import read_metrics as read_metrics
    from trainer.api.running import RunFailed as RunFailed
    from trainer.api.running import RunStopped as RunStopped
    from trainer.api.running import train as train
    from trainer.errors import UserError as UserError

__version__ = "0.3.0.dev0"

_HOMES = {
    "RunFailed": "trainer.api.running",
    "RunStopped": "trainer.api.running",
    "UserError": "trainer.errors",
    "load_checkpoint": "trainer.api.results",
    "read_metrics": "trainer.api.results",
    "train": "trainer.api.running",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
