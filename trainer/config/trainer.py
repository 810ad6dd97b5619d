"""`model.*`; `trainer.*`: the run, its steps, its ranks, how models are trained and sharded, and what is saved when.
`logger.*`: where metrics go, and what the run shows. `plan.*`: what `trainer plan` computes memory and time for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trainer.config.fields import LARGEST_SEED, LONGEST_TIME, ResumeRule, Section, setting, subsection

LOAD_COMPONENTS = ("weights", "optimizer", "rng", "data", "state")
LAYOUT_KEYS = ("dp_replicate", "context_parallel_size", "tensor_parallel_size")
PROCESSES = "processes"
"""`trainer.ray_address` of a run without Ray."""
THIS_PROCESS = "this_process"
"""`trainer.ray_address` of a run in one process."""


_OTHER_MODEL = ResumeRule("never", "the saved weights belong to another model", ("weights", "optimizer"))


SEED_OF_TINY = 1
"""Seed of the random weights of the built-in model and of the order of its warm start, whatever `trainer.seed` is: runs
of several seeds start from one model."""
LONGEST_OF_TINY = 4096
"""Tokens of the longest sequence of the built-in model."""


@dataclass
class TinyConfig(Section):
    hidden_size: int = setting(128, at_least=32, resume=_OTHER_MODEL)
    """Width. A head has 32 numbers, and the MLP has three times the width."""
    num_layers: int = setting(2, at_least=1, resume=_OTHER_MODEL)
    """Number of blocks."""
    # A resume compares the initial weights where a checkpoint depends on them, so the key itself is harmless.
    start_accuracy: float | None = setting(0.7, above=0, at_most=1, resume="harmless")
    """The warm start ends when the model answers this share of 128 training prompts exactly, and at the latest after
    `sft.steps`: reinforcement learning needs answers to improve. null: always after `sft.steps`."""


@dataclass
class ModelConfig(Section):
    path: str | None = setting(
        None, resume=ResumeRule("rollouts", "the saved weights belong to that model", ("weights", "optimizer"))
    )
    """Hugging Face id or directory of a causal LM. null: build the built-in Qwen3 of `model.tiny`, warm it up with
    supervised steps (see `sft`) and cache it."""
    tiny: TinyConfig = subsection(TinyConfig)
    """Shape of the built-in model."""
    cache_dir: str | None = setting(None, resume="harmless")
    """Directory of the built-in models that were built and warmed up, one directory per configuration, and of the
    verdicts on models (`check`). null: the
    environment variable TRAINER_CACHE, or `~/.cache/trainer`."""
    attn_implementation: str = setting("sdpa", choices=("sdpa", "eager", "flash_attention_2"), resume="rollouts")
    """Attention of the trainer's models. `sdpa`: torch's kernels, each packed sequence by itself; a class without them
    that cannot pack has its own attention, and one sequence a row. `flash_attention_2`: the package flash-attn.
    `eager`: plain matrices, whose size is the square of all tokens of a micro-batch."""
    check: str = setting("refuse", choices=("refuse", "accept"), resume="harmless")
    """What happens if the comparison before the first step finds that the ranks compute something else than the model's
    own class in transformers: `refuse` the run, or `accept` it. That is said at each start and in each checkpoint's
    manifest. The verdict is kept in `cache_dir`."""
    trust_remote_code: bool = setting(False, resume="rollouts")
    """Allow the model directory to run its own Python code."""
    chat_template: str | None = setting(None, resume="rollouts")
    """A Jinja file that replaces the tokenizer's chat template, or the name of one of its templates if there are
    several. null: `tool_use` for chats with tools, and `default` for the others."""
    chat_template_kwargs: dict[str, Any] = setting(default_factory=dict, is_open=True, resume="rollouts")
    """Variables of the chat template. Qwen3: `{enable_thinking: false}` lets the model answer without thinking first.
    Exported models keep them in their chat template."""


SCHEDULE_STEPS = ResumeRule(
    "update", "the learning rate of every step goes by it (null: the number of steps of the run)"
)


@dataclass
class OptimizerConfig(Section):
    name: str = setting(
        "adamw", resume=ResumeRule("never", "the saved moments belong to another optimizer", ("optimizer",))
    )
    """`adamw`, `muon` (linear layers of the blocks and experts; AdamW has the rest), or the import path of a function
    that gets the named parameters, `lr`, `weight_decay` and `options`, and returns a torch optimizer."""
    options: dict[str, Any] = setting(default_factory=dict, is_open=True, resume="update")
    """Options of the optimizer. `muon`: `momentum` (0.95), `nesterov` (true), `ns_steps` (5), `adamw_lr` (`lr`)."""
    lr: float = setting(1e-6, at_least=0, resume="update")
    """Peak learning rate."""
    betas: list[float] = setting(default_factory=lambda: [0.9, 0.999], resume="update")
    """AdamW's decay rates of the first and second moment."""
    eps: float = setting(1e-8, above=0, resume="update")
    """AdamW's epsilon."""
    weight_decay: float = setting(0.0, at_least=0, resume="update")
    """Decoupled weight decay."""
    max_grad_norm: float = setting(1.0, at_least=0, resume="update")
    """Gradients are clipped to this global norm. 0: no clipping."""
    scheduler: str = setting("constant", choices=("constant", "cosine"), resume="update")
    """Learning rate after warm-up: `constant`, or `cosine` (decays to `min_lr_ratio` over `schedule_steps`)."""
    warmup_steps: int = setting(0, at_least=0, resume="update")
    """Optimizer steps of linear warm-up from 0."""
    min_lr_ratio: float = setting(0.1, at_least=0, at_most=1, resume="update")
    """Learning rate at the end of `cosine`, as a share of `lr`."""
    schedule_steps: int | None = setting(None, at_least=1, resume=SCHEDULE_STEPS)
    """Steps of the run after which `cosine` has ended; later steps keep its last value. null: the steps of the run
    (`trainer.total_steps`, `sft.steps`). With a number, a run can be extended without changing the schedule."""


