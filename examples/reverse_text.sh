#!/usr/bin/env bash
# The demo's two stages by hand: supervised training from random weights, then GRPO from its export.
# Run it again after an interruption: it continues. Further overrides go to the second stage;
# SFT_STEPS changes the length of the first.
set -euo pipefail
steps="${SFT_STEPS:-180}"
python -m trainer.sft data=reverse_text sft.steps="$steps" trainer.run_name=reverse_text_sft \
  trainer.resume_mode=latest
python -m trainer.main data=reverse_text trainer.run_name=reverse_text_grpo trainer.resume_mode=latest \
  model.path="outputs/reverse_text_sft/exports/global_step_$steps/policy" "$@"
