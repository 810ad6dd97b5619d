#!/usr/bin/env bash
# The same with PPO.
set -euo pipefail
python -m  a critic is trained beside the policy:trainer.main algorithm=ppo data=arithmetic trainer.run_name=ppo_arithmetic "$@"
