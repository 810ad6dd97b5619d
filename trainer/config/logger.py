"""`logger.*`: where metrics go, and what the run shows."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.config.fields import Section, choice, number


@dataclass
class WandbConfig(Section):
    mode: str = choice("off", ("online", "offline", "off"))
    """`online`, `offline` or `off`."""
    project: str = "trainer"
    """W&B project."""
    entity: str | None = None
    """W&B team or user."""
    name: str = "${trainer.run_name}${sweep_suffix:}"
    """Name of the run in W&B. In a `-m` sweep each job's overrides are appended."""
    group: str | None = "${in_sweep:${trainer.run_name}}"
    """W&B shows the runs of a group together. By default the jobs of a `-m` sweep are a group."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run in W&B."""
    notes: str | None = None
    """Description of the run in W&B."""


@dataclass
class LoggerConfig(Section):
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""
    tensorboard: bool = False
    """Write TensorBoard events to `{run_dir}/tensorboard`."""
    progress: bool = True
    """Show a live progress display on a terminal, and plain lines elsewhere."""
    plot: bool = True
    """Draw `{run_dir}/report.png` at the end."""
    samples: int = number(3, at_least=0)
    """Number of completions to show at each validation, on the terminal, in W&B and in TensorBoard. Each validation
    shows other ones."""
    samples_interval: int = number(10, at_least=0)
    """Every so many steps, show as many training completions in W&B and TensorBoard; in a run without validation, also
    on the terminal. 0: never."""
    validation: bool = True
    """Write the completions of every validation, with rewards, to `{run_dir}/validation/step_N.jsonl`."""
    save_rollouts: bool = False
    """Write the completions of every step, with tokens, log-probs and rewards, to `{run_dir}/rollouts/step_N.jsonl`."""
