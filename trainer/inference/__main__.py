"""`trainer inference`: start an inference server, which stays up while training jobs come and go."""

from __future__ import annotations

from trainer.process.signals import SIGNALS

if __name__ == "__main__":
    SIGNALS.listen()  # before the other imports, which take a part of a second

from trainer.config import Config
from trainer.config.command_line import run_app


def serve(cfg: Config) -> None:
    """Serve until a signal comes."""
    from trainer.inference.server import run

    run(cfg)


def main() -> None:
    """Serve as the command line says; ends the process."""
    run_app(serve, "inference")


if __name__ == "__main__":
    main()
