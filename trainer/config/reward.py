"""`reward.*`: how completions are scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.config.fields import LONGEST_TIME, ON_FAILURE, Section, choice, number, setting, subsection

REMOTE = "remote"
"""The reward that asks the server at `reward.url`."""


@dataclass
class RemoteConfig(Section):
    completions_per_request: int = number(16, at_least=1, at_most=1024, resume="harmless")
    """Most completions in one request."""
    deadline_s: float = number(60.0, at_least=0.001, at_most=LONGEST_TIME, resume="harmless")
    """Seconds that one request may take, with all repetitions. After that its completions count as failed."""
    header: str = setting("Authorization", resume="harmless")
    """Name of a header for credentials."""
    header_env: str | None = setting(None, resume="harmless")
    """Environment variable with the value of that header, such as `Bearer …`. The value is never saved or printed.
    null: no such header."""


@dataclass
class RewardConfig(Section):
    name: Any = setting("reverse_text", resume="rollouts")
    """`gsm8k`, `math`, `arithmetic`, `reverse_text`, `reasoning_gym` (the score of `data.task`), `remote` (the server
    at `url`), or the import path `package.module:function` of a function, whose parameters name its inputs
    (docs/rewards.md). A list of these: the weighted sum of their rewards."""
    weights: list[float] = setting(default_factory=list, resume="rollouts")
    """Weight of each reward of `name`. Empty: 1 each."""
    timeout_s: float = number(10.0, at_least=0.001, at_most=LONGEST_TIME, resume="harmless")
    """Seconds that one call of a reward function may take. A call that takes longer counts as failed (see
    `on_failure`). Each time completions are scored, failed rewards may take 30 times this in each process; after that
    the remaining completions are not tried and count as failed."""
    num_processes: int = number(1, at_least=1, resume="harmless")
    """Number of processes that compute rewards."""
    concurrency: int = number(16, at_least=1, at_most=1024, resume="harmless")
    """Calls of an `async` reward, or requests to `url`, that run at the same time in each process."""
    on_failure: str = choice("leave_out", ON_FAILURE, resume="rollouts")
    """What the run does with a completion whose reward failed. `leave_out`: it is neither trained on nor compared with
    the others of its prompt, and no metric of rewards counts it. If the algorithm compares completions, a prompt with
    fewer than two others is left out as a whole. `zero`: the reward counts as 0, like a wrong answer."""
    max_error_rate: float = number(0.2, at_least=0, at_most=1, resume="harmless")
    """If more than this share of the rewards of a step, or of an evaluation, fails, the run ends before it trains on
    them; with `data.mix`, of the rewards of all sources with the same limit. 1: it never ends for that, and a reward
    that fails on the first rows of the data is no reason not to start."""
    success_threshold: float = number(1.0, resume="validation")
    """A validation completion with at least this reward is a success: `val/accuracy` is the fraction of successes, and
    `val/pass@<k>` the fraction of prompts with at least one success."""
    cache: bool = setting(False, resume="harmless")
    """Store the results of all rewards by their content in `rewards.jsonl` of the run directory, and do not compute
    them again. The answers of `url` are always stored."""
    url: str | None = setting(None, resume="rollouts")
    """Address of a server that judges completions (docs/rewards.md), for the reward `remote`."""
    remote: RemoteConfig = subsection(RemoteConfig)
    """Requests to `url`."""

    def names(self) -> list[str]:
        """Return the rewards as a list."""
        return [self.name] if isinstance(self.name, str) else list(self.name)

    def key(self) -> str:
        """Return the key of the rewards with its value, for errors."""
        return f"reward.name={self.name if isinstance(self.name, str) else ','.join(self.name)}"
