"""The typed schema: name, type, default, unit and meaning of every key.

Hydra composes `conf/*.yaml` onto these dataclasses; `trainer.validation` then checks ranges and contradictions.
Nothing here imports torch, so `--help` and a rejected config answer at once. `python -m trainer.config`
prints `docs/config.md`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from trainer.errors import UserError
from trainer.plugins import options_of, takes_any_option

OPEN_SECTIONS = ("algorithm.options", "data.generator_args", "rollout.engine_args")
"""Sections whose keys the schema does not know."""

# What each function of `trainer.algorithms` takes, by the names of the keys below. A test holds these tables
# against the functions; they are here because nothing here may import torch.
ADVANTAGE_OPTIONS: dict[str, tuple[str, ...]] = {
    "gae": ("gamma", "lam", "normalize_std"),
    "grpo": ("normalize_std",),
    "rloo": (),
    "reinforce_plus_plus": ("gamma",),
    "reinforce_plus_plus_baseline": (),
    "remax": ("gamma",),
    "maxrl": (),
    "opo": (),
    "grpo_passk": ("pass_k",),
}
LOSS_OPTIONS: dict[str, tuple[str, ...]] = {
    "clip": ("clip_low", "clip_high", "dual_clip"),
    "gspo": ("clip_low", "clip_high"),
    "cispo": ("clip_low", "clip_high"),
    "sapo": ("tau_pos", "tau_neg"),
    "clip_cov": ("clip_low", "clip_high", "cov_frac", "cov_low", "cov_high"),
    "kl_cov": ("cov_frac", "cov_kl_coef"),
    "reinforce": (),
    "importance_weighted_ce": ("max_weight",),
}
COMPARE_GROUPS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "maxrl", "opo", "grpo_passk")
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+")
RESUME_LOAD = ("weights", "optimizer", "rng", "data", "state")
MAX_SERVED_LORA_RANK = 512  # vLLM's limit
GENERATORS = ("arithmetic", "reverse_text")


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 turns clipping off."""
    scheduler: str = "constant"
    """Learning rate after warm-up: `constant` or `cosine` (falls to `min_lr_ratio` over `schedule_steps`)."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    min_lr_ratio: float = 0.1
    """Where `cosine` ends, as a share of `lr`."""
    schedule_steps: int | None = None
    """Steps of the run after which `cosine` has ended; later steps keep its last value. null: the steps of the run
    (`trainer.total_steps`, `sft.steps`). With a number, a run can be extended without another schedule."""


@dataclass
class FSDPConfig:
    param_dtype: str = "auto"
    """Precision of parameters in forward and backward: `auto` (bfloat16 on CUDA, float32 on CPU), `bfloat16`
    or `float32`. The optimizer always holds float32 master weights."""
    reduce_dtype: str = "float32"
    """Precision in which gradients are reduced over ranks: `float32` or `bfloat16`."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward pass (less memory, one more all-gather)."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass instead of keeping them."""


@dataclass
class LoraConfig:
    rank: int | None = None
    """Train low-rank adapters of this rank and leave the weights as they are (LoRA, Hu et al., 2021); null: train all
    weights."""
    alpha: float = 32
    """The product of the adapters is multiplied by this over `rank`."""
    target_modules: list[str] = field(default_factory=list)
    """Names of the linear layers that get adapters, such as `q_proj`; empty: all those of the blocks."""


@dataclass
class PolicyConfig:
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the policy."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters of the policy."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding of the policy."""


@dataclass
class CriticConfig:
    path: str | None = None
    """Start weights of the critic's backbone: a Hugging Face id or directory; null: the policy's."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=5e-6))
    """Optimizer of the critic."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters of the critic; its value head is trained as it is."""
    warmup_steps: int = 0
    """First steps of the run in which the critic alone is trained."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding of the critic."""


