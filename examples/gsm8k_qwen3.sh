#!/usr/bin/env bash
# GSM8K with Qwen3-0.6B on one node of 8 GPUs of 80 GB. We have not run these settings on GPUs yet.
#
# What to expect, from public baselines, not from here: verl's table (verl.readthedocs.io, "Algorithm
# Baselines") has Qwen2.5-0.5B-Instruct at 36.4 before and 56.7 after PPO, and Qwen2.5-1.5B-Instruct at 77.9
# after GRPO with LoRA, in % of the test set. It has no Qwen3-0.6B.
#
# Qwen3's chat template lets the model think before it answers. Watch response_length/clip_ratio: while many
# completions are cut, raise rollout.max_response_tokens, or name a template without thinking in
# model.chat_template.
set -euo pipefail
args=(
  model=qwen3_0.6b                           # Qwen/Qwen3-0.6B; or model.path=<directory of any causal LM>
  data=gsm8k                                 # read from the Hub; data.train_files=[...] takes local files
  trainer.num_workers=8                      # one FSDP2 rank a GPU
  rollout.num_engines=8                      # and one vLLM engine on each of the same GPUs,
  rollout.share_gpus=true                    # which sleeps while the ranks train
  rollout.gpu_memory_utilization=0.5         # the engine's share of a GPU while it generates
  trainer.train_batch_size=256               # prompts a step
  trainer.mini_batch_size=64                 # prompts an optimizer step: four of them a step
  rollout.n=8                                # completions a prompt: 2048 a step
  rollout.max_prompt_tokens=512              # longer prompts are dropped and counted
  rollout.max_response_tokens=1024           # longer completions are cut
  trainer.max_tokens_per_micro_batch=8192    # the memory knob of the update: lower it when memory runs out
  trainer.policy.fsdp.activation_checkpointing=true # a slower backward pass for much less memory
  trainer.policy.optimizer.lr=1e-6           # the usual order of magnitude for RL on all weights
  trainer.policy.optimizer.warmup_steps=10
  data.val_size=-1                           # validate on all 1319 test problems, not on the first 256
  trainer.val_interval=20
  trainer.total_steps=200
  trainer.ckpt_interval=20
  trainer.max_ckpts_to_keep=3
  trainer.run_name=gsm8k_qwen3
  trainer.resume_mode=latest                 # the same command starts it and continues it
)
python -m trainer.main "${args[@]}" "$@"
