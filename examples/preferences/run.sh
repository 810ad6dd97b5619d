#!/usr/bin/env bash
# A chain on the built-in model: supervised training; a reward model on pairs of words; PPO against its scores; DPO on the
# same pairs; and a larger model that teaches a smaller one. Run it again after an interruption: each stage continues, or
# has ended. Overrides go to the stages that read them; the script sets trainer.run_dir itself.
set -euo pipefail
case "$*" in
  *experiment=*smoke*) out="outputs/smoke/preferences-$(date +%Y%m%d-%H%M%S)" sft=20 taught=20 steps=2 ;;
  *) out=outputs/preferences sft=180 taught=400 steps=60 ;;
esac
source "$(dirname "$0")/../supervised_words.bash" "$@"
mkdir -p "$out"
pairs="$out/pairs.jsonl"
[ -e "$pairs" ] || python -m examples.preferences.pairs "$pairs"
stage() { # NAME TASK OVERRIDES...
  python -m trainer "$2" trainer.run_dir="$out/$1" trainer.run_name="preferences_$1" trainer.resume_mode=latest "${@:3}"
}
export_of() { ls -d "$out/$1"/exports/global_step_*/policy | sort -V | tail -n 1; }
pair_data=(data.synthetic=null data.train_files="[$pairs]" trainer.val_interval=-1 trainer.total_steps="$steps"
  trainer.train_batch_size=32 trainer.mini_batch_size=32 "${pair_words[@]}")
stage supervised sft sft.steps="$sft" "${supervised_words[@]}"
model="$(export_of supervised)"
stage rm rm model.path="$model" trainer.policy.optimizer.lr=1e-3 "${pair_data[@]}"
stage ppo train algorithm=ppo trainer.total_steps=$steps trainer.policy.optimizer.lr=4e-4 trainer.critic.optimizer.lr=1e-3 \
  "$@" model.path="$model" reward.name=model reward.model.path="$(export_of rm)" trainer.best_metric=val/reward/mean
stage dpo dpo model.path="$model" trainer.policy.optimizer.lr=1e-4 dpo.sft_coef=0.1 "${pair_data[@]}"
stage teacher sft model.tiny.hidden_size=192 sft.steps="$taught" \
  "${supervised_words[@]}"
stage distilled train algorithm=opd rollout.n=1 trainer.total_steps=$steps trainer.policy.optimizer.lr=4e-4 \
  "$@" model.path="$model" algorithm.teacher.path="$(export_of teacher)"
