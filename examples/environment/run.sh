#!/usr/bin/env bash
# GRPO with the environment in hint.py: episodes of up to three turns. PYTHONPATH says where the file is. A conversation
# needs more room than a prompt: rollout.max_prompt_tokens counts all that comes before a reply.
set -euo pipefail
PYTHONPATH="$(dirname "$0")" python -m trainer.main environment.name=hint:Hint rollout.max_prompt_tokens=96 \
  reward.success_threshold=0.8 trainer.run_name=hint "$@"
