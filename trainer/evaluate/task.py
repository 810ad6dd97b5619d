"""What an evaluation reads of the config: a task that starts no ranks."""

from __future__ import annotations

from typing import Any, NoReturn

from trainer.config import TaskSpec
from trainer.errors import UserError

PATH = f"{__name__}:EVALUATION"
"""The value of `trainer.task`."""


def _build(config: Any) -> NoReturn:
    raise UserError(f"trainer.task={PATH}: is no training; give the command trainer evaluate")


EVALUATION = TaskSpec(
    _build,
    generates=True,
    trains=False,
    unused=(
        "algorithm.*",
        "sft.*",
        "data.train_files",
        "data.curriculum",
        "data.mix*",
        "logger.samples*",
        "logger.wandb.*",
        "logger.mlflow.*",
        "logger.trackio.*",
        "logger.prometheus_*",
        "logger.tensorboard",
        "logger.plot",
        "logger.validation",
        "logger.save_rollouts",
        "logger.rollouts_interval",
        "rollout.n",
        "rollout.ahead",
        "rollout.in_flight_updates",
        "rollout.max_staleness",
        "rollout.window",
        "rollout.colocate",
        "rollout.weight_sync*",
        "model.tiny.*",
        "model.attn_implementation",
        "trainer.total_steps",
        "trainer.num_workers",
        "trainer.min_world_size",
        "trainer.dp_replicate",
        "trainer.context_parallel_size",
        "trainer.tensor_parallel_size",
        "trainer.colocate_roles",
        "trainer.offload",
        "trainer.master_port",
        "trainer.divergence_*",
        "trainer.*_batch_size",
        "trainer.update_epochs",
        "trainer.max_tokens_per_micro_batch",
        "trainer.pack",
        "trainer.share_prefixes",
        "trainer.val_*",
        "trainer.ckpt_*",
        "trainer.max_ckpts_to_keep",
        "trainer.keep_*",
        "trainer.mean_time_between_failures",
        "trainer.best_*",
        "trainer.resume_*",
        "trainer.load_components",
        "trainer.allow_config_change",
        "trainer.on_resume_mismatch",
        "trainer.deadline",
        "trainer.hf_save_*",
        "trainer.export_path",
        "trainer.policy.optimizer.*",
        "trainer.policy.fsdp.*",
        "trainer.critic.*",
        "trainer.reference.*",
    ),
)
"""It generates with the weights that it is given, and changes none."""