@dataclass
class ReferenceConfig:
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding of the reference."""


@dataclass
class TrainerConfig:
    run_name: str = "default"
    """Plain name of the run, without slashes: part of `run_dir` and the name shown in W&B."""
    run_dir: str = "outputs/${trainer.run_name}${sweep_suffix:}"
    """Directory of the run. In a `-m` sweep each job's overrides are appended."""
    seed: int = 1
    """Every random draw of the run is a function of this and of what is drawn."""
    total_steps: int = 140
    """Steps after which the run is finished."""
    num_workers: int = 1
    """FSDP2 ranks: GPUs, or processes on CPU."""
    replicas: int = 1
    """HSDP: the ranks form this many replicas, each sharded over `num_workers / replicas` ranks."""
    device: str = "auto"
    """`cuda`, `cpu`, or `auto`: cuda where there is one."""
    colocate: bool = True
    """Policy, critic and reference share ranks (one process hosts all roles); false: each gets its own
    `num_workers` ranks."""
    ray_address: str | None = None
    """`host:port` (or `auto`) of a Ray cluster to join; null starts one on this machine for this run."""
    master_port: int = 0
    """Port at which the ranks meet, on rank 0's machine; 0 takes a free one."""
    worker_timeout_s: float = 1800.0
    """Seconds that one collective may take before the ranks give up."""
    silence_timeout_s: float = 300.0
    """Seconds for which a rank or engine may answer nothing, not even a pulse, before the job ends with status 1. A
    process that is stopped, or whose machine stands still, is silent; one that computes is not."""
    call_timeout_s: float = 14400.0
    """Longest time, in seconds, that one call of the ranks or engines may take: a generation of the step's
    completions, an update, a start. Past it the job ends with status 1."""
    train_batch_size: int = 64
    """Prompts a step."""
    mini_batch_size: int = 32
    """Prompts an optimizer step."""
    update_epochs: int = 1
    """Passes over a step's experience."""
    max_tokens_per_micro_batch: int = 16384
    """Tokens, padding included, that one rank takes through the model at once. A longer sequence goes alone."""
    val_interval: int = 10
    """Validate every so many steps and after the last; -1: never."""
    val_before_train: bool = True
    """Validate the start weights (as step 0)."""
    ckpt_path: str = "${trainer.run_dir}/checkpoints"
    """Where checkpoints go."""
    ckpt_interval: int | str = 10
    """Steps between checkpoints; the last step is always saved. -1: never save by steps. `auto`: by time, as
    often as the measured cost of a save and `mean_time_between_failures` make best (Young, 1974; Daly, 2006)."""
    ckpt_interval_minutes: float = -1
    """Save also when this many minutes have passed since the last save; -1: steps alone decide."""
    mean_time_between_failures: float = 240
    """Minutes between failures to expect, for `ckpt_interval=auto`."""
    ckpt_async: bool = True
    """Write checkpoints while training continues. Takes host memory for one copy of each rank's shards."""
    ckpt_failures_allowed: int = 3
    """Saves that may fail in a row before the run stops; it trains on with the checkpoint before."""
    max_ckpts_to_keep: int = -1
    """Checkpoints to keep, newest first; -1: all. The newest, and the one resumed from, always stay."""
    keep_every: int = -1
    """Keep also those whose step is a multiple of this; -1: none."""
    keep_best: int = 0
    """Keep also this many with the best `best_metric`."""
    best_metric: str = "val/accuracy"
    """Metric of `keep_best`, measured at the checkpoint's step."""
    best_mode: str = "max"
    """`max`: higher is better; `min`: lower."""
    resume_mode: str | None = None
    """`latest` (the newest valid checkpoint in `ckpt_path`, or a new run when there is none: one command for the
    first start and every restart), `from_path` (see `resume_path`), `none` or null (start from scratch)."""
    resume_path: str | None = None
    """With `resume_mode=from_path`: the `global_step_N` directory of another run to fork from. Restarted with
    the same command, the fork continues from its own newest checkpoint."""
    resume_load: list[str] = field(default_factory=list)
    """What a fork takes over, any of `weights`, `optimizer` (with its schedule), `rng`, `data` (the place in the
    data) and `state` (step, counters, best metric); empty: all."""
    verify_checkpoint: str = "hash"
    """Check before loading: `hash` (every byte), `size`, or `off`."""
    allow_config_change: list[str] = field(default_factory=list)
    """Keys, or sections, that may differ from the config of the checkpoint to resume from."""
    on_resume_mismatch: str = "warn"
    """When a replayed step differs from what the killed run had logged: `warn`, `stop`, or `fallback` (go back
    one more checkpoint)."""
    resume_tolerance: float = 0.0
    """Relative difference that a replayed metric may have. 0, the same to the last bit, is right on CPU; kernels
    of GPUs are not deterministic."""
    stop_at: str | None = None
    """Save and exit before this time, `2026-11-21T18:00` (ISO 8601); null: Slurm's end time where there is one."""
    lock_timeout_s: float = 60
    """Seconds without a sign of life after which a job on another machine no longer holds the run directory."""
    hf_save_interval: int = -1
    """Steps between exports in Hugging Face format; -1: none."""
    hf_save_lora: str = "merged"
    """What an export of a policy with adapters holds: `merged` weights, or the `adapter` alone, as peft reads it."""
    export_path: str = "${trainer.run_dir}/exports"
    """Where exports go, as `global_step_N/policy`."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The policy."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic; only with `algorithm.advantage_estimator=gae`."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """The reference; only with `algorithm.kl_coef` above 0."""

    def optimizer_steps(self, steps: int) -> dict[str, int]:
        """Optimizer steps of each trained role in the first `steps` steps of a run."""
        a_step = self.train_batch_size // self.mini_batch_size * self.update_epochs
        return {"critic": steps * a_step, "policy": max(0, steps - self.critic.warmup_steps) * a_step}

    def scheduled_steps(self) -> dict[str, int]:
        """Optimizer steps over which the learning rate of each trained role is scheduled."""
        lengths = {"policy": self.policy.optimizer.schedule_steps, "critic": self.critic.optimizer.schedule_steps}
        return {role: self.optimizer_steps(length or self.total_steps)[role] for role, length in lengths.items()}


@dataclass
class AlgorithmConfig:
    advantage_estimator: str = "grpo"
    """`gae` (with a critic), `grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `remax`, `maxrl`,
    `opo`, `grpo_passk` (see docs/algorithms.md), or an import path `package.module:function`."""
    normalize_std: bool | None = None
    """`grpo`: divide by the group's standard deviation; `gae`: whiten over the batch. null: the function's default."""
    gamma: float | None = None
    """`gae`, `reinforce_plus_plus`, `remax`: discount."""
    lam: float | None = None
    """`gae`: lambda."""
    pass_k: int | None = None
    """`grpo_passk`: the k."""
    policy_loss: str = "clip"
    """`clip`, `gspo`, `cispo`, `sapo`, `clip_cov`, `kl_cov`, `reinforce`, `importance_weighted_ce` (see
    docs/algorithms.md), or an import path `package.module:function`."""
    clip_low: float | None = None
    """`clip`, `gspo`, `cispo`, `clip_cov`: the ratio's lower bound is 1 - this."""
    clip_high: float | None = None
    """The same: the upper bound is 1 + this."""
    dual_clip: float | None = None
    """`clip`: for negative advantages the loss is at most this (above 1) times their size."""
    tau_pos: float | None = None
    """`sapo`: temperature of the gate for positive advantages."""
    tau_neg: float | None = None
    """`sapo`: the same for negative ones."""
    cov_frac: float | None = None
    """`clip_cov`, `kl_cov`: share of the tokens that is held back."""
    cov_low: float | None = None
    """`clip_cov`: only tokens with a covariance above this."""
    cov_high: float | None = None
    """`clip_cov`: and below this."""
    cov_kl_coef: float | None = None
    """`kl_cov`: weight of the penalty."""
    max_weight: float | None = None
    """`importance_weighted_ce`: importance weights are truncated here."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of functions that are given by import path."""
    aggregation: str = "token_mean"
    """How token losses become one number, always over the global mini-batch: `token_mean`,
    `seq_mean_token_mean`, `seq_mean_token_sum` or `seq_mean_token_sum_norm` (sums divided by
    `rollout.max_response_tokens`)."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference; 0: no reference model."""
    kl_in: str = "loss"
    """Where the KL goes: `loss` (a term of the policy loss) or `reward` (taken off each token's reward)."""
    kl_estimator: str = "k3"
    """`k1`, `k2`, `k3`, `abs`, or straight through, in the loss: `k1+`, `k3+`."""
    ref_update_interval: int = -1
    """The reference becomes the policy of that moment every so many steps, and is saved with checkpoints then; -1: it
    stays what the run began with."""
    kl_controller: str = "fixed"
    """`fixed`, or `adaptive`: `kl_coef` is steered so that the KL comes to `kl_target`."""
    kl_target: float = 0.05
    """`adaptive`: KL per token, nats."""
    kl_horizon: float = 10000
    """`adaptive`: completions over which the weight may change by a fifth or so."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the policy loss."""
    value_clip: float = 0.2
    """`gae`: new values are clipped to this far from the old ones in the value loss."""
    rollout_correction: str | None = None
    """Weigh tokens by trainer to engine probability: `tis` (truncated) or `mis` (masked); null: not."""
    rollout_correction_level: str = "token"
    """One weight a `token`, or one a sequence: `arithmetic`, `geometric` or `product` of its tokens' ratios."""
    rollout_correction_low: float = 0.5
    """`mis`: ratios below are left out."""
    rollout_correction_high: float = 2.0
    """Ratios above are cut to this (`tis`) or left out (`mis`)."""
    filter_zero_variance: bool = False
    """Leave prompts whose completions all got the same reward out of the losses, and of their denominators."""
    overlong_buffer: int = 0
    """DAPO's soft punishment: the reward falls over the last this many tokens before the limit; 0: none."""
    overlong_factor: float = 1.0
    """How far it falls."""
    overlong_masking: bool = False
    """Leave completions that were cut at the limit out of the losses."""
    dynamic_sampling: bool = False
    """Draw further prompts in place of those whose completions all get the same reward (DAPO, Yu et al., 2025)."""
    max_sample_batches: int = 10
    """`dynamic_sampling`: batches of prompts a step may draw; what is missing then is filled with prompts that
    were left out."""


@dataclass
class TinyConfig:
    hidden_size: int = 128
    """Width."""
    intermediate_size: int = 384
    """Width of the MLP."""
    num_layers: int = 2
    """Blocks."""
    num_heads: int = 4
    """Attention heads."""
    num_kv_heads: int = 2
    """Key and value heads."""
    head_dim: int = 32
    """Width of a head; vLLM's CPU attention wants a multiple of 32."""
    max_position_embeddings: int = 4096
    """Longest sequence, tokens."""
    tie_word_embeddings: bool = True
    """The output head shares the embedding's weights."""
    seed: int = 1
    """Of its random weights and the order of its warm start. Not `trainer.seed`: runs of several seeds start
    from one model."""


@dataclass
class ModelConfig:
    path: str | None = None
    """Hugging Face id or directory of a causal LM; null: build the embedded Qwen3 of `model.tiny`, give it
    a supervised warm start (see `sft`) and cache it."""
    tiny: TinyConfig = field(default_factory=TinyConfig)
    """Shape of the embedded model."""
    cache_dir: str = "${oc.env:TRAINER_CACHE,'~/.cache/trainer'}"
    """Where built and warm-started embedded models are kept, one directory per configuration."""
    attn_implementation: str = "sdpa"
    """Attention of the trainer's models: `sdpa`, `eager` or `flash_attention_2`."""
    trust_remote_code: bool = False
    """Allow the model directory to run its own Python code."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's chat template."""


@dataclass
class DataConfig:
    train_files: list[str] = field(default_factory=list)
    """Training prompts: `.jsonl` or `.parquet` files, or Hub datasets as `hf://OWNER/NAME?config=C&split=S`."""
    val_files: list[str] = field(default_factory=list)
    """Held-out prompts, likewise."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""
    answer_key: str = "answer"
    """Column of the reference answer, handed to the reward."""
    messages_key: str | None = None
    """Column of whole chats, in place of the two: the last message is the answer."""
    generator: str | None = None
    """Make prompts instead of reading files: `arithmetic` or `reverse_text`."""
    generator_args: dict[str, int] = field(default_factory=dict)
    """Options of the generator: `arithmetic` {max_value}; `reverse_text` {min_letters, max_letters}."""
    train_size: int = -1
    """Training examples to generate, or to use at most from the files (-1: all)."""
    val_size: int = -1
    """The same for validation."""
    system_prompt: str | None = None
    """Put before every prompt as a system message."""
    curriculum: str | None = None
    """Import path `package.module:function` of a function (prompts, epoch, rewards) that chooses the prompts of an
    epoch and their order (see `trainer.data.source.Curriculum`); null: all of them, shuffled."""


@dataclass
class RewardConfig:
    name: str = "reverse_text"
    """`gsm8k`, `math`, `arithmetic`, `reverse_text`, or an import path `package.module:function` of a
    function (completion: str, answer: str) -> float."""
    timeout_s: float = 10.0
    """Seconds one completion's reward may take; after that it is zero and counted. Rewards that fail may take 30
    times this in each process, whenever completions are scored; the rest is then not tried, zero and counted."""
    num_processes: int = 1
    """Processes that compute rewards."""


@dataclass
class RolloutConfig:
    engine: str = "vllm"
    """`vllm` or `transformers`."""
    num_engines: int = 1
    """Engines; prompts are spread over them."""
    tensor_parallel_size: int = 1
    """GPUs an engine (vLLM)."""
    colocate: bool = False
    """Engines share the GPUs of the ranks and sleep while these train; false: GPUs of their own."""
    n: int = 8
    """Completions a prompt."""
    max_prompt_tokens: int = 512
    """Longer prompts are dropped and counted when the data is read."""
    max_response_tokens: int = 512
    """Completions are cut here."""
    temperature: float = 1.0
    """Sampling temperature of rollouts; also divides the trainer's logits."""
    top_p: float = 1.0
    """Nucleus sampling: keep the smallest set of tokens with this probability."""
    top_k: int = -1
    """Keep the k most likely tokens; -1: all."""
    val_n: int = 0
    """Validation also samples this many completions a prompt for `val/pass@k`; 0: greedy only."""
    dtype: str = "auto"
    """Precision of the engine: `auto` (bfloat16 on CUDA, float32 on CPU), `bfloat16` or `float32`."""
    max_num_seqs: int = 256
    """Sequences an engine runs at once."""
    kv_cache_mb: int = 128
    """KV cache of a vLLM engine on CPU, MiB."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU's memory that a vLLM engine takes, weights and KV cache."""
    enforce_eager: bool = False
    """Run vLLM without CUDA graphs (always so on CPU)."""
    weight_sync: str = "auto"
    """How weights reach vLLM: `shared_memory` (engines on rank 0's node), `broadcast` (a gloo or NCCL group
    over ranks and engines) or `auto`: shared memory on one node, broadcast across nodes."""
    lora_sync: str = "auto"
    """What engines get of a policy with adapters: the `adapter`, `merged` weights, or `auto`: the adapter with vLLM,
    merged weights elsewhere."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments for `vllm.LLM`."""


