"""`python -m trainer.sft`: the command line of `trainer.main` for a supervised run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.main import run_app
from trainer.signals import SIGNALS

if TYPE_CHECKING:
    from trainer.config import Config


def _job(cfg: Config, device: str) -> None:
    with SIGNALS.held():
        from trainer.supervised import run  # torch and Ray: not before signals are heard

    run(cfg, device)


if __name__ == "__main__":
    run_app(_job)