@dataclass
class FSDPConfig(Section):
    param_dtype: str = setting("auto", choices=("auto", "bfloat16", "float32"), resume="rollouts")
    """Precision of parameters in forward and backward passes: `auto` (bfloat16 on CUDA, float32 on CPU), `bfloat16`
    or `float32`. The optimizer always keeps float32 master weights. bfloat16 is faster on CPUs with matrix units."""
    reshard_after_forward: bool | None = setting(None, resume="harmless")
    """Free a block's gathered parameters after its forward pass, which takes less memory. An update then gathers them
    twice for each micro-batch. false: they stay, and are gathered once for a mini-batch. null: false on GPUs if each
    rank has all weights, all of them are trained, and `cpu_offload` is off; else true."""
    cpu_offload: bool = setting(False, resume="rounding")
    """Keep parameters, gradients and optimizer state in host memory between uses."""
    compile: bool | None = setting(None, resume="rounding")
    """Compile the blocks and the softmax with `torch.compile`: faster passes, but the first ones wait for the compiler.
    null: on CUDA without `trainer.context_parallel_size`, `trainer.tensor_parallel_size` and `trainer.deterministic`;
    not on CPU. true is refused with these three. With `trainer.deterministic`, because what a kernel is compiled to
    depends on the sizes that a process meets first."""
    activation_checkpointing: str = setting("none", choices=("none", "selective", "full"), resume="rounding")
    """Which activations of a block the backward pass computes again instead of keeping them: `none`, `selective` (all
    but the results of matrix products and of attention: little work, about half of the memory) or `full` (all: about a
    third more work, least memory)."""


