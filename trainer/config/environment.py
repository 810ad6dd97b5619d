"""`environment.*`: the environment that answers the policy in episodes of several turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.config.fields import LONGEST_TIME, ON_FAILURE, Section, choice, config_error, number, open_section, setting

if TYPE_CHECKING:
    from trainer.config.schema import Config


@dataclass
class EnvironmentConfig(Section):
    name: str | None = setting(None, resume="rollouts")
    """Import path `package.module:Class` of an environment (see docs/environments.md), which gives the reward of an
    episode. null: an episode is one prompt and one completion, and `reward.name` gives its reward."""
    kwargs: dict[str, Any] = open_section(resume="rollouts")
    """Arguments for the class, by name."""
    python: str | None = setting(None, resume="harmless")
    """Python interpreter of another virtual environment, in which the environment runs: for packages that cannot be
    installed beside this project (docs/environments.md). It needs the package psutil. null: this project's own."""
    max_turns: int = number(8, at_least=1, resume="rollouts")
    """Largest number of replies of the policy in an episode. A reply has at most `rollout.max_response_tokens` tokens.
    The messages and replies before it have at most `rollout.max_prompt_tokens`."""
    timeout_s: float = number(60.0, at_least=0.001, at_most=LONGEST_TIME, resume="harmless")
    """Seconds that one call of an environment may take. A call that takes longer is repeated once, in a new
    environment; then the episode counts as failed."""
    num_processes: int = number(1, at_least=1, resume="harmless")
    """Number of processes that run environments. Each holds many of them."""
    on_failure: str = choice("leave_out", ON_FAILURE, resume="rollouts")
    """What the run does with an episode whose environment failed. `leave_out`: it is neither trained on nor compared
    with the others of its row, and no metric of rewards counts it. If the algorithm compares episodes, a row with fewer
    than two others is left out as a whole. `zero`: its reward is 0."""
    max_error_rate: float = number(0.5, at_least=0, at_most=1, resume="harmless")
    """The run ends if a greater fraction of the episodes of a batch fails. 1: never."""

    def check(self, config: Config, name: str) -> None:
        if self.python is not None and self.name is None:
            raise config_error(config, "environment.python", "is the interpreter of environment.name, which is not set")
        if self.name is None:
            return
        if ":" not in self.name:
            raise config_error(config, f"{name}.name", "must be an import path package.module:Class")
        if config.algorithm.overlong_buffer:
            problem = f"is for one completion a prompt; set it to 0, or drop {name}.name"
            raise config_error(config, "algorithm.overlong_buffer", problem)
