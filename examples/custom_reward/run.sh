#!/usr/bin/env bash
# GRPO towards vowels, with the reward in vowels.py. A reward is any importable function that names what it wants as
# parameters (docs/rewards.md). PYTHONPATH says where the file is.
set -euo pipefail
PYTHONPATH="$(dirname "$0")" python -m trainer.main reward.name=vowels:score trainer.run_name=vowels "$@"