@dataclass
class LoraConfig(Section):
    rank: int | None = setting(
        None, at_least=1, resume=ResumeRule("never", "the saved adapters have another shape", ("weights", "optimizer"))
    )
    """Rank of the low-rank adapters that are trained while the weights stay frozen (LoRA, Hu et al., 2021). null:
    train all weights."""
    alpha: float = setting(32, above=0, resume="rollouts")
    """Scale of the adapters: their product is multiplied by `alpha / rank`."""
    target_modules: list[str] = setting(
        default_factory=list,
        resume=ResumeRule("never", "the saved adapters belong to other layers", ("weights", "optimizer")),
    )
    """Names of the linear layers that get adapters, such as `q_proj`. Empty: all linear layers of the blocks."""


@dataclass
class PolicyConfig(Section):
    optimizer: OptimizerConfig = subsection(OptimizerConfig)
    """Optimizer of the policy, and of the critic but for the learning rate."""
    lora: LoraConfig = subsection(LoraConfig)
    """Adapters of the policy and of the critic, whose value head is always trained in full."""
    fsdp: FSDPConfig = subsection(FSDPConfig)
    """Sharding of all models."""


@dataclass
class CriticOptimizerConfig(Section):
    lr: float = setting(5e-6, at_least=0, resume="update")
    """Peak learning rate of the critic. The rest is as in `trainer.policy.optimizer`."""


@dataclass
class CriticConfig(Section):
    path: str | None = setting(None, resume="update")
    """Initial weights of the critic's backbone: a Hugging Face id or a directory. null: those of the policy."""
    optimizer: CriticOptimizerConfig = subsection(CriticOptimizerConfig)
    """Optimizer of the critic."""
    warmup_steps: int = setting(0, at_least=0, resume="update")
    """First steps of the run in which only the critic is trained."""


