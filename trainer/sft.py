"""`python -m trainer.sft`: the command line of `trainer.main` for a supervised run."""

from __future__ import annotations

from trainer.config import Config
from trainer.config.command_line import run_app
from trainer.main import prepare
from trainer.signals import SIGNALS


def train(cfg: Config) -> None:
    """Train on examples."""
    device = prepare(cfg)
    with SIGNALS.held():
        from trainer.jobs import train_supervised

    train_supervised(cfg, device)


if __name__ == "__main__":
    run_app(train)
