"""Environments of the package skyrl-gym, with its `init`, `step` and `close`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import skyrl_gym.envs  # noqa: F401 (registers them)
from skyrl_gym.envs.registration import EnvSpec, load_env_creator, registry

from trainer.environments.base import Message, StepResult
from trainer.errors import did_you_mean

_RUN_CODE = tuple(f"skyrl_gym.envs.{name}" for name in ("lcb", "rlm", "searchcode", "sql"))
"""Modules of environments that run Python or SQL of the policy."""


class _Settings(dict[str, Any]):
    """Settings that are also read as attributes, as SkyRL's are."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class SkyRLGym:
    """Runs one environment of skyrl-gym in an episode.

    The row has a column `prompt`, a text or chat messages. The environment gets its other columns as `extras`, as
    SkyRL passes them. Its metrics at the end of an episode (`get_metrics`) are logged.

    Args:
        id: name of a registered environment, or the import path `package.module:Class` of one. None: the column
            `env_class` of each row has the name.
        max_turns: given to the environment in `extras`, if the row does not have it.
        allow_code: play environments that run programs of the policy with your rights.
        options: further arguments of the environment, such as `env_config`.
    """

    def __init__(self, id: str | None = None, max_turns: int | None = None, allow_code: bool = False, **options: Any):
        self._id = id
        self._max_turns = max_turns
        self._allow_code = allow_code
        self._options = options
        self._environment: Any = None

    @classmethod
    def thread_safe(cls, allow_code: bool = False, **options: Any) -> bool:
        """Return whether environments may run in threads, as in SkyRL. Those that run programs change the process."""
        return not allow_code

    @classmethod
    def check_options(cls, id: str | None = None, allow_code: bool = False, **options: Any) -> None:
        """Check that there is such an environment."""
        if id is not None:
            _creator(id, allow_code)

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """Return the prompt, as the environment's `init` gives it."""
        extras = {name: value for name, value in row.items() if name != "prompt"}
        if self._max_turns is not None:
            extras.setdefault("max_turns", self._max_turns)
        prompt = row["prompt"]
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
        name = self._id if self._id is not None else _name_in(row)
        settings = {**self._options, "env_config": _Settings(self._options.get("env_config", {}))}
        self._environment = _creator(name, self._allow_code)(**settings, extras=extras)
        messages, _ = self._environment.init(chat)
        return [dict(message) for message in messages]

    def step(self, reply: Message) -> StepResult:
        """Pass the reply to the environment, and return its observations."""
        output = self._environment.step(reply["content"])
        done = bool(output["done"])
        metrics = _numbers(getattr(self._environment, "get_metrics", dict)()) if done else {}
        messages = [dict(message) for message in output["observations"]]
        return StepResult(messages, float(output["reward"]), done, metrics=metrics)

    def close(self) -> None:
        """Close the environment."""
        if self._environment is not None:
            self._environment.close()


def _creator(name: str, allow_code: bool) -> Any:
    """Return the class, or the function, that makes an environment."""
    spec = EnvSpec(name, name) if ":" in name else registry.get(name)
    if spec is None:
        meant = did_you_mean(name, registry) or f"choose one of {', '.join(sorted(registry))}"
        raise LookupError(f"skyrl-gym has no environment {name}; {meant}, or give the import path package.module:Class")
    made = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    if made.__module__.startswith(_RUN_CODE) and not allow_code:
        raise PermissionError(
            f"skyrl-gym's environment {name} runs programs of the policy with your rights, in no sandbox; if a "
            "container protects what you have, set environment.kwargs.allow_code=true"
        )
    return lambda **given: made(**{**spec.kwargs, **given})


def _name_in(row: Mapping[str, Any]) -> str:
    """Return the name in a row. Data must not choose code that is imported."""
    name = str(row.get("env_class"))
    if ":" in name:
        raise PermissionError(
            f"env_class={name:.100}: a row may name an environment that skyrl-gym has registered; to run another one, "
            "give its import path as environment.kwargs.id"
        )
    return name


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers. `turns` and `tokens` are counted for every environment."""
    return {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and name not in ("turns", "tokens")
    }
