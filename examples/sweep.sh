#!/usr/bin/env bash
# Four jobs in turn, each in a directory of its own below outputs/sweep.
set -euo pipefail
python -m trainer.main -m algorithm=grpo,ppo trainer.seed=1,2 trainer.run_name=sweep "$@"