@dataclass
class TrainerConfig(Section):
    task: str = setting("rl", resume=ResumeRule("never", "it is a checkpoint of that task", ("data",)))
    """What is trained: `rl` (completions that the policy samples, with rewards or environments), `sft` (examples or
    kept completions), `dpo` (preferences), `rm` (a reward model), or a task of your own, by the import path of its
    `TaskSpec`. `trainer sft` sets it to `sft`, and so on. A run continues with no other task."""
    run_name: str = setting("default", resume="harmless")
    """Plain name of the run, without slashes. It is part of `run_dir` and of the name in W&B."""
    run_dir: str = setting("outputs/${trainer.run_name}${sweep_suffix:}", resume="harmless")
    """Directory of the run. In a `-m` sweep each job's overrides are appended."""
    seed: int = setting(
        1,
        at_least=0,
        at_most=LARGEST_SEED,
        resume=ResumeRule("never", "every random draw of the run depends on it", ("data",)),
    )
    """Seed of every random draw of the run."""
    total_steps: int = setting(140, at_least=1, resume="harmless")
    """Number of steps after which the run is finished."""
    num_workers: int = setting(1, at_least=1, resume="rounding")
    """Number of FSDP2 ranks: GPUs, or processes on CPU."""
    min_world_size: int | None = setting(None, at_least=1, resume="harmless")
    """If the cluster of `ray_address` has no capacity for `num_workers` ranks, at the start or after the loss of a
    node, the job takes fewer ranks, but at least this number. null: it never takes fewer."""
    excluded_nodes: list[str] = setting(default_factory=list, resume="harmless")
    """Addresses of nodes of the cluster of `ray_address` that this run does not use."""
    dp_replicate: int = setting(1, at_least=1, resume="rounding")
    """HSDP: the ranks form this many replicas of the model, each sharded over `num_workers / dp_replicate` ranks."""
    context_parallel_size: int = setting(1, at_least=1, resume="rounding")
    """Ranks that share the tokens of a micro-batch, for long sequences: each computes a part of the tokens and, in the
    attention, a part of the heads (Ulysses). It divides the number of attention heads."""
    tensor_parallel_size: int = setting(1, at_least=1, resume="rounding")
    """Ranks that share each matrix of a model, by the model's own Hugging Face plan. It divides the numbers of
    attention heads, of key and value heads, and of tokens in the vocabulary."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), resume="rounding")
    """`cuda`, `cpu`, or `auto`: CUDA if the machine has it and the installed vLLM can use it."""
    deterministic: bool = setting(False, resume="rounding")
    """Make runs on GPUs repeat to the last bit: ranks and engines use deterministic kernels, vLLM computes a sequence
    in the same way in any batch, and requests go to engines by plan, not by which engine is free first. It costs speed.
    Runs on CPU repeat without it."""
    offload: str = setting("none", choices=("none", "optimizer", "all"), resume="harmless")
    """What ranks move to host memory while engines on the same GPUs generate, and of a role also while another is
    trained: nothing, the `optimizer`'s states, or `all` (weights too). In a step, states cross PCIe twice, the policy's
    weights three times, with a critic four times. Needs `rollout.colocate`."""
    ray_address: str | None = setting(None, resume="harmless")
    """`host:port` (or `auto`) of a Ray cluster to join. null: start one on this machine for this run. `processes`: use
    plain processes of this machine in place of Ray, for debugging; their output goes to the terminal. `this_process`:
    one rank and one transformers engine are threads of the driver, on the CPU, so that breakpoints stop in all of them.
    Numbers, checkpoints and resumes are the same."""
    placement_timeout_s: float | None = setting(None, at_least=0.001, at_most=LONGEST_TIME, resume="harmless")
    """The longest time, in seconds, that the job waits for capacity in the cluster of `ray_address`. Set it if nodes
    are added during the wait, because that can take minutes. At its start, a job with `min_world_size` waits as long
    for the capacity of all ranks before it takes fewer. After a failure it waits 10 seconds for that. null: 60 seconds,
    but a cluster that is too small ends the job immediately, and 10 seconds before it takes fewer ranks."""
    max_restarts: int = setting(3, at_least=0, resume="harmless")
    """Number of times within an hour that the job starts its ranks again after one of them died, hung,
    ran out of memory or raised an exception. Training continues from the last commit. 0: such a failure ends the
    job."""
    copy_steps: bool = setting(False, resume="harmless")
    """Copy the state of the ranks to shared memory after each step. Ranks that start again continue from the last step
    that finished, in place of the last commit. All ranks must be on the machine of the driver, whose `/dev/shm` holds
    two copies: 24 bytes for each trained parameter."""
    divergence_limits: dict[str, float] = setting(default_factory=dict, is_open=True, resume="harmless")
    """Metrics with limits, such as `+trainer.divergence_limits={policy/kl:1.0,policy/grad_norm:100}`. If a metric stays
    above its limit for 3 steps in a row, the run has diverged: it ends with status 3, and its
    message says how to go back. Empty: never."""
    train_batch_size: int = setting(64, at_least=1, resume="rollouts")
    """Prompts per step; for a task whose groups are no completions of a prompt, groups."""
    mini_batch_size: int = setting(32, at_least=1, resume="update")
    """Prompts per optimizer step; groups, as for `train_batch_size`."""
    update_epochs: int = setting(1, at_least=1, resume="update")
    """Passes over the experience of a step."""
    max_tokens_per_micro_batch: int = setting(16384, at_least=1, resume="rounding")
    """Largest number of tokens in one forward pass of a rank. The sequences follow one another without padding, and a
    prompt that several share is computed once, and counts once, with `model.attn_implementation=sdpa` and `pack`. A
    longer sequence is processed alone. Ranks along the axis of `context_parallel_size` take so many together for each
    of them."""
    pack: bool = setting(True, resume="rounding")
    """Put several sequences into one row. false: each forward pass has one sequence, and attends as the model's own
    class does, through its own mask. It is slower, and trains models whose sequences do not stay apart in a row."""
    profile: list[int] = setting(default_factory=list, at_least=1, resume="harmless")
    """Steps that torch's profiler records, such as `[5,20]`: what ranks compute. The files are in
    `{run_dir}/profile/step_N`, on the machine of the rank, on GPUs with a snapshot of its memory. It slows these steps
    down; numbers stay the same."""
    val_interval: int = setting(10, at_least=1, off=-1, resume="harmless")
    """Validate every this many steps and after the last step; a run that generates, also the initial weights, as step
    0. -1: never."""
    ckpt_path: str = setting("${trainer.run_dir}/checkpoints", resume="harmless")
    """Directory of the checkpoints, or a prefix in an object store: `s3://bucket/run` (needs the extra `s3`),
    `gs://bucket/run` (needs the extra `gcs`). Credentials, region and endpoint come from where the store's own tools
    read them."""
    ckpt_cache_dir: str | None = setting(None, resume="harmless")
    """With `ckpt_path` in an object store: a directory that all ranks see, where checkpoints are committed first. They
    are uploaded while training continues. If all ranks are on one machine, it may be on its disk, or in its memory
    (`/dev/shm/…`). null: checkpoints go straight to `ckpt_path`."""
    ckpt_interval: int | str = setting(10, at_least=1, off=-1, resume="harmless")
    """Steps between checkpoints. -1: do not save by steps. `auto`: save by time, at the interval that loses least,
    given the measured cost of a save and a failure every 4 hours (Young, 1974; Daly, 2006). Whatever the value, the
    last step is saved, and the step after which the job is asked to stop."""
    max_ckpts_to_keep: int = setting(-1, at_least=1, off=-1, resume="harmless")
    """Number of newest checkpoints to keep. -1: all. The newest checkpoint, and the one the run resumed from, are
    never deleted."""
    keep_best: int = setting(0, at_least=0, resume="harmless")
    """Also keep this many checkpoints with the best `best_metric`."""
    best_metric: str = setting("val/accuracy", resume="harmless")
    """Metric of the best step, and of `keep_best`, which goes by its value at the step of the checkpoint. The highest
    value is the best; with a minus before the name, such as `-policy/kl`, the lowest. A task that measures no accuracy
    puts a metric of its own in the place of `val/accuracy`: `sft` the lowest `val/loss`."""
    resume_mode: str | None = setting(None, choices=(None, "none", "latest", "from_path"), resume="harmless")
    """`latest`: resume from the newest valid checkpoint in `ckpt_path`, or start a new run if there is none (one
    command for the first start and every restart). `from_path`: fork from `resume_path`. `none` or null: start a new
    run."""
    resume_path: str | None = setting(None, resume="harmless")
    """With `resume_mode=from_path`: the `global_step_N` directory of another run to fork from. Restarted with
    the same command, the fork continues from its own newest checkpoint."""
    load_components: list[str] = setting(default_factory=list, choices=LOAD_COMPONENTS, resume="harmless")
    """What a fork loads, any of `weights`, `optimizer` (with its schedule), `rng`, `data` (the position in the data)
    and `state` (step, counters, best metric). Empty: all."""
    allow_config_change: list[str] = setting(default_factory=list, resume="harmless")
    """Keys, or sections, that may differ from the config of the checkpoint to resume from."""
    on_resume_mismatch: str = setting("warn", choices=("warn", "stop"), resume="harmless")
    """What to do if a replayed step differs from the metrics that the killed run logged: `warn` or `stop`."""
    deadline: str | None = setting(None, resume="harmless")
    """Save and exit before this time, such as `2026-11-21T18:00` (ISO 8601). null: before the end of the Slurm job, if
    there is one."""
    hf_save_interval: int = setting(-1, at_least=1, off=-1, resume="harmless")
    """Steps between exports in Hugging Face format. -1: no exports."""
    hf_save_lora: str = setting("merged", choices=("merged", "adapter"), resume="harmless")
    """What an export of a policy with adapters contains: `merged` weights, or the `adapter` alone, as peft reads it."""
    export_path: str = setting("${trainer.run_dir}/exports", resume="harmless")
    """Directory of the exports, or a prefix in an object store; each is written to `global_step_N/policy` in it."""
    policy: PolicyConfig = subsection(PolicyConfig)
    """The policy."""
    critic: CriticConfig = subsection(CriticConfig, resume="update")
    """The critic. Only if a function of `algorithm` reads `values`, as `gae` does."""

    @property
    def layout(self) -> dict[str, int]:
        """The sizes whose product divides the number of ranks, by key."""
        return {key: getattr(self, key) for key in LAYOUT_KEYS}

    @property
    def layout_size(self) -> int:
        """The number of ranks is a multiple of this."""
        return math.prod(self.layout.values())


SERVICES = ("wandb", "mlflow", "trackio", "tensorboard")


@dataclass
class LoggerConfig(Section):
    services: list[str] = setting(default_factory=list, resume="harmless")
    """Services that get the metrics (docs/metrics.md), any of `wandb` (W&B reads WANDB_MODE, WANDB_ENTITY, WANDB_TAGS,
    WANDB_NOTES and WANDB_RUN_GROUP), `mlflow` (the server or database of MLFLOW_TRACKING_URI, or else
    `{run_dir}/mlflow.db`; needs the extra `mlflow`), `trackio` (the database in the directory TRACKIO_DIR; needs the
    extra `trackio`), `tensorboard` (`{run_dir}/tensorboard`), and sinks of your own by their import paths
    `package.module:Class` (docs/extending.md)."""
    project: str = setting("trainer", resume="harmless")
    """Project of the run in W&B and Trackio, and its experiment in MLflow."""
    name: str = setting("${trainer.run_name}${sweep_suffix:}", resume="harmless")
    """Name of the run in these services. In a `-m` sweep each job's overrides are appended."""
    prometheus: str | None = setting(None, resume="harmless")
    """TCP port on which the run serves its metrics to Prometheus (`/metrics`), and its health (`/health`), such as
    `9400`, or `HOST:PORT`. The host is 127.0.0.1 by default. There is no password: with another address than the
    loopback one, everybody who reaches the machine reads the metrics. null: no server."""
    trace: bool = setting(False, resume="harmless")
    """Write a timeline of what all processes of the job do to `{run_dir}/trace.json`, for Perfetto
    (https://ui.perfetto.dev), up to 256 MiB."""
    plot: bool = setting(True, resume="harmless")
    """Draw `{run_dir}/report.png` at the end."""
    samples: int = setting(3, at_least=0, resume="harmless")
    """Number of completions to show at each validation, on the terminal, in W&B and in TensorBoard, each time other
    ones. Every 10 steps as many training completions are shown in W&B and TensorBoard; in a run without validation,
    also on the terminal."""
    save_rollouts: bool = setting(False, resume="harmless")
    """Keep the episodes that every step has trained on, with tokens, log-probs, messages, rewards, and the trainer's
    log-probs, entropies and advantages, in `{run_dir}/rollouts/step_N.arrow`. false: those of the first step and of
    every tenth one, for people to look at."""

    @property
    def sinks(self) -> list[str]:
        """The import paths in `services`."""
        return [service for service in self.services if ":" in service]

    @property
    def prometheus_address(self) -> tuple[str, int]:
        """Host and port of `prometheus`. Raises ValueError: it has no port."""
        host, _, port = str(self.prometheus).rpartition(":")
        return host.strip("[]") or "127.0.0.1", int(port)

    def keeps_rollouts(self, step: int) -> bool:
        """Return whether the episodes of a step are kept."""
        return self.save_rollouts or step == 1 or step % 10 == 0


@dataclass
class PlanConfig(Section):
    gpus: str = setting("cpu", resume="harmless")
    """Cluster to plan for: `8xH100` (one node of eight), `4x8xH100` (four such nodes), or `cpu`, this machine."""
    prompt_tokens: int | None = setting(None, at_least=1, resume="harmless")
    """Tokens of a prompt, on average. null: half of `rollout.max_prompt_tokens`; in supervised training, of
    `sft.max_length`."""
    response_tokens: int | None = setting(None, at_least=1, resume="harmless")
    """Tokens of a completion, on average; with an environment, of all replies and messages after the prompt. null: half
    of `rollout.max_response_tokens`, or of what the prompt leaves of the longest episode; in supervised training, what
    the prompt leaves of `sft.max_length`."""