@dataclass
class SFTConfig:
    steps: int = 200
    """Optimizer steps of supervised training (of the warm start, for the embedded model)."""
    batch_size: int = 8
    """Packed rows an optimizer step."""
    max_length: int = 256
    """Tokens a packed row; a longer example is cut."""
    train_on: list[str] = field(default_factory=lambda: ["assistant"])
    """Roles whose messages are learnt."""
    weights: list[float] = field(default_factory=list)
    """How often examples of each of `data.train_files` are drawn, relative to the others; empty: every example equally
    often."""
    source: str = "examples"
    """What `data.train_files` hold: `examples`, or `rollouts` as `logger.rollouts` writes them."""
    min_reward: float | None = None
    """`rollouts`: learn only those with at least this reward (rejection sampling); null: all."""
    max_weight: float | None = None
    """`rollouts`: weigh tokens by importance, what the model gives them now by what the policy gave them that sampled
    them, at most this (the loss `importance_weighted_ce`); null: plain cross-entropy (distillation)."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-3, warmup_steps=10))
    """Optimizer of supervised training."""


@dataclass
class WandbConfig:
    mode: str = "off"
    """`online`, `offline` or `off`."""
    project: str = "trainer"
    """W&B project."""
    entity: str | None = None
    """W&B team or user."""


@dataclass
class LoggerConfig:
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""
    tensorboard: bool = False
    """Write TensorBoard events to `{run_dir}/tensorboard`."""
    progress: bool = True
    """Show a live progress display on the terminal (plain lines where there is none)."""
    plot: bool = True
    """Draw `{run_dir}/report.png` at the end."""
    samples: int = 2
    """Completions to print at each validation."""
    rollouts: bool = False
    """Write every step's completions, with tokens, log-probs and rewards, to `{run_dir}/rollouts/step_N.jsonl`."""


