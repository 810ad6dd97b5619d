"""`logger.*`: where metrics go, and what the run shows. `plan.*`: what `trainer plan` computes memory and time for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.fields import Section, setting

if TYPE_CHECKING:
    from trainer.config.schema import Config


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
        """Host and port of `prometheus`. ValueError: it has no port."""
        host, _, port = str(self.prometheus).rpartition(":")
        return host.strip("[]") or "127.0.0.1", int(port)

    def keeps_rollouts(self, step: int) -> bool:
        """Return whether the episodes of a step are kept."""
        return self.save_rollouts or step == 1 or step % 10 == 0

    def without_services(self) -> LoggerConfig:
        """Return the section for a run within this one, whose metrics nobody follows."""
        return dataclasses.replace(self, services=[], prometheus=None)


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

    def mean_prompt(self, config: Config) -> int:
        """Return the tokens of a prompt of a rollout, on average."""
        return self.prompt_tokens or max(1, config.rollout.max_prompt_tokens // 2)

    def most_response_tokens(self, config: Config) -> int:
        """Return the most tokens after the prompt in a rollout; with an environment, those of all turns."""
        if not any(environment.name for environment in config.environments):
            return config.rollout.max_response_tokens
        return max(1, config.longest_sequence - self.mean_prompt(config))
