#!/usr/bin/env bash
# PPO with low-rank adapters on policy and critic. Only the adapters are trained, saved and sent to vLLM, and the policy
# without them is the reference. Adapters need a higher learning rate than whole weights. The last line writes the
# adapter of the newest checkpoint as peft reads it; without --adapter, it would write the merged model.
# Overrides go to the training; the script sets trainer.run_dir itself.
set -euo pipefail
case "$*" in
  *experiment=*smoke*) out="outputs/smoke/lora-$(date +%Y%m%d-%H%M%S)" ;;
  *) out=outputs/lora ;;
esac
python -m trainer train algorithm=ppo trainer.policy.lora.rank=8 \
  trainer.policy.optimizer.lr=2e-3 trainer.run_name=lora trainer.run_dir="$out" trainer.resume_mode=latest "$@"
adapter="$out/adapters/global_step_$(cat "$out/checkpoints/latest_ckpt_global_step.txt")"
[ -e "$adapter" ] || python -m trainer checkpoint export "$out" "$adapter" --adapter
