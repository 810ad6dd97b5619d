"""`logger.*`: where metrics go, and what the run shows."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.fields import Section, choice, number, setting, subsection


@dataclass
class WandbConfig(Section):
    mode: str = choice("off", ("online", "offline", "off"), resume="harmless")
    """`online`, `offline` or `off`."""
    project: str = setting("trainer", resume="harmless")
    """W&B project."""
    entity: str | None = setting(None, resume="harmless")
    """W&B team or user."""
    name: str = setting("${trainer.run_name}${sweep_suffix:}", resume="harmless")
    """Name of the run in W&B. In a `-m` sweep each job's overrides are appended."""
    group: str | None = setting("${if_sweep:${trainer.run_name}}", resume="harmless")
    """W&B shows the runs of a group together. By default the jobs of a `-m` sweep are a group."""
    tags: list[str] = setting(default_factory=list, resume="harmless")
    """Tags of the run in W&B."""
    notes: str | None = setting(None, resume="harmless")
    """Description of the run in W&B."""


@dataclass
class LoggerConfig(Section):
    wandb: WandbConfig = subsection(WandbConfig)
    """Weights & Biases."""
    tensorboard: bool = setting(False, resume="harmless")
    """Write TensorBoard events to `{run_dir}/tensorboard`."""
    progress: bool = setting(True, resume="harmless")
    """Show a live progress display on a terminal, and plain lines elsewhere."""
    plot: bool = setting(True, resume="harmless")
    """Draw `{run_dir}/report.png` at the end."""
    samples: int = number(3, at_least=0, resume="harmless")
    """Number of completions to show at each validation, on the terminal, in W&B and in TensorBoard. Each validation
    shows other completions."""
    samples_interval: int = number(10, at_least=0, resume="harmless")
    """Steps between two times that `samples` training completions are shown in W&B and TensorBoard; in a run without
    validation, also on the terminal. 0: never."""
    validation: bool = setting(True, resume="harmless")
    """Write the completions of every validation, with rewards, to `{run_dir}/validation/step_N.jsonl`."""
    save_rollouts: bool = setting(False, resume="harmless")
    """Keep the episodes that every step has trained on, with tokens, log-probs, messages, rewards, and the trainer's
    log-probs, entropies and advantages, in `{run_dir}/rollouts/step_N.arrow`."""
