"""Run directories for tests: held as a job holds them, with small checkpoints and no models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.config import set_value
from trainer.checkpoint.components import Component, config_component, config_digest, json_component
from trainer.config import Config, DataConfig, RewardConfig
from trainer.data.rollout_io import read_lines
from trainer.metrics.tracker import read_metrics
from trainer.run.directory import RunDirectory

Settings = dict[str, Any]
"""Values of dotted keys."""


class OpenRun:
    """A run directory with a state of one step: `with OpenRun(cfg) as run`."""

    def __init__(self, cfg: Config, state: dict[str, Any] | None = None):
        self.cfg = cfg
        self.state = state if state is not None else {}
        self.directory = RunDirectory(cfg)
        self.components: list[Component] = [
            config_component(cfg),
            json_component("trainer_state", lambda: self.state, self.state.update),
            json_component("data", lambda: {"position": self.state["step"]}, lambda _: None, kinds=("data",)),
        ]

    def __enter__(self) -> OpenRun:
        self.directory.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.directory.close()

    @property
    def resume(self) -> Any:
        return self.directory.resume

    def save(self, step: int, metrics: Mapping[str, float] | None = None, roles: Sequence[str] | None = None) -> None:
        """Save, and wait until it has ended."""
        checkpoints = self.directory.checkpoints
        description = {
            "roles": [role.name for role in self.cfg.roles if role.saved] if roles is None else list(roles),
            "ranks": 1,
            "replicas": 1,
            "config_digest": config_digest(self.cfg),
            "score_metric": self.cfg.compared_by[0],
            "score": (metrics or {}).get(self.cfg.compared_by[0]),
            "parent": self.directory.lineage or None,
            "metrics_from": next((row["step"] for row in read_metrics(self.directory.metrics_file)), None),
        }
        checkpoints.save(step, self.components, description)
        checkpoints.wait()

    def load(self) -> None:
        """Restore what the run directory has found."""
        checkpoint, restore = self.resume.checkpoint, self.resume.restore
        self.directory.checkpoints.load(checkpoint, restore.chosen(self.components, checkpoint), restore)


def a_run(root: Path, steps: Sequence[int] = (1, 2), **trainer: Any) -> None:
    """A run that has trained and saved these steps."""
    with OpenRun(configured(root, resume_mode="latest", **trainer)) as run:
        for step in steps:
            run.state["step"] = step
            with open(root / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step, "reward/mean": step / 2}) + "\n")
            run.save(step)


def configured(root: Any, *changes: Settings, **trainer: Any) -> Config:
    """The default config of a run in `root`, with these changes."""
    cfg = Config()
    paths = {"trainer.run_dir": str(root), "trainer.ckpt_path": str(root / "checkpoints")}
    for key, value in {**paths, **{f"trainer.{k}": v for k, v in trainer.items()}, **_merged(changes)}.items():
        set_value(cfg, key, value)
    return cfg


def on_prompts(root: Path, file: Path, count: int, **trainer: Any) -> Config:
    """A config of a run in `root` that samples: `count` prompts, which it writes to `file`, three a step, with rewards
    that depend on the completion alone.
    """
    file.write_text("\n".join(json.dumps({"prompt": f"p{i}", "answer": "x"}) for i in range(count)))
    given = {"ckpt_interval": 2, "on_resume_mismatch": "stop", **trainer}
    cfg = configured(root, train_batch_size=3, resume_mode="latest", max_ckpts_to_keep=9, **given)
    cfg.rollout.n, cfg.rollout.max_response_tokens = 2, 8
    cfg.data = DataConfig(train_files=[str(file)], val_files=[str(file)], val_size=2)
    cfg.reward = RewardConfig(name="tests.support.hashed_reward:hashed", num_processes=1)
    cfg.logger.plot = False
    return cfg


def on_files(root: Path) -> Config:
    """A config whose training file has a column with chats."""
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    (root / "train.jsonl").write_text(json.dumps({"chat": chat}) + "\n")
    cfg = Config()
    cfg.data.train_files = cfg.data.val_files = [str(root / "train.jsonl")]
    return cfg


def _merged(changes: tuple[Settings, ...]) -> Settings:
    return {key: value for change in changes for key, value in change.items()}


def opened(cfg: Config) -> OpenRun:
    """A run of `cfg`, with a part that stands for its models."""
    run = OpenRun(cfg, {"step": 0})
    run.components.append(json_component("models", dict, lambda _: None))
    return run


def save_steps(cfg: Config, *steps: int, metrics: dict[str, float] | None = None) -> None:
    """A run of `cfg` that has saved these steps."""
    cfg.trainer.resume_mode = "latest"
    with opened(cfg) as run:
        for step in steps:
            run.save(step, metrics)


def rollouts_of(run: Path, step: int) -> list[dict[str, Any]]:
    """The episodes that a run has kept of a step, as `trainer rollouts` prints them."""
    return list(read_lines(str(run / f"rollouts/step_{step}.arrow")))
