#!/usr/bin/env bash
# Sums of two numbers below 100 with GRPO: eight completions a prompt, each rewarded relative to the others.
set -euo pipefail
python -m trainer.main algorithm=grpo data=arithmetic trainer.run_name=grpo_arithmetic "$@"
