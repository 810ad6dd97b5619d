"""`trainer sft`: `trainer train trainer.task=sft`."""

from __future__ import annotations

from trainer.process.signals import SIGNALS

if __name__ == "__main__":
    SIGNALS.listen()  # before the other imports, which take a part of a second

from trainer.config.command_line import run_app
from trainer.main import train


def main() -> None:
    """Train on examples as the command line says; ends the process."""
    run_app(train, "sft", ["trainer.task=sft"])


if __name__ == "__main__":
    main()
