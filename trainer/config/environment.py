"""`environment.*`: the environment that answers the policy in episodes of several turns."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from trainer.config.fields import LONGEST_TIME, ON_FAILURE, Section, choice, number, open_section, setting
from trainer.errors import UserError
from trainer.import_utils import import_function, is_agent


@dataclass
class EnvironmentConfig(Section):
    name: str | None = setting(None, resume="rollouts")
    """Import path `package.module:Class` of an environment (see docs/environments.md) or of an agent (see
    docs/agents.md), which gives the reward of an episode. null: an episode is one prompt and one completion, and
    `reward.name` gives its reward."""
    kwargs: dict[str, Any] = open_section(resume="rollouts")
    """Arguments for the class, by name."""
    python: str | None = setting(None, resume="harmless")
    """Python interpreter of another virtual environment, in which the environment runs: for packages that cannot be
    installed beside this project (docs/environments.md). It needs the package psutil. null: this project's own."""
    max_turns: int = number(8, at_least=1, resume="rollouts")
    """Largest number of replies of the policy in an episode. Each has at most `rollout.max_response_tokens` tokens."""
    max_tokens: int = number(-1, at_least=2, off=-1, resume="rollouts")
    """Longest episode, in tokens: messages and replies together. Then `rollout.max_prompt_tokens` is for the first
    messages alone. -1: the messages and replies before a reply have at most `rollout.max_prompt_tokens`."""
    max_seconds: float | None = number(None, above=0, at_most=LONGEST_TIME, resume="rollouts")
    """Seconds from the start of its batch after which an episode that is not done gets no further reply. Time in which
    no engine could generate does not count. The episode has failed, with the status `timeout`. null: no limit. With a
    limit, time decides which episodes a step trains on, so a resumed run is not compared bit for bit. Finished episodes
    come back from the journal."""
    timeout_s: float = number(60.0, at_least=0.001, at_most=LONGEST_TIME, resume="harmless")
    """Seconds that one call of an environment may take. A call that takes longer is repeated once, in a new
    environment; then the episode counts as failed. For agents, the time between two calls to the policy."""
    num_processes: int = number(1, at_least=1, resume="harmless")
    """Number of processes that run environments. Each holds many of them."""
    on_failure: str = choice("leave_out", ON_FAILURE, resume="rollouts")
    """What the run does with an episode whose environment failed before the policy replied. `leave_out`: it is neither
    trained on nor compared with the others of its row, and no metric of rewards counts it. If the algorithm compares
    episodes, a row with fewer than two others is left out as a whole. `zero`: its reward is 0. An episode whose
    environment fails later always has a reward of 0, because the policy may have caused that."""
    max_error_rate: float = number(0.5, at_least=0, at_most=1, resume="harmless")
    """The run ends if a greater fraction of the episodes of a batch fails, with `data.mix` of those of all sources that
    have an environment and the same limit. 1: never, and an environment that fails for the first row of the data is no
    reason not to start."""
    agent_sampling: str = choice("refuse", ("refuse", "override"), resume="rollouts")
    """What happens to requests of agents whose `temperature`, `top_p` or `top_k` is not that of the run. `refuse`: they
    get an error. `override`: the values do not count. The run can learn from its own way of sampling alone."""
    agent_host: str = setting("127.0.0.1", resume="harmless")
    """Address that the server for agents listens on. Agents in containers and on other machines need another one (see
    docs/agents.md)."""
    agent_port: int = number(0, at_least=0, at_most=65535, resume="harmless")
    """Port of the server for agents. 0: a free one."""
    agent_url: str | None = setting(None, resume="harmless")
    """How agents reach the server, such as `http://host.docker.internal:8123`. null: by `environment.agent_host` and
    its port."""

    @property
    def is_agent(self) -> bool:
        """Whether `name` is the class of an agent. One that cannot be imported here is none."""
        with contextlib.suppress(UserError):
            return self.name is not None and is_agent(import_function(self.name, "environment.name"))
        return False

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of a prompt and its reply; None: no more than those of each."""
        return self.max_tokens if self.max_tokens > 0 else None
