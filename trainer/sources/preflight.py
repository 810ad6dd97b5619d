"""Check what runs and rewards the episodes of a source, before anything expensive starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from trainer.config import Config
from trainer.config.engines import engines_with
from trainer.config.fields import config_error
from trainer.environments.base import check_options
from trainer.errors import UserError, sentences_of
from trainer.rewards.terms import reward_functions


def check_source(cfg: Config) -> None:
    """Refuse an environment, an agent or reward functions that cannot be used.

    Args:
        cfg: of a run on the source alone (`Config.of_source`).
    """
    if cfg.environment.name is not None:
        check_options(cfg.environment.name, cfg.environment.kwargs)
        _check_agent(cfg)
    elif cfg.task.reward_functions:
        reward_functions(cfg.reward)


def find_refusals(cfg: Config, sources: Iterable[str], check: Callable[[Config], None]) -> list[str]:
    """Return why sources cannot be used, one sentence for each reason, with the keys that they have set themselves.

    Args:
        sources: as `Prompt.source` names them.
        check: raises a `UserError` for the config of a run on a source alone.
    """
    refused = []
    for source in sources:
        try:
            check(cfg.of_source(source))
        except UserError as error:
            refused += [with_keys_of(source, cfg, sentence) for sentence in sentences_of(error)]
    return refused


def with_keys_of(source: str, cfg: Config, sentence: str) -> str:
    """Return a sentence about keys of the run as one about those that the source has set."""
    own = cfg.of_source(source)
    for section in ("environment", "reward"):
        if getattr(own, section) != getattr(cfg, section):
            sentence = re.sub(rf"(?<![\w.]){section}\.(?=[a-z])", f"data.{source}.{section}.", sentence)
    return sentence


def _check_agent(cfg: Config) -> None:
    """Refuse an agent where its calls cannot be answered at any time."""
    if not cfg.environment.is_agent:
        return
    if cfg.engine.unit != "request":
        problem = f"is an agent, and rollout.engine={cfg.rollout.engine} takes no request while it generates; choose "
        raise config_error(cfg, "environment.name", f"{problem}rollout={engines_with('streaming')}")
