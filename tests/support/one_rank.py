"""A run whose policy is one rank in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.odd_files import config
from tests.support.roles import roles
from tests.support.runs import OpenRun
from trainer.checkpoint.components import assets_component, config_component, json_component, models_component
from trainer.models.export import model_assets
from trainer.models.tokenizer import load_tokenizer
from trainer.workers.rank import Rank


class OneRank:
    """What `trainer.learner.train_workers.TrainWorkers` is to a run directory, with one rank in this process."""

    saved_roles = ["policy"]

    def __init__(self, rank: Rank):
        self.rank = rank

    def begin_save(self, files: Any) -> Any:
        self.rank.begin_save(["policy"], files)
        return self.rank.finish_save

    def load(self, role: str, files: Any, what: Any, steps_added: int = 0) -> None:
        self.rank.call(role, "load", files, what, steps_added)


def open_run(rank: Rank, root: str, model: str) -> OpenRun:
    rank.build(roles(rank.cfg, ["policy"]), model)
    run = OpenRun(config(Path(root)))
    run.components = [
        config_component(run.cfg),
        json_component("trainer_state", lambda: {"step": 1}, lambda _: None),
        json_component("data", lambda: {"position": 1}, lambda _: None),
        models_component(OneRank(rank)),  # type: ignore[arg-type]
        assets_component(model_assets(model, load_tokenizer(model))),
    ]
    return run


def save_run(rank: Rank, root: str, model: str) -> None:
    with open_run(rank, root, model) as run:
        run.save(1, roles=["policy"])
