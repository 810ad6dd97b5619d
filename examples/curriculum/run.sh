#!/usr/bin/env bash
# GRPO with the curriculum in hardest.py: a function (prompts, epoch, rewards) -> places in prompts. Every checkpoint
# holds the order of the epoch and the rewards that the function gets.
set -euo pipefail
PYTHONPATH="$(dirname "$0")" python -m trainer.main data.curriculum=hardest:hardest_first data.train_size=1024 \
  trainer.run_name=hardest_first "$@"
