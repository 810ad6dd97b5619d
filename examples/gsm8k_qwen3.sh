#!/usr/bin/env bash
# GSM8K with Qwen3-0.6B on one node of 8 GPUs. Not run by us yet. For orientation, a public run of GRPO on
# GSM8K from Qwen2.5-1.5B-Instruct reports 69.7% -> 81.6%
# (huggingface.co/jayminbhan/RLVR-vs-SFT-Qwen2.5-1.5b-checkpoints).
set -euo pipefail
args=(
  model=qwen3_0.6b
  data=gsm8k
  trainer.num_workers=8                      # one FSDP2 rank a GPU
  rollout.num_engines=8                      # and one engine on each of the same GPUs,
  rollout.colocate=true                      # which sleeps while the ranks train
  rollout.gpu_memory_utilization=0.5         # the other half is the ranks'
  trainer.train_batch_size=256               # prompts a step
  trainer.mini_batch_size=64                 # four optimizer steps a step
  rollout.n=8
  rollout.max_prompt_tokens=512
  rollout.max_response_tokens=1024
  trainer.max_tokens_per_micro_batch=16384   # the memory knob of the update: lower it when it runs out
  trainer.policy.fsdp.activation_checkpointing=true
  trainer.policy.optimizer.lr=1e-6
  trainer.total_steps=200
  trainer.ckpt_interval=20
  trainer.run_name=gsm8k_qwen3
  trainer.resume_mode=latest                 # the same command starts it and continues it
)
python -m trainer.main "${args[@]}" "$@"
