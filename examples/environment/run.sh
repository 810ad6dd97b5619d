#!/usr/bin/env bash
# GRPO with the environment in hint.py: episodes of up to three turns. Modules are found from the working directory. A
# conversation needs more room than a prompt: rollout.max_prompt_tokens counts all that comes before a reply.
set -euo pipefail
python -m trainer train environment.name=examples.environment.hint:Hint rollout.max_prompt_tokens=96 \
  reward.success_threshold=0.8 trainer.run_name=hint "$@"
