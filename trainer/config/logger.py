"""`logger.*`: where metrics go, and what the run shows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from trainer.config.fields import Section, choice, number, open_section, setting, subsection


@dataclass
class WandbConfig(Section):
    mode: str = choice("off", ("online", "offline", "off"), resume="harmless")
    """`online`, `offline` or `off`. W&B reads WANDB_ENTITY, WANDB_TAGS, WANDB_NOTES and WANDB_RUN_GROUP."""


@dataclass
class MlflowConfig(Section):
    enabled: bool = setting(False, resume="harmless")
    """Send the metrics to MLflow: to the server or database of the environment variable MLFLOW_TRACKING_URI, or else to
    `{run_dir}/mlflow.db`. Needs the extra `mlflow`."""


@dataclass
class TrackioConfig(Section):
    enabled: bool = setting(False, resume="harmless")
    """Write the metrics to the local database of Trackio, in the directory that the environment variable TRACKIO_DIR
    names. Needs the extra `trackio`."""


@dataclass
class SinkConfig(Section):
    name: str | None = setting(None, resume="harmless")
    """Import path `package.module:Class` of a sink of your own, for metrics and samples (see docs/extending.md). null:
    there is none."""
    kwargs: dict[str, Any] = open_section(resume="harmless")
    """Arguments for the class, by name."""


@dataclass
class LoggerConfig(Section):
    wandb: WandbConfig = subsection(WandbConfig)
    """Weights & Biases."""
    mlflow: MlflowConfig = subsection(MlflowConfig)
    """MLflow."""
    trackio: TrackioConfig = subsection(TrackioConfig)
    """Trackio."""
    sink: SinkConfig = subsection(SinkConfig)
    """Another service, or a file of your own."""
    project: str = setting("trainer", resume="harmless")
    """Project of the run in W&B and Trackio, and its experiment in MLflow."""
    name: str = setting("${trainer.run_name}${sweep_suffix:}", resume="harmless")
    """Name of the run in these services. In a `-m` sweep each job's overrides are appended."""
    tensorboard: bool = setting(False, resume="harmless")
    """Write TensorBoard events to `{run_dir}/tensorboard`."""
    prometheus_port: int | None = number(None, at_least=1, at_most=65535, resume="harmless")
    """TCP port on which the run serves its metrics to Prometheus (`/metrics`), and its health (`/health`). null: no
    server."""
    prometheus_host: str = setting("127.0.0.1", resume="harmless")
    """Address on which that server listens. There is no password: with another address than the loopback one, everybody
    who reaches the machine reads the metrics."""
    trace: bool = setting(False, resume="harmless")
    """Write a timeline of what all processes of the job do to `{run_dir}/trace.json`, for Perfetto
    (https://ui.perfetto.dev), up to 256 MiB."""
    progress: bool = setting(True, resume="harmless")
    """Show a live progress display on a terminal, and plain lines elsewhere."""
    plot: bool = setting(True, resume="harmless")
    """Draw `{run_dir}/report.png` at the end."""
    samples: int = number(3, at_least=0, resume="harmless")
    """Number of completions to show at each validation, on the terminal, in W&B and in TensorBoard, each time other
    ones. Every 10 steps as many training completions are shown in W&B and TensorBoard; in a run without validation,
    also on the terminal."""
    save_rollouts: bool = setting(False, resume="harmless")
    """Keep the episodes that every step has trained on, with tokens, log-probs, messages, rewards, and the trainer's
    log-probs, entropies and advantages, in `{run_dir}/rollouts/step_N.arrow`."""
    rollouts_interval: int = number(10, at_least=0, resume="harmless")
    """Without `save_rollouts`, keep the episodes of the first step, and of those whose number is a multiple of this,
    for people to look at. 0: of none."""

    def keeps_rollouts(self, step: int) -> bool:
        """Return whether the episodes of a step are kept."""
        at_times = self.rollouts_interval > 0 and (step == 1 or step % self.rollouts_interval == 0)
        return self.save_rollouts or at_times

    def without_services(self) -> LoggerConfig:
        """Return the section for a run within this one, whose metrics nobody follows."""
        return dataclasses.replace(
            self,
            wandb=dataclasses.replace(self.wandb, mode="off"),
            mlflow=dataclasses.replace(self.mlflow, enabled=False),
            trackio=dataclasses.replace(self.trackio, enabled=False),
            sink=SinkConfig(),
            prometheus_port=None,
        )
