#!/usr/bin/env bash
# GRPO with the curriculum in hardest.py: a function (prompts, epoch, rewards) -> places in prompts. What it chose for
# the epoch, and the rewards it goes by, are part of every checkpoint.
set -euo pipefail
PYTHONPATH="$(dirname "$0")" python -m trainer.main data.curriculum=hardest:hardest_first data.train_size=1024 \
  trainer.run_name=hardest_first "$@"