@dataclass
class Config:
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    @property
    def has_critic(self) -> bool:
        return self.algorithm.advantage_estimator == "gae"

    @property
    def has_reference(self) -> bool:
        return self.algorithm.kl_coef > 0

    @property
    def reference_moves(self) -> bool:
        return self.has_reference and self.algorithm.ref_update_interval > 0

    @property
    def reference_is_base(self) -> bool:
        """The policy without its adapters is the reference, and no second model is needed."""
        t = self.trainer
        return self.has_reference and t.policy.lora.rank is not None and t.colocate and not self.reference_moves

    @property
    def syncs_adapter(self) -> bool:
        """Engines serve the adapters over the start weights."""
        r = self.rollout
        return self.trainer.policy.lora.rank is not None and (
            r.lora_sync == "adapter" or r.lora_sync == "auto" and r.engine == "vllm"
            and self.trainer.policy.lora.rank <= MAX_SERVED_LORA_RANK
        )  # fmt: skip


def chosen_options(function: Any, algorithm: AlgorithmConfig) -> dict[str, Any]:
    """The options of `function` (see `options_of`) that the config sets."""
    takes, takes_any = set(options_of(function)), takes_any_option(function)
    own = {name: value for name, value in algorithm.options.items() if takes_any or name in takes}
    return {name: value for name, value in named_options(algorithm).items() if name in takes} | own


