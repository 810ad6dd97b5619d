"""All users of a machine can read command lines: what user code is given stands in none."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import psutil

from trainer.config import EnvironmentConfig, RewardConfig
from trainer.environments import StepResult
from trainer.environments.episode_runner import EnvironmentPool
from trainer.rewards.scoring import RewardPool
from trainer.sources.trials import try_environment

SECRET = "sk-9b1d77c0e4"


class Keyed:
    """An environment and, as `KeyedAgent`, an agent that get a secret."""

    def __init__(self, api_key: str):
        assert api_key == SECRET
        check()

    def reset(self, row: Any, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "?"}]

    def step(self, reply: Any) -> StepResult:
        return StepResult(done=True)

    def close(self) -> None:
        pass


class KeyedAgent:
    def __init__(self, api_key: str):
        assert api_key == SECRET

    def run(self, row: Any, seed: int, endpoint: Any) -> float:
        return 1.0


def check() -> None:
    """Check the command lines of all processes."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert lines and not [line for line in lines if SECRET in line]


def test_no_command_line_holds_what_environments_agents_and_rewards_are_given():
    environment = EnvironmentConfig(f"{__name__}:Keyed", {"api_key": SECRET}, num_processes=1)
    agent = EnvironmentConfig(f"{__name__}:KeyedAgent", {"api_key": SECRET}, num_processes=1)
    judge = RewardConfig(name="remote", url=f"http://127.0.0.1:9/judge?key={SECRET}", num_processes=1)
    with ExitStack() as stack:
        for pool in (EnvironmentPool(environment, 100), EnvironmentPool(agent), RewardPool(judge)):
            stack.enter_context(pool)
        try_environment(environment, [{}], 1, "answer")  # in a process of its own, which looks, too
        assert len(psutil.Process().children()) >= 3
        check()
