#!/usr/bin/env bash
# Rollouts as data: a run writes what it samples to files, and supervised training from the same start learns the right
# completions. sft.max_weight weights their tokens by importance, because the model moves away from the policy that
# sampled them. Without it this is plain distillation, and the rollouts may come from a larger model with the same
# tokenizer. Run it again after an interruption: it continues. Overrides go to the stages that read them; the script
# sets trainer.run_dir itself.
set -euo pipefail
case "$*" in
  *experiment=*smoke*) out="outputs/smoke/rejection_sampling-$(date +%Y%m%d-%H%M%S)" steps=120 ;;
  *) out=outputs/rejection_sampling steps=220 ;;
esac
source "$(dirname "$0")/supervised_words.bash" "$@"
python -m trainer sft sft.steps=$steps trainer.val_interval=60 trainer.ckpt_interval=60 \
  trainer.run_name=rejection_start trainer.run_dir="$out/start" trainer.resume_mode=latest "${supervised_words[@]}"
model="$(ls -d "$out"/start/exports/global_step_*/policy | sort -V | tail -n 1)"
python -m trainer train trainer.total_steps=8 trainer.val_interval=8 trainer.run_name=rejection_rollouts \
  trainer.run_dir="$out/rollouts" trainer.resume_mode=latest "$@" model.path="$model" \
  trainer.policy.optimizer.lr=0 logger.save_rollouts=true
files="$(printf '%s,' "$out"/rollouts/rollouts/*.arrow)"
python -m trainer sft sft.steps=60 sft.optimizer.lr=5e-4 sft.min_reward=1 sft.max_weight=5 \
  trainer.ckpt_interval=60 trainer.run_name=rejection trainer.run_dir="$out/learnt" trainer.resume_mode=latest \
  "${supervised_words[@]}" model.path="$model" sft.source=rollouts data.synthetic=null \
  "data.train_files=[${files%,}]" trainer.val_interval=-1
