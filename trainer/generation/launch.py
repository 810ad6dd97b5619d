"""The rollout side as the loop sees it: engines started, fed, and kept in step with the policy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.config import Config
from trainer.generation.engine import Completion, Engine, Request, Sampling
from trainer.generation.pool import EnginePool
from trainer.generation.vllm_engine import engine_environment
from trainer.generation.weight_sync import Adapter, Broadcast, SharedMemory, choose

if TYPE_CHECKING:
    from trainer.cluster.runtime import Cluster
    from trainer.learner.ranks import Ranks


def _build_engine(engine: str, *args: Any, **kwargs: Any) -> Engine:
    # Imported where it is used: the driver needs no engine and starts seconds earlier without.
    if engine == "vllm":
        from trainer.generation.vllm_engine import VLLMEngine

        return VLLMEngine(*args, **kwargs)
    from trainer.generation.transformers_engine import TransformersEngine

    return TransformersEngine(*args, **kwargs)


class Rollout:
    """Engine actors and the way the policy's weights reach them.

    Construction returns while the engines start, unless they share the GPUs of ranks.
    """

    def __init__(self, cfg: Config, cluster: Cluster, ranks: Ranks, model_path: str):
        self.cfg = cfg
        self.ranks = ranks
        self.model_path = model_path
        self._device = cluster.device
        self._broadcast: Broadcast | None = None
        self._adapter_config: str | None = None
        lora = {"lora_rank": cfg.trainer.policy.lora.rank} if cfg.syncs_adapter else {}
        build = functools.partial(_build_engine, cfg.rollout.engine, model_path, dtype=cfg.rollout.dtype,
                                  seed=cfg.trainer.seed, rollout=cfg.rollout, device=cluster.device,
                                  trust_remote_code=cfg.model.trust_remote_code,
                                  **lora)  # fmt: skip
        self._engines = cluster.launch_engines(build, (), engine_environment(cluster.device), ranks.policy)
        self.pool = EnginePool(self._engines)
        self._shares_gpus = cfg.rollout.share_gpus and cluster.device == "cuda"
        if self._shares_gpus:
            # An engine measures what is free while it starts, and takes its share: the ranks must not load
            # anything before it is done, and need the room afterwards.
            self.pool.sleep()

    def start(self, version: int, fresh: bool) -> None:
        """Wait for the engines; give them the policy's weights, or adapters, unless they hold them (`fresh`)."""
        r = self.cfg.rollout
        rank_hosts = [place["host"] for place in self.ranks.policy.where()]
        hosts = {*rank_hosts, *(place["host"] for place in self._engines.where())}
        if self.cfg.syncs_adapter:
            pass  # small enough to travel with the call
        elif choose(r.weight_sync, r.engine, same_node=len(hosts) == 1, colocate=r.share_gpus) == "broadcast":
            self._broadcast = Broadcast(
                self.ranks.cluster.meeting_place(self.ranks.policy),
                receivers=r.num_engines * (r.tensor_parallel_size if self._device == "cuda" else 1),
                device=self._device,
                timeout_s=self.cfg.trainer.worker_timeout_s,
            )
        else:
            self.ranks.check_shared(r.dtype)  # now, not after a step is paid
        if fresh and not self.cfg.syncs_adapter:  # adapters that cannot be served should be known before a step is paid
            self.pool.set_version(version)
        else:
            self.sync_weights(version)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests. Colocated engines are awake for this alone."""
        if self._shares_gpus:
            self._make_room()
            self.pool.wake()
        completions = self.pool.generate(requests, sampling)
        if self._shares_gpus:
            self.pool.sleep()
        return completions

    def sync_weights(self, version: int) -> None:
        """Bring the engines' weights to the policy's."""
        if self._shares_gpus:
            self._make_room()  # sleeping engines wake their weights to take new ones
        if self.cfg.syncs_adapter:
            if self._adapter_config is None:
                self._adapter_config = self.ranks.call_one("policy", "adapter_config", self.model_path)
            adapter = Adapter(self._adapter_config, self.ranks.call("policy", "adapter_weights"))
            self.pool.sync_weights(self.ranks.cluster.put(adapter), version)  # stored once for all engines
            return
        if self._broadcast is not None:
            self.pool.sync_weights(
                self._broadcast,
                version,
                self.ranks.start("policy", "send_weights", self._broadcast, self.cfg.rollout.dtype),
            )
            return
        path = self.ranks.share_weights(self.cfg.rollout.dtype)
        try:
            self.pool.sync_weights(SharedMemory(path), version)
        finally:
            self.ranks.drop_shared()

    def _make_room(self) -> None:
        self.ranks.release_memory()

    def shutdown(self) -> None:
        self.pool.shutdown()
