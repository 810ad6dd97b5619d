#!/usr/bin/env bash
# Two stages by hand: supervised training from random weights, then GRPO from its export.
# Further overrides go to the second stage.
set -euo pipefail
python -m trainer.sft data=reverse_text sft.steps=180 trainer.run_name=reverse_text_sft
python -m trainer.main data=reverse_text trainer.run_name=reverse_text_grpo \
  model.path=outputs/reverse_text_sft/exports/global_step_180/policy "$@"
