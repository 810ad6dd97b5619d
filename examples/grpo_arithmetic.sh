#!/usr/bin/env bash
# Single-digit and two-digit sums with GRPO.
set -euo pipefail
python -m trainer.main algorithm=grpo data=arithmetic trainer.run_name=grpo_arithmetic "$@"