def named_options(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """The options that the schema knows and the config sets."""
    names = {option for options in (*ADVANTAGE_OPTIONS.values(), *LOSS_OPTIONS.values()) for option in options}
    return {name: getattr(algorithm, name) for name in sorted(names) if getattr(algorithm, name) is not None}


# --------------------------------------------------------------------------------------------------------
# Hydra


def conf_dir() -> str:
    """Absolute path of the YAML groups: inside the installed package, or beside it in a checkout."""
    package = os.path.dirname(os.path.abspath(__file__))
    for candidate in (os.path.join(package, "conf"), os.path.join(os.path.dirname(package), "conf")):
        if os.path.isdir(candidate):
            return candidate
    raise AssertionError("the package was installed without its conf/ directory")


def register() -> None:
    """Make the schema and the resolvers known to Hydra and OmegaConf; harmless when repeated."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("sweep_suffix", _sweep_suffix, replace=True)
    OmegaConf.register_new_resolver("times", lambda a, b: a * b, replace=True)
    OmegaConf.register_new_resolver("quarter", lambda a: a // 4, replace=True)
    OmegaConf.register_new_resolver("embedded", _embedded, replace=True)


def _embedded(value: Any, otherwise: Any, *, _root_: Any) -> Any:
    """`value` while the embedded model is trained; `otherwise` when `model.path` names another."""
    return value if _root_.model.path is None else otherwise


def _sweep_suffix() -> str:
    """`/key=value,…` of what a multirun job sweeps, so that each job has a directory of its own; else empty.

    What the command line gives all jobs alike is left out, so that resuming the sweep finds the directories
    of the sweep that died.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return ""
    # Hydra escapes colons and the like; the command line has them plain.
    swept = [o for o in HydraConfig.get().overrides.task if o not in sys.argv and o.replace("\\", "") not in sys.argv]
    return "/" + ",".join(swept).replace("/", "_") if swept else ""


def to_config(dict_config: Any) -> Config:
    """Resolve interpolations of a composed Hydra config and return it as plain dataclasses, validated."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        cfg = OmegaConf.to_object(dict_config)
    except OmegaConfBaseException as error:
        raise UserError(str(error).splitlines()[0]) from error
    assert isinstance(cfg, Config)
    from trainer.validation import validate  # which imports the schema from here

    cfg.model.cache_dir = os.path.expanduser(cfg.model.cache_dir)
    validate(cfg)
    return cfg


def compose(overrides: list[str] | None = None) -> Config:
    """The validated config that `python -m trainer.main OVERRIDES` would run with."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register()
    with initialize_config_dir(version_base="1.3", config_dir=conf_dir()):
        return to_config(hydra_compose("config", overrides=overrides or []))


def valid_keys(prefix: str = "") -> list[str]:
    """Dotted names of all keys below the section `prefix` (empty: all sections)."""
    node: Any = Config()
    for part in filter(None, prefix.split(".")):
        node = getattr(node, part, None)
        if not dataclasses.is_dataclass(node):
            return []
    return [f"{prefix}.{f.name}".lstrip(".") for f in dataclasses.fields(node)]


# --------------------------------------------------------------------------------------------------------
# Reference


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for statement, following in zip(body, body[1:], strict=False):
        if (isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)):  # fmt: skip
            docs[statement.target.id] = " ".join(following.value.value.split())  # type: ignore[union-attr]
    return docs


def reference() -> str:
    """`docs/config.md`: every key with its type, default and meaning."""
    lines = ["# Configuration reference", "",
             "Generated from `trainer/config.py` by `make docs`. The default is the schema's; a group "
             "(`conf/<group>/<name>.yaml`) may set another.", ""]  # fmt: skip

    def section(cls: type, instance: Any, prefix: str) -> None:
        docs, rows, nested = field_docs(cls), [], []
        for f in dataclasses.fields(cls):
            value = getattr(instance, f.name)
            if dataclasses.is_dataclass(value):
                nested.append((type(value), value, f"{prefix}.{f.name}"))
            else:
                shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
                kind = str(f.type).replace("|", "or")
                rows.append(f"| `{prefix}.{f.name}` | {kind} | `{shown}` | {docs[f.name]} |")
        if rows:
            lines.extend([f"## {prefix}", "", "| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])
        for child in nested:
            section(*child)

    root = Config()
    for f in dataclasses.fields(Config):
        section(type(getattr(root, f.name)), getattr(root, f.name), f.name)
    return "\n".join(lines)


if __name__ == "__main__":
    print(reference())
