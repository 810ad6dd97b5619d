"""The rollout side as the loop sees it: engines started, fed, and kept in step with the policy."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.config import Config
from trainer.keyed import key
from trainer.rollout.engine import Completion, Request, Sampling
from trainer.rollout.pool import EnginePool
from trainer.rollout.transformers_engine import TransformersEngine
from trainer.rollout.vllm_engine import VLLMEngine, engine_environment
from trainer.rollout.weight_sync import WeightSource, choose

if TYPE_CHECKING:
    from trainer.cluster.ranks import Ranks
    from trainer.cluster.runtime import Cluster


class Rollout:
    """Engine actors and the way the policy's weights reach them. Construction returns while they start."""

    def __init__(self, cfg: Config, cluster: Cluster, ranks: Ranks, model_path: str):
        self.cfg = cfg
        self.ranks = ranks
        self.model_path = model_path
        factory = {"vllm": VLLMEngine, "transformers": TransformersEngine}[cfg.rollout.engine]
        build = functools.partial(
            factory, model_path, dtype=cfg.rollout.dtype, seed=cfg.trainer.seed, rollout=cfg.rollout,
            device=cluster.device,
        )  # fmt: skip
        self._group = cluster.launch_engines(build, (), engine_environment(cluster.device), ranks.policy)
        self.pool = EnginePool(self._group)

    def start(self, version: int, fresh: bool) -> None:
        """Wait for the engines; give them the policy's weights unless these are the start weights."""
        hosts = {place["host"] for place in self._group.where() + self.ranks.policy.where()[:1]}
        self._way = choose(self.cfg.rollout.weight_sync, self.cfg.rollout.engine, same_node=len(hosts) == 1)
        self._sender = None
        if self._way == "broadcast":
            self._sender = self.pool.rendezvous(self.ranks.policy)
        if fresh:
            self.pool.set_version(version)
        else:
            self.sync_weights(version)
