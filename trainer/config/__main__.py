"""`trainer config` prints `docs/config.md`."""

import argparse

from trainer.config.reference import page
from trainer.process.log_setup import guard_output


def main() -> None:
    """Print the reference of all keys."""
    guard_output()
    argparse.ArgumentParser(prog="trainer config", description="Print the reference of all config keys.").parse_args()
    print(page())


if __name__ == "__main__":
    main()
