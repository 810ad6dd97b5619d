"""A run without models: the real Trainer, run directory and checkpoints over a learner that holds one number.

A step adds its episodes to the number. For tests of what a run saves, restores, logs and refuses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.jobs import comparable, metrics
from trainer.algorithms import FixedKL
from trainer.checkpoint.manifest import FileEntry
from trainer.checkpoint.storage import open_storage
from trainer.config import Config, SFTConfig
from trainer.episodes import Sample
from trainer.files.atomic_io import digest_bytes
from trainer.journal.history import Identity
from trainer.journal.journal import Journal
from trainer.metrics.timing import Timer
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer
from trainer.objectives import Experience
from trainer.run.directory import RunDirectory
from trainer.run.state import StopRequest
from trainer.sources.supervised import SupervisedSource
from trainer.trainer import Trainer

_FILE = "policy/number.json"


class ToyRanks:
    """Saves and loads one number, as the ranks save and load models."""

    saved_roles = ["policy"]
    num_parameters = (1, 1)
    count = 1
    description = {"roles": saved_roles, "ranks": 1, "replicas": 1}

    def __init__(self) -> None:
        self.number = 0.0
        self.fail_saves: list[OSError] = []

    def size(self) -> str:
        return "1 parameter"

    def begin_save(self, files: Any) -> Callable[[], list[dict]]:
        data = json.dumps(self.number).encode()

        def finish() -> list[dict]:
            if self.fail_saves:
                raise self.fail_saves.pop(0)
            open_storage(files.directory).write(_FILE, data)
            return [asdict(FileEntry(_FILE, len(data), digest_bytes(data)))]

        return finish

    def load(self, role: str, files: Any, kinds: Collection[str], steps_added: int = 0) -> None:
        if "weights" in kinds:
            self.number = json.loads(open_storage(files.directory).get(_FILE))

    def ask(self, numbers: Collection[int] | None, value: Any, method: str, *args: Any) -> dict[int, Any]:
        return {0: getattr(value, method)(*args)}

    def pop_stall_seconds(self) -> float:
        return 0.0


class ToyLearner:
    compares_completions = True
    token_scores = None

    def __init__(self) -> None:
        self.ranks = ToyRanks()
        self.cluster = SimpleNamespace(device="cpu", drain=lambda error: None)
        self.kl = FixedKL(0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"kl_controller": self.kl.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl.load_state_dict(state["kl_controller"])

    def build(self, model_path: str) -> None:
        pass

    def close(self) -> None:
        """The ranks are gone, and their state with them."""
        self.ranks.number = math.nan

    def restart(self, model_path: str, restores: bool) -> None:
        self.ranks.number = 0.0

    def profiled(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def make_experience(self, episodes: Any, step: int) -> Experience:
        drawn = np.asarray([float(episode.samples[0].token_ids[0]) for episode in episodes])
        return Experience({"drawn": drawn}, {})

    def update(self, experience: Experience, step: int) -> dict[str, float]:
        self.ranks.number = self.ranks.number / 2 + float(experience.batch["drawn"].sum())
        return {"policy/loss": self.ranks.number, "policy/grad_norm": 1.0}

    def speed(self, samples: int, tokens: int, seconds: float) -> dict[str, float]:
        return {}


_models: dict[str, tuple[str, Any]] = {}


def toy_config(root: Path, **trainer: Any) -> Config:
    """A supervised run in `root` that is continued where there is one."""
    cfg = Config()
    t = cfg.trainer
    t.run_dir, t.ckpt_path, t.export_path = str(root), str(root / "checkpoints"), str(root / "exports")
    t.total_steps, t.ckpt_interval, t.val_interval, t.resume_mode = 5, 1, -1, "latest"
    for name, value in trainer.items():
        setattr(t, name, value)
    return cfg


def toy_trainer(cfg: Config, directory: RunDirectory, model: Path, stop: StopRequest | None = None) -> Trainer:
    """The trainer of `cfg`, a supervised run of a toy learner.

    Args:
        model: directory for the initial weights; made if it is not there.
    """
    if not (model / "config.json").exists():
        build_tiny(TinyShape.of(cfg.model.tiny), str(model))
    tokenizer = load_tokenizer(str(model), None, False)
    examples = [Sample(np.full(4, i), np.ones(4, np.float32)) for i in range(10)]
    source = SupervisedSource(SFTConfig(batch_size=1, max_length=12), [examples], cfg.trainer.seed)
    learner: Any = ToyLearner()
    journal = Journal(cfg.trainer.run_dir, Identity("", str(cfg.trainer.seed)), directory.check)
    return Trainer(cfg, directory, source, learner, str(model), tokenizer, Timer(), stop or StopRequest(None), journal)


def toy_run(cfg: Config, model: Path, stop_after: int | None = None) -> Trainer:
    """Run to the end, or (as a kill would) to the end of step `stop_after`; returns the trainer."""
    with RunDirectory(cfg).open() as directory:
        trainer = toy_trainer(cfg, directory, model)
        if stop_after is not None:
            trainer.cfg.trainer.total_steps, wanted = stop_after, trainer.cfg.trainer.total_steps
            trainer.run()
            trainer.cfg.trainer.total_steps = wanted
        else:
            trainer.run()
    return trainer


def uninterrupted_run(root: Path, model: Path) -> tuple[Any, float]:
    """Train to the last step. Returns the metrics that can be compared, and the last number."""
    trainer = toy_run(toy_config(root), model)
    return comparable(metrics(root)), trainer.learner.ranks.number
