#!/usr/bin/env bash
# Rollouts as data: a run writes what it samples to files, and supervised training from the same start learns the right
# completions. sft.max_weight weights their tokens by importance, because the model moves away from the policy that
# sampled them. Without it this is plain distillation, and the rollouts may come from a larger model with the same
# tokenizer. Further overrides go to the last stage.
set -euo pipefail
start="outputs/rejection_start"
python -m trainer.sft trainer.run_name=rejection_start trainer.run_dir="$start" sft.steps=220 trainer.resume_mode=latest
model="$start/exports/global_step_220/policy"
python -m trainer.main trainer.run_name=rejection_rollouts trainer.resume_mode=latest model.path="$model" \
  trainer.policy.optimizer.lr=0 trainer.total_steps=8 logger.rollouts=true
files="$(printf '%s,' outputs/rejection_rollouts/rollouts/*.jsonl)"
python -m trainer.sft data.generator=null "data.train_files=[${files%,}]" sft.source=rollouts sft.min_reward=1 \
  sft.max_weight=5 sft.optimizer.lr=5e-4 sft.steps=60 model.path="$model" trainer.val_interval=-1 \
  trainer.run_name=rejection trainer.resume_mode=latest "$@"
