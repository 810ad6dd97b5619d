#!/usr/bin/env bash
# GRPO towards vowels, with the reward in vowels.py.
set -euo pipefail
PYTHONPATH="$(dirname "$0")" python -m trainer.main reward.name=vowels:score trainer.run_name=vowels "$@"
