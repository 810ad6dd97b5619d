#!/usr/bin/env bash
# PPO with low-rank adapters on policy and critic. Only the adapters are trained, saved and sent to vLLM, and the policy
# without them is the reference. Adapters need a higher learning rate than whole weights. The last lines write the
# adapter of the last checkpoint as peft reads it; without --adapter, they would write the merged model.
set -euo pipefail
run="outputs/lora"
python -m trainer.main algorithm=ppo trainer.policy.lora.rank=8 trainer.critic.lora.rank=8 \
  trainer.policy.optimizer.lr=2e-3 trainer.run_name=lora trainer.run_dir="$run" trainer.resume_mode=latest "$@"
step="$(cat "$run/checkpoints/latest_ckpt_global_step.txt" 2>/dev/null || true)"
if [ -n "$step" ] && [ ! -e "$run/adapter" ]; then
  python -m trainer.checkpoint export "$run/checkpoints/global_step_$step" "$run/adapter" --adapter
fi
