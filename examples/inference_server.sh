#!/usr/bin/env bash
# Trainer and inference apart: a server stays up while two jobs train reverse-text, 10 steps each. The second job finds
# the server warm. On CPU the result is that of one job of 20 steps, to the last bit.
# Overrides go to the server and to both jobs, those of inference.* to the server alone.
set -euo pipefail
case "$*" in
  *experiment=*smoke*) out="outputs/smoke/inference_server-$(date +%Y%m%d-%H%M%S)" ;;
  *) out=outputs/inference_server ;;
esac
url="http://127.0.0.1:${PORT:-8000}"
python -m trainer inference data=reverse_text trainer.run_dir="$out" "$@" inference.port="${url##*:}" &
server=$!
trap 'kill $server 2>/dev/null && wait $server || true' EXIT

job=()
for word in "$@"; do
  [[ "$word" == inference.* ]] || job+=("$word")
done
for steps in 10 20; do
  kill -0 $server    # has it ended?
  python -m trainer train data=reverse_text trainer.run_dir="$out" trainer.val_interval=10 trainer.ckpt_interval=10 \
    trainer.resume_mode=latest "${job[@]}" rollout.engine=server rollout.urls="[$url]" trainer.total_steps=$steps
done
