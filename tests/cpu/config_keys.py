"""What a resume may change: a decision on every key of the config, written out.

Whoever adds a key, or lets a resume change one, decides here too, and names a test that proves it.
"""

from __future__ import annotations

_OPTIMIZER = ("lr", "betas", "eps", "weight_decay", "max_grad_norm", "scheduler", "warmup_steps", "min_lr_ratio")

RANKS: tuple[str, ...] = (
    *(f"{section}.{name}" for section in ("trainer.policy.optimizer", "trainer.critic.optimizer", "sft.optimizer")
      for name in _OPTIMIZER),
    "trainer.mini_batch_size", "trainer.update_epochs", "trainer.policy.lora.alpha", "trainer.critic.lora.alpha",
    "trainer.policy.fsdp.param_dtype", "trainer.policy.fsdp.reduce_dtype", "trainer.critic.fsdp.param_dtype",
    "trainer.critic.fsdp.reduce_dtype", "algorithm.policy_loss", "algorithm.clip_low", "algorithm.clip_high",
    "algorithm.dual_clip", "algorithm.tau_pos", "algorithm.tau_neg", "algorithm.cov_frac", "algorithm.cov_low",
    "algorithm.cov_high", "algorithm.cov_kl_coef", "algorithm.max_weight", "algorithm.options",
    "algorithm.aggregation", "algorithm.kl_coef", "algorithm.kl_estimator", "algorithm.kl_in",
    "algorithm.entropy_coef", "algorithm.value_clip", "rollout.temperature", "rollout.max_response_tokens",
    "model.attn_implementation", "sft.max_weight",
)  # fmt: skip
