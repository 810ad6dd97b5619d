"""The ranks as the loop sees them: one object per job, whichever processes the roles live in."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from trainer.cluster.groups import Group, Pending
from trainer.cluster.runtime import CPU_OBJECT_STORE_BYTES, Cluster
from trainer.config import Config
from trainer.models.files import resolve_model_path
from trainer.parallel.batching import Batch


def _build_rank(*args: Any) -> Any:
    # Imported where it is used: the driver is up seconds earlier without FSDP and the model classes.
    from trainer.workers.rank import Rank

    return Rank(*args)


class Ranks:
    """Policy, critic and reference over their rank actors.

    With `trainer.colocate_roles` one process per rank hosts all roles; else each role has its own processes.
    """

    def __init__(self, cfg: Config, cluster: Cluster):
        self.cfg = cfg
        self.cluster = cluster
        self.roles = ["policy", *(["critic"] if cfg.has_critic else []), *(["reference"] if cfg.has_reference else [])]
        self.saved_roles = [role for role in self.roles if role != "reference" or cfg.reference_moves]
        env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if cluster.device == "cpu" else {}
        hosts = [tuple(self.roles)] if cfg.trainer.colocate_roles else [(role,) for role in self.roles]
        self._groups: dict[str, Group] = {}
        for hosted in hosts:
            name = "rank" if len(hosted) > 1 else f"{hosted[0]} rank"
            group = cluster.launch_ranks(name, _build_rank, env)
            self._groups.update(dict.fromkeys(hosted, group))

    @property
    def policy(self) -> Group:
        return self._groups["policy"]

    def connect(self) -> None:
        """Form the process groups."""
        port = self.cfg.trainer.master_port
        for i, (group, _) in enumerate(self._hosts()):
            group.call("connect", self.cluster.meeting_place(group, port + i if port else 0))

    def build(self, model_path: str) -> None:
        """Load the start weights of every role."""
        t = self.cfg.trainer
        steps = t.scheduled_steps()
        critic_path = resolve_model_path(t.critic.path) if t.critic.path else None
        pending = [g.start("build", roles, model_path, steps, critic_path) for g, roles in self._hosts()]
        for one in pending:
            one.result()

    def build_for_sft(self, model_path: str) -> None:
        """Load a policy for supervised training."""
        self.policy.call("build_for_sft", model_path)

    def logprobs(self, role: str, batch: Any, shape: tuple[int, int]) -> np.ndarray:
        """Log-probs `(B, T)` of the stored `batch` under `policy` or `reference`."""
        return _assemble(self._groups[role].call("logprobs", role, batch), shape)

    def values(self, batch: Any, shape: tuple[int, int]) -> np.ndarray:
        """Values `(B, T)` of the stored `batch`."""
        return _assemble(self._groups["critic"].call("values", batch), shape)

    def update(self, role: str, batch: Any, step: int, kl_coef: float) -> dict[str, float]:
        """All optimizer steps of `role` on one step's experience."""
        return self._groups[role].call("update", role, batch, step, kl_coef)[0]

    def supervised_update(self, batch: Batch, max_weight: float | None) -> dict[str, float]:
        """One supervised optimizer step."""
        return self.policy.call("supervised_update", self.cluster.put(batch), max_weight)[0]

    def supervised_loss(self, batch: Batch) -> float:
        """Cross-entropy of held-out packed rows."""
        return self.policy.call("supervised_loss", self.cluster.put(batch))[0]

    def start_sending(self, sender: Any) -> Pending:
        """Begin handing the policy's weights to `sender`."""
        return self.policy.start("send_weights", sender, self.cfg.rollout.dtype)

    def write_weights(self, directory: str, dtype: str) -> None:
        """Write the policy's weights as safetensors."""
        self.policy.call("write_weights", directory, dtype)

    def check_shared(self, dtype: str) -> None:
        """Check that `share_weights` will find room.

        Raises:
            UserError: there is too little shared memory.
        """
        self.policy.call_one(0, "check_shared", dtype, CPU_OBJECT_STORE_BYTES)

    def share_weights(self, dtype: str) -> str:
        """Write the policy's weights to a new directory in rank 0's shared memory; returns its path."""
        directory = self.policy.call_one(0, "open_shared", dtype, CPU_OBJECT_STORE_BYTES)
        self.policy.call("write_weights", directory, dtype)
        return directory

    def drop_shared(self) -> None:
        """Delete what `share_weights` wrote."""
        self.policy.call_one(0, "close_shared")

    def begin_save(self, files: Any) -> Callable[[], list[dict]]:
        """Begin to write the roles that have a state of their own through `files` (a `StateFiles`).

        What this returns, called on any thread, waits for it and returns the files of all ranks.
        """
        saving = []
        for group, roles in self._hosts():
            saved = [role for role in roles if role in self.saved_roles]
            if saved:
                group.call("begin_save", saved, files)
                saving.append(group.start_aside("finish_save"))
        return lambda: [entry for pending in saving for entries in pending.result() for entry in entries]

    def load(self, role: str, files: Any, what: Collection[str], steps_added: int = 0) -> None:
        """Restore the state of `role` (see `Rank.load`)."""
        self._groups[role].call("load", role, files, what, steps_added)

    def take_blocked(self) -> float:
        """Seconds that the slowest rank has waited for a save since this was last asked."""
        return max(seconds for group, _ in self._hosts() for seconds in group.call("take_blocked"))

    @functools.cached_property
    def device_name(self) -> str:
        """What the ranks compute on. The driver's node may have no GPU, or another one."""
        return self.policy.call_one(0, "device_name")

    def num_parameters(self) -> tuple[int, int]:
        """Parameters of the policy, and how many of them are trained."""
        return self.policy.call("num_parameters")[0]

    def adapter_config(self, base_model: str) -> str:
        """peft's config of the policy's adapters, which names `base_model` as what they adapt."""
        return self.policy.call_one(0, "adapter_config", base_model)

    def adapter_weights(self) -> bytes:
        """The policy's adapters as a safetensors file."""
        return self.policy.call("adapter_weights")[0]

    def refresh_reference(self) -> None:
        """The reference becomes the policy of now."""
        self.policy.call("refresh_reference")

    def _hosts(self) -> list[tuple[Group, list[str]]]:
        """Each group once, with the roles it hosts."""
        hosts: list[tuple[Group, list[str]]] = []
        for role in self.roles:
            group = self._groups[role]
            if hosts and hosts[-1][0] is group:
                hosts[-1][1].append(role)
            else:
                hosts.append((group, [role]))
        return hosts


def _assemble(parts: list[tuple[np.ndarray, np.ndarray]], shape: tuple[int, int]) -> np.ndarray:
    """The ranks' rows put back in batch order."""
    out = np.zeros(shape, dtype=np.float32)
    for rows, values in parts:
        out[rows] = values
    return out
