"""`trainer sft`: the command line of `trainer.main` for a supervised run."""

from __future__ import annotations

import functools

from trainer.process.signals import SIGNALS

if __name__ == "__main__":
    SIGNALS.listen()  # before the other imports, which take a part of a second

from trainer.config import Config
from trainer.config.command_line import run_app
from trainer.main import best_value, prepare
from trainer.metrics.best import compared_by
from trainer.metrics.startup import StartUp
from trainer.process.startup import stage


def train(cfg: Config) -> float | None:
    """Train on examples. Returns the best value of the metric that runs are compared by; None if it has none."""
    with StartUp(cfg.logger.progress):
        device = prepare(cfg, generates=False)
        with stage("importing transformers"):
            from trainer.jobs import train_supervised
        train_supervised(cfg, device)
    return best_value(cfg, supervised=True)


def main() -> None:
    """Train on examples as the command line says; ends the process."""
    run_app(train, "sft", functools.partial(compared_by, supervised=True))


if __name__ == "__main__":
    main()
