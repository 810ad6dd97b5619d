#!/usr/bin/env bash
# Supervised training from random weights, then GRPO from its export: the demo's two stages as two commands.
# Run it again after an interruption: it continues. Overrides go to the stages that read them; the script sets
# trainer.run_dir itself.
set -euo pipefail
case "$*" in
  *experiment=*smoke*) out="outputs/smoke/reverse_text-$(date +%Y%m%d-%H%M%S)" ;;
  *) out=outputs/reverse_text ;;
esac
source "$(dirname "$0")/supervised_words.bash" "$@"
python -m trainer sft data=reverse_text sft.steps=180 trainer.val_interval=60 trainer.ckpt_interval=60 \
  trainer.run_name=reverse_text_supervised trainer.run_dir="$out/supervised" trainer.resume_mode=latest \
  "${supervised_words[@]}"
model="$(ls -d "$out"/supervised/exports/global_step_*/policy | sort -V | tail -n 1)"
python -m trainer train data=reverse_text trainer.run_name=reverse_text_grpo trainer.run_dir="$out/grpo" \
  trainer.resume_mode=latest "$@" model.path="$model"
