"""`python -m trainer.config` prints `docs/config.md`."""

from trainer.config.reference import page

if __name__ == "__main__":
    print(page())
