"""The kinds of jobs that are disturbed: small, and each with other parts of the system."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.support.fleets import LIMITS as LIMITS_OF_FLEETS

STEPS = 12
_COMMON = (
    "logger.plot=false",
    "trainer.device=cpu",
    "trainer.resume_mode=latest",
    "trainer.ckpt_interval=2",
    "trainer.max_ckpts_to_keep=3",
    "trainer.val_interval=4",
    f"trainer.hf_save_interval={STEPS}",
    "trainer.max_restarts=20",
    "data.train_size=10",
    "data.val_size=4",
)
_ROLLOUTS = (
    f"trainer.total_steps={STEPS}",
    "trainer.train_batch_size=4",
    "trainer.mini_batch_size=2",
    "trainer.policy.optimizer.lr=1e-3",
    "trainer.policy.optimizer.scheduler=cosine",
    "algorithm.policy_loss=tests.support.noisy_loss:noisy_clip",
    "rollout.n=2",
    "rollout.max_response_tokens=8",
    "logger.save_rollouts=true",
)
_REWARD = ("reward.name=tests.support.hashed_reward:hashed", "reward.timeout_s=20")
_SERVED = (
    "rollout.engine=server",
    "rollout.max_num_seqs=32",
)
_PROCESSES = ("trainer.ray_address=processes", "rollout=transformers")
_AHEAD = ("ahead:begun", "ahead:generated")
LIMITS = "HEARTBEAT_S=8 HANG_S=8 LOCK_LEASE_S=5 RESTART_WINDOW_S=18"
"""TRAINER_TIME_LIMITS of all kinds."""
_SLOW = "HEARTBEAT_S=30"
_PATIENT = "SERVER_ABSENCE_S=240 HANG_S=300"  # vLLM needs a minute to start, more on a busy machine
_IN_FLIGHT = ("in_flight:finished", "in_flight:taken", "in_flight:published")


@dataclass(frozen=True)
class Kind:
    """A kind of job."""

    name: str
    overrides: tuple[str, ...]
    """`{scene}` stands for the directory of what all jobs share."""
    job: str = "train"
    limits: str = ""
    """Further words of TRAINER_TIME_LIMITS."""
    storages: frozenset[str] = frozenset({"disk"})
    """Where its checkpoints are: `disk`, `store`, or both."""
    scheme: str = "s3"
    """Of the object store: `s3` or `gs`."""
    roles: frozenset[str] = frozenset({"rank", "engine", "reward"})
    """The kinds of processes that it has, beside the driver and the launcher."""
    with_ray: bool = False
    is_exact: bool = True
    """Its numbers are those of an uninterrupted job. False: only the prompts of each step are."""
    in_order: bool = True
    """Which prompts a step trains on does not depend on how long they take. False: each is trained once an epoch."""
    is_served: bool = False
    """An inference server generates, and stays up between the jobs."""
    has_fleet: bool = False
    """Its engines join it and leave it all the time."""
    on_nodes: bool = False
    """Its Ray is a cluster of several nodes, of which some are lost."""
    weight: float = 1.0
    """How often it is drawn, relative to the others."""

    @property
    def phases(self) -> tuple[str, ...]:
        """The fail points of rollouts that are under way while the ranks train."""
        if "rollout.in_flight_updates=true" in self.overrides:
            return (*_AHEAD, *_IN_FLIGHT)
        return _AHEAD if any(word.startswith("rollout.ahead=") for word in self.overrides) else ()


def _rollouts(name: str, *overrides: str, **others: object) -> Kind:
    rewards = () if any(word.startswith("environment.name=") for word in overrides) else _REWARD
    return Kind(name, (*_COMMON, *_ROLLOUTS, *rewards, *_PROCESSES, *overrides), **others)  # type: ignore[arg-type]


KINDS = {
    kind.name: kind
    for kind in (
        _rollouts("grpo", "trainer.num_workers=2", "rollout.num_engines=2", "algorithm.kl_coef=0.01"),
        _rollouts("ppo", "trainer.num_workers=2", "algorithm=ppo", "trainer.critic.optimizer.lr=1e-3"),
        _rollouts(
            "offload",
            "trainer.num_workers=2",
            "rollout.num_engines=2",
            "rollout.colocate=true",
            "trainer.offload=all",
            "algorithm=ppo",
            "trainer.critic.optimizer.lr=1e-3",
            "algorithm.kl_coef=0.01",
        ),
        _rollouts(
            "copies",
            "trainer.num_workers=2",
            "algorithm=ppo",
            "trainer.critic.optimizer.lr=1e-3",
            "rollout.ahead=1",
            "trainer.copy_steps=true",
        ),
        _rollouts(
            "fleet",
            "trainer.num_workers=2",
            "rollout.ahead=1",
            "rollout.fleet=true",
            "rollout.num_engines=0",
            limits=LIMITS_OF_FLEETS,
            roles=frozenset({"rank", "reward"}),
            has_fleet=True,
        ),
        _rollouts("differences", "trainer.num_workers=2", "rollout.num_engines=2", "rollout.weight_sync=delta"),
        _rollouts("dapo", "algorithm=dapo", "data.curriculum=tests.support.curriculum:hardest_first"),
        _rollouts(
            "ahead",
            "trainer.num_workers=2",
            "rollout.num_engines=2",
            "algorithm=ppo",
            "trainer.critic.optimizer.lr=1e-3",
            "rollout.ahead=1",
        ),
        _rollouts(
            "far_ahead",
            "algorithm=dapo",
            "data.curriculum=tests.support.curriculum:hardest_first",
            "rollout.ahead=2",
        ),
        _rollouts("lora", "trainer.policy.lora.rank=4", "algorithm.kl_coef=0.01"),
        _rollouts(
            "episodes",
            "environment.name=tests.support.environments:Hashed",
            "environment.max_turns=3",
            "environment.timeout_s=6",
            "environment.num_processes=2",
            "rollout.max_prompt_tokens=64",
            "rollout.val_n=2",
            roles=frozenset({"rank", "engine", "environment"}),
        ),
        _rollouts(
            "turns",
            "environment.name=tests.support.environments:LongHashed",
            "environment.max_turns=40",
            "environment.max_tokens=400",
            "environment.timeout_s=60",
            "environment.num_processes=2",
            "rollout.max_prompt_tokens=64",
            "rollout.max_response_tokens=4",
            roles=frozenset({"rank", "engine", "environment"}),
        ),
        _rollouts(
            "agents",
            "rollout.engine=tests.support.token_engine:JOINING",
            "rollout.max_logprob_diff=null",
            "environment.name=tests.support.agents:Hashed",
            "environment.max_turns=8",
            "environment.max_tokens=200",
            "environment.timeout_s=60",
            "environment.num_processes=2",
            "rollout.max_prompt_tokens=64",
            roles=frozenset({"rank", "engine", "environment"}),
        ),
        _rollouts(
            "self_play",
            "trainer.num_workers=2",
            "algorithm.advantage_estimator=rae",
            "environment.name=tests.support.environments:Duel",
            "+environment.kwargs.is_hashed=true",
            *("data=files", "data.train_files=[{scene}/games.jsonl]"),
            "environment.timeout_s=20",
            "rollout.max_prompt_tokens=64",
            "trainer.val_interval=-1",
            roles=frozenset({"rank", "engine", "environment"}),
        ),
        _rollouts(
            "distilled",
            "trainer.num_workers=2",
            "algorithm.teacher.path={scene}/teacher",
            "algorithm.opd_kl_coef=0.5",
            "algorithm.teacher.divergence=jsd",
            "trainer.policy.optimizer.name=muon",
        ),
        _rollouts(
            "stream",
            "rollout=vllm",
            "rollout.max_num_seqs=32",
            "trainer.num_workers=2",
            "environment.name=tests.support.environments:Dawdling",
            "environment.max_turns=3",
            "environment.max_tokens=80",
            "environment.timeout_s=6",
            "environment.num_processes=2",
            "rollout.max_prompt_tokens=64",
            "rollout.val_n=2",
            limits=_SLOW,
            roles=frozenset({"rank", "engine", "environment"}),
            weight=0.3,
        ),
        _rollouts(
            "in_flight",
            "rollout=vllm",
            "rollout.max_num_seqs=32",
            "rollout.in_flight_updates=true",
            limits=_SLOW,
            is_exact=False,
            weight=0.3,
        ),
        _rollouts(
            "far_in_flight",
            "rollout=vllm",
            "rollout.max_num_seqs=32",
            "rollout.in_flight_updates=true",
            "rollout.max_staleness=3",
            limits=_SLOW,
            is_exact=False,
            in_order=False,
            weight=0.3,
        ),
        _rollouts("server", *_SERVED, limits=_PATIENT, is_served=True, weight=0.5),
        _rollouts(
            "server_ahead",
            *_SERVED,
            "rollout.ahead=1",
            "trainer.num_workers=2",
            limits=_PATIENT,
            is_served=True,
            weight=0.3,
        ),
        _rollouts(
            "server_in_flight",
            *_SERVED,
            "rollout.in_flight_updates=true",
            "rollout.max_staleness=2",
            "rollout.max_response_tokens=256",  # so that new weights come in the middle of completions
            limits=_PATIENT,
            is_served=True,
            is_exact=False,
            weight=0.3,
        ),
        Kind(
            "supervised",
            (*_COMMON, _PROCESSES[0], "trainer.num_workers=2", f"sft.steps={STEPS}", "sft.batch_size=2"),
            "sft",
            roles=frozenset({"rank"}),
        ),
        Kind(
            "dpo",
            (
                *(word for word in _COMMON if not word.startswith("data.")),
                *(_PROCESSES[0], "trainer.num_workers=2", f"trainer.total_steps={STEPS}", "trainer.mini_batch_size=4"),
                *("data=files", "data.train_files=[{scene}/pairs.jsonl]", "data.val_files=[{scene}/pairs.jsonl]"),
                *("dpo.max_length=64", "trainer.policy.lora.rank=4"),
            ),
            "dpo",
            roles=frozenset({"rank"}),
        ),
        _rollouts("store", storages=frozenset({"store"}), weight=1.5),
        _rollouts("google", "trainer.num_workers=2", storages=frozenset({"store"}), scheme="gs"),
        _rollouts("tiers", "trainer.num_workers=2", storages=frozenset({"disk", "store"}), weight=1.5),
        Kind(
            "ray",
            (
                *_COMMON,
                *_ROLLOUTS,
                *_REWARD,
                "rollout.max_num_seqs=32",
            ),
            limits=_SLOW,
            with_ray=True,
            weight=0.15,
        ),
        Kind(
            "nodes",
            (
                *(*_COMMON, *_ROLLOUTS, *_REWARD, "rollout=transformers", "trainer.num_workers=2"),
                "trainer.placement_timeout_s=120",
            ),
            limits=f"{_SLOW} NODE_ANSWER_S=5",
            with_ray=True,
            on_nodes=True,
            weight=0.15,
        ),
    )
}


def draw_kind(numbers: random.Random, names: list[str]) -> Kind:
    """Draw one of the kinds with these names."""
    kinds = [KINDS[name] for name in names]
    return numbers.choices(kinds, [kind.weight for kind in kinds])[0]
