"""One rank: a process that hosts the shards of some or all roles. Without Ray, `torchrun` can run it too."""

from __future__ import annotations

import os
import random
from collections.abc import Collection
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainer.config import Config
from trainer.errors import UserError
from trainer.keyed import key, permutation
from trainer.models.files import resolve_model_path
from trainer.models.loading import load_causal_lm, load_critic
from trainer.models.lora import adapted_modules, adapter_config, adapter_tensors
from trainer.parallel.batching import Batch, select
from trainer.parallel.mesh import build_mesh, init_process_group, listen
from trainer.parallel.shard import param_dtype
from trainer.shared_memory import SharedDirectory, check_room, clear_abandoned
from trainer.workers.base import SHARDING_FILE, ModelWorker, TrainedWorker
from trainer.workers.critic import CriticWorker
from trainer.workers.policy import PolicyWorker, ReferenceWorker
from trainer.workers.saving import BackgroundSaver, StateFiles


class WeightSender(Protocol):
    """How weights leave the ranks when they do not go through shared memory."""

    def send(self, weights: Any, rank: int) -> Any: ...


class Rank:
    """The roles of one rank and the methods that the driver calls on all ranks at once.

    Every method is a collective, in which all ranks must be together, unless it says that it is none.
    """

    def __init__(self, cfg: Config, rank: int, world_size: int, device: str):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")) if device == "cpu" else 4)
        self.cfg = cfg
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.mesh: DeviceMesh | None = None
        self.saver: BackgroundSaver | None = None
        self.policy: PolicyWorker | None = None
        self.critic: CriticWorker | None = None
        self.reference: ReferenceWorker | None = None
        self._shared: SharedDirectory | None = None

    def find_address(self, host: str, port: int = 0) -> str:
        """Reserve a port of this rank for a store; returns `host:port`. `port` 0 takes a free one. No collective."""
        try:
            return listen(host, port)
        except OSError as error:
            raise UserError(
                f"trainer.master_port={port}: cannot be used on {host} ({error.strerror}); "
                "choose another, or 0 for a free one"
            ) from error

    def connect(self, address: str, local_rank: int = 0) -> None:
        """Join the process group, whose store is at `address`, and seed this rank's generators (for user code)."""
        if self.device == "cuda":
            torch.cuda.set_device(local_rank)
        init_process_group(self.rank, self.world_size, address, self.device, self.cfg.trainer.worker_timeout_s)
        self.mesh = build_mesh(self.device, self.cfg.trainer.replicas)
        # A group of its own: a save talks on it while the ranks train on the other.
        self.saver = BackgroundSaver(dist.new_group(backend="gloo"), self.device)
        clear_abandoned()  # what killed runs left in this machine's memory
        seed = key(self.cfg.trainer.seed, "rank", self.rank)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    def build(
        self, roles: list[str], model_path: str, optimizer_steps: dict[str, int], critic_path: str | None = None
    ) -> None:
        """Load the start weights of `roles` (`policy`, `critic`, `reference`) from `model_path`.

        Args:
            optimizer_steps: of the whole run, by trained role.
            critic_path: where the critic's come from instead.
        """
        assert self.mesh is not None, "connect first"
        cfg, t = self.cfg, self.cfg.trainer
        path = resolve_model_path(model_path)
        if "policy" in roles:
            module = load_causal_lm(cfg.model, path, self.mesh, t.policy.fsdp, t.policy.lora, t.seed)
            self.policy = PolicyWorker(
                module, self.mesh, t.max_tokens_per_micro_batch, t.policy.optimizer, optimizer_steps["policy"]
            )
        if "critic" in roles:
            start = resolve_model_path(critic_path or path)
            module = load_critic(cfg.model, start, self.mesh, t.critic.fsdp, t.critic.lora, t.seed)
            self.critic = CriticWorker(
                module, self.mesh, t.max_tokens_per_micro_batch, t.critic.optimizer, optimizer_steps["critic"]
            )
        if "reference" in roles:
            if cfg.reference_is_base:
                assert self.policy is not None, "they share ranks"
                module = self.policy.module
            else:
                module = load_causal_lm(cfg.model, path, self.mesh, t.reference.fsdp)
            self.reference = ReferenceWorker(module, self.mesh, t.max_tokens_per_micro_batch, cfg.reference_is_base)

    def build_for_sft(self, model_path: str) -> None:
        """Load a policy that supervised training will step."""
        assert self.mesh is not None, "connect first"
        cfg, t = self.cfg, self.cfg.trainer
        path = resolve_model_path(model_path)
        module = load_causal_lm(cfg.model, path, self.mesh, t.policy.fsdp, t.policy.lora, t.seed)
        steps = cfg.sft.optimizer.schedule_steps or cfg.sft.steps
        self.policy = PolicyWorker(module, self.mesh, t.max_tokens_per_micro_batch, cfg.sft.optimizer, steps)

    # ---------------------------------------------------------------------------------------------------
    # The steps of the loop

    def logprobs(self, role: str, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Rows of `batch` this rank computed and their log-probs under `policy` or `reference`."""
        worker = self.policy if role == "policy" else self.reference
        assert worker is not None, role
        return worker.logprobs(batch, self.cfg.rollout.temperature)

    def values(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Rows of `batch` this rank computed and their values."""
        assert self.critic is not None
        return self.critic.values(batch)

    def update(self, role: str, batch: Batch, step: int, kl_coef: float | None = None) -> dict[str, float]:
        """All optimizer steps of `role` on one step's experience; metrics are means over them, `kl` over their tokens
        (and not there without any).

        Mini-batches are whole groups of completions, shuffled by a permutation keyed by (step, epoch).

        Args:
            kl_coef: weight of the KL in the policy loss; None: that of the config.
        """
        kl_coef = self.cfg.algorithm.kl_coef if kl_coef is None else kl_coef
        cfg, algorithm = self.cfg, self.cfg.algorithm
        _, group = np.unique(batch["group_ids"], return_inverse=True)
        num_groups = int(group.max()) + 1
        metrics: list[dict[str, float]] = []
        tokens: list[float] = []
        for epoch in range(cfg.trainer.update_epochs):
            order = permutation(num_groups, cfg.trainer.seed, "mini_batch", step, epoch)
            for start in range(0, num_groups, cfg.trainer.mini_batch_size):
                chosen = order[start : start + cfg.trainer.mini_batch_size]
                mini_batch = select(batch, np.flatnonzero(np.isin(group, chosen)))
                tokens.append(float(mini_batch["response_mask"].sum()))
                if role == "policy":
                    assert self.policy is not None
                    metrics.append(
                        self.policy.update(
                            mini_batch, algorithm, cfg.rollout.temperature, cfg.rollout.max_response_tokens, kl_coef
                        )
                    )
                else:
                    assert self.critic is not None
                    metrics.append(self.critic.update(mini_batch, algorithm))
        means = {name: float(np.mean([m[name] for m in metrics])) for name in metrics[0]}
        if "kl" in means:  # it steers a controller: what was left out of the losses must not count as 0
            means.pop("kl")
            if any(tokens):
                means["kl"] = float(np.average([m["kl"] for m in metrics], weights=tokens))
        return {**means, "lr": metrics[-1]["lr"]}

    def supervised_update(self, batch: Batch, max_weight: float | None = None) -> dict[str, float]:
        """One supervised optimizer step (see `PolicyWorker`)."""
        assert self.policy is not None
        return self.policy.supervised_update(batch, max_weight)

    def supervised_loss(self, batch: Batch) -> float:
        """Cross-entropy of packed rows."""
        assert self.policy is not None
        return self.policy.supervised_loss(batch)

    # ---------------------------------------------------------------------------------------------------
    # Weights and state

    def write_weights(self, directory: str, dtype: str) -> list[str]:
        """Write the policy's weights to `directory` as safetensors of `dtype` (see `RolloutConfig.dtype`)."""
        assert self.policy is not None
        return self.policy.write_weights(directory, param_dtype(dtype, self.device))

    def adapter_config(self, base_model: str) -> str:
        """peft's config of the policy's adapters, which names `base_model` as what they adapt."""
        assert self.policy is not None
        return adapter_config(self.cfg.trainer.policy.lora, adapted_modules(self.policy.module), base_model)

    def adapter_weights(self) -> bytes | None:
        """The policy's adapters as a safetensors file; on rank 0."""
        from safetensors.torch import save

        assert self.policy is not None
        tensors = adapter_tensors(self.policy.module)
        return save(tensors, metadata={"format": "pt"}) if self.rank == 0 else None

    def refresh_reference(self) -> None:
        """The reference becomes the policy of now."""
        assert self.policy is not None and self.reference is not None
        self.reference.refresh(self.policy.module)

    def check_shared(self, dtype: str, reserved: int) -> None:
        """Check that shared memory has room for the policy's weights as `dtype` (see `check_room`). No collective."""
        assert self.policy is not None
        check_room(self.policy.weight_bytes(param_dtype(dtype, self.device)), reserved)

    def open_shared(self, dtype: str, reserved: int) -> str:
        """Make a directory in this machine's shared memory for the weights; returns its path. No collective."""
        self.close_shared()
        self.check_shared(dtype, reserved)
        self._shared = SharedDirectory()
        return self._shared.path

    def close_shared(self) -> None:
        """Delete what `open_shared` made. No collective."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def send_weights(self, sender: WeightSender, dtype: str) -> Any:
        """Hand the policy's tensors, one by one, to `sender`."""
        assert self.policy is not None
        return sender.send(self.policy.stream_weights(param_dtype(dtype, self.device)), self.rank)

    def apply(self, function: Any, *args: Any) -> Any:
        """Run `function(self, *args)` on this rank."""
        return function(self, *args)

    def begin_save(self, roles: list[str], files: StateFiles) -> None:
        """Take the state of `roles` as it is now and write it, on a thread, through `files`."""
        assert self.saver is not None, "connect first"
        workers = {role: self._worker(role) for role in roles}
        self.saver.begin(
            {role: worker.state() for role, worker in workers.items()},
            {role: {SHARDING_FILE: worker.sharding()} for role, worker in workers.items()},
            files,
        )

    def finish_save(self) -> list[dict]:
        """Wait for the save that was begun; returns the files this rank wrote. May run beside other methods."""
        assert self.saver is not None, "connect first"
        return self.saver.finish()

    def take_blocked(self) -> float:
        """Seconds that optimizer steps have waited for a save since this was last asked."""
        assert self.saver is not None, "connect first"
        return self.saver.take_blocked()

    def load(self, role: str, files: StateFiles, what: Collection[str], steps_added: int = 0) -> None:
        """Restore the state of `role` from `files` (see `ModelWorker.load`).

        Args:
            steps_added: moves the place in the learning rate's schedule by this many optimizer steps.
        """
        worker = self._worker(role)
        worker.load(files, what)
        if isinstance(worker, TrainedWorker) and "optimizer" in what:
            worker.optimizer_steps += steps_added

    def device_name(self) -> str:
        """The name of this rank's GPU, or `cpu`. No collective."""
        return torch.cuda.get_device_name() if self.device == "cuda" else self.device

    def num_parameters(self) -> tuple[int, int]:
        """Parameters of the policy, and how many of them are trained."""
        assert self.policy is not None
        parameters = list(self.policy.module.parameters())
        return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)

    def _worker(self, role: str) -> ModelWorker:
        worker = {"policy": self.policy, "critic": self.critic, "reference": self.reference}[role]
        assert worker is not None, role
        assert self.saver is not None
        worker.before_weights_change = self.saver.wait_until_staged
        return worker


def destroy() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
