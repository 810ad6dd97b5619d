#!/usr/bin/env bash
# GRPO towards vowels, with the reward in vowels.py. A reward is any importable function
# (completion: str, answer: str) -> float; PYTHONPATH says where it is.
set -euo pipefail
PYTHONPATH="$(dirname "$0")" python -m trainer.main reward.name=vowels:score trainer.run_name=vowels "$@"
