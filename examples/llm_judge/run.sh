#!/usr/bin/env bash
# GRPO with a language model as the judge (judge.py). Say where the judge is before you start:
#   export JUDGE_BASE_URL=http://localhost:8000/v1 JUDGE_MODEL=Qwen/Qwen3-8B JUDGE_API_KEY=…
# Many calls run at the same time (reward.concurrency). Modules are found from the working directory.
set -euo pipefail
python -m trainer train data=arithmetic reward.name=examples.llm_judge.judge:score reward.concurrency=32 \
  reward.timeout_s=60 reward.success_threshold=0.9 trainer.run_name=judge "$@"
