#!/usr/bin/env bash
# Four jobs in turn, each in a directory of its own below outputs/sweep; then Optuna looks for a learning rate in five
# jobs below outputs/optuna. Repeat the command after a kill: it continues both. docs/sweeps.md
set -euo pipefail
python -m trainer.main -m algorithm=grpo,ppo trainer.seed=1,2 trainer.run_name=sweep trainer.resume_mode=latest "$@"
python -m trainer.main -m hydra/sweeper=optuna hydra.sweeper.n_trials=5 trainer.run_name=optuna \
  trainer.best_metric=val/reward/mean 'trainer.policy.optimizer.lr=tag(log,interval(1e-5,1e-3))' \
  trainer.resume_mode=latest "$@"
