"""The command line of a job: words in, an exit status out."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from trainer.config.hydra import compose_flags, conf_dir, find_groups
from trainer.config.outcome import Outcome, outcome_of
from trainer.config.overrides import parsed
from trainer.config.schema import Config, is_name, no_such_key, valid_keys
from trainer.config.sweep_jobs import Job, run_sweep
from trainer.errors import UserError
from trainer.files.documents import dump_yaml
from trainer.files.redaction import redact
from trainer.process import time_limits
from trainer.process.log_setup import guard_output, logging_to_file, show_messages
from trainer.process.signals import SIGNALS

Begin = Callable[[list[str]], list[str]]
"""Returns the words that are composed in place of those of the command line."""

_HELP = """usage: trainer {command} [GROUP=CHOICE ...] [KEY=VALUE ...] [FLAG ...]

Groups, each a set of values for some keys:
{groups}

Sections of keys ({sections}):
  docs/config.md explains every key. An unknown key is refused with those most like it.

Flags:
  --config FILE     take choices and values from a YAML file; the command line wins (docs/experiments.md)
  --config-dir DIR  take group files from a directory
  --cfg job         print the config instead of running it (with -p SECTION: a section of it)
  -m, --multirun    run one job for each combination of values: trainer.seed=1,2 algorithm=grpo,ppo
"""


def run_app(
    job: Job,
    command: str = "train",
    overrides: Sequence[str] = (),
    begin: Begin = lambda words: words,
    trains: bool = True,
) -> None:
    """Compose the config from the command line and hand it to `job`; then exit with the status of the `Outcome`.

    Args:
        command: for the help, and for messages that name it.
        overrides: of this command, before those of the user.
        begin: called with the words of the command line before anything else.
        trains: whether the job trains a run, which the same command continues after a signal.
    """
    SIGNALS.trains = trains
    time_limits.read_environment()
    guard_output()
    words = sys.argv[1:]
    if {"--help", "-h"} & set(words):
        # Hydra's own help takes seconds: it composes the schema once for each group.
        groups = [f"  {group}: {', '.join(choices)}" for group, choices in find_groups(conf_dir()).items()]
        print(_HELP.format(command=command, groups="\n".join(groups), sections=", ".join(valid_keys())), end="")
        return
    show_messages()
    with SIGNALS.listening(), logging_to_file():
        outcome = run_to_end(job, [*overrides, *words], begin, command)
        outcome.show()
        outcome.exit()


def run_to_end(job: Job, words: Sequence[str], begin: Begin = lambda words: words, command: str = "train") -> Outcome:
    """Do what `run_words` does, and return how that ended. Later signals are ignored."""
    try:
        try:
            run_words(job, begin(list(words)), command)
        finally:
            SIGNALS.ignore()
    except BaseException as error:
        return outcome_of(error)
    return Outcome(0)


def run_words(job: Job, words: Sequence[str], command: str = "train") -> None:
    """Compose the config of a command line, and hand it to `job`; with `-m` each of several."""
    SIGNALS.check()
    flags = parsed(words, command)
    if flags.multirun:
        run_sweep(job, flags)
        return
    config = compose_flags(flags)
    SIGNALS.check()
    if flags.cfg:
        print(_shown(config, flags.package), end="")
    else:
        job(config)


def _shown(config: Config, section: str) -> str:
    """Return the config, or a section or key of it, as YAML."""
    if section and not is_name(section):
        raise UserError(no_such_key(section))
    nested: Any = redact(dataclasses.asdict(config))
    for name in filter(None, section.split(".")):
        if name not in nested:
            raise UserError(no_such_key(section))
        nested = nested[name]
    return dump_yaml(nested, allow_unicode=True).removesuffix("...\n")
