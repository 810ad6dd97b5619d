#!/usr/bin/env bash
# The same sums with PPO: a critic is trained beside the policy and estimates the value of each token.
set -euo pipefail
python -m trainer.main algorithm=ppo data=arithmetic trainer.run_name=ppo_arithmetic "$@"
