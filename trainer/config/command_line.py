"""The command line of a job: overrides in, an exit status out, and one sentence for each error of the user."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from trainer.config.fields import walk_keys, walk_sections
from trainer.config.hydra import conf_dir, register, to_config
from trainer.config.schema import Config, no_such_key, valid_keys
from trainer.config.suggestions import did_you_mean
from trainer.errors import NonFiniteError, NotSavedError, UserError, WorkerError, memory_ran_out, one_line
from trainer.output import LOG_FILE, guard_output, logging_to_file, show_messages
from trainer.signals import EXIT_STATUS, SIGNALS, Stopped

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Hydra, which takes long to import, is imported where it is used: signals are handled from the first moment on.

Job = Callable[[Config], None]

_HELP = """usage: python -m trainer.{program} [GROUP=CHOICE ...] [KEY=VALUE ...] [FLAG ...]

Groups, each a set of values for some keys:
{groups}

Sections of keys ({sections}):
  docs/config.md explains every key. An unknown key is refused with those most like it.

Flags:
  --cfg job        print the config instead of running it (with -p SECTION: a section of it)
  -m               run one job for each combination of values: trainer.seed=1,2 algorithm=grpo,ppo
  --hydra-help     print further flags, of Hydra
"""


def run_app(job: Job) -> None:
    """Compose the config from the command line and hand it to `job`; then exit.

    Exit status: 0 done, 2 the user must change something (one sentence on stderr), 1 any other error (with a
    traceback), 75 stopped early.
    """
    guard_output()
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(_help(), end="")
        return
    if (section := _section_to_print()) is not None:
        job = functools.partial(_print_config, section)
    show_messages()
    with SIGNALS.listening(), logging_to_file():
        status = _run(job)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: while the interpreter ends, a late signal would replace the status by death of a signal.
        os._exit(status)


def explain(error: BaseException) -> str:
    """One sentence for an error of the config: what is wrong, where, and what is valid."""
    from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, ValidationError

    if isinstance(error, UserError):
        return str(error)
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    first_lines = [str(e).strip().splitlines()[0] for e in chain if str(e).strip()]
    for cause in chain:
        if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and cause.full_key:
            return no_such_key(cause.full_key, _groups())
        if isinstance(cause, ValidationError) and cause.full_key:
            return f"{cause.full_key}: {first_lines[-1].rstrip('.')}"
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        if group in (choices := _groups()):
            meant = did_you_mean(choice, choices[group]) or f"choose one of {', '.join(choices[group])}"
            return f"{group}={choice}: no such choice; {meant}"
    if isinstance(error, OverrideParseException) and "=" not in error.override:
        return f"{error.override}: has no value; write KEY=VALUE or GROUP=CHOICE"
    if isinstance(error, (ConfigCompositionException, OverrideParseException)):
        return " ".join(str(error).split())
    return first_lines[0]


def _help() -> str:
    # Hydra's own help takes seconds: it composes the schema once for each group.
    program = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    groups = [f"  {group}: {', '.join(choices)}" for group, choices in _groups().items()]
    return _HELP.format(program=program, groups="\n".join(groups), sections=", ".join(valid_keys()))


def _groups() -> dict[str, list[str]]:
    """The groups of `conf/` with their choices."""
    return {
        entry.name: sorted(os.path.splitext(name)[0] for name in os.listdir(entry.path))
        for entry in sorted(os.scandir(conf_dir()), key=lambda entry: entry.name)
        if entry.is_dir()
    }


def _section_to_print() -> str | None:
    """Remove `--cfg job` and `-p SECTION` from the command line; return the section, "" for the whole config.

    None: there is no such flag. Hydra would print interpolations unresolved, and null for the default of a function.
    """
    if not re.search(r" (--cfg|-c)[ =]job( |$)", " ".join(["", *sys.argv[1:]])):
        return None
    _take_flag("--cfg", "-c")
    sys.argv[1:] = [word for word in sys.argv[1:] if word != "--resolve"]
    return _take_flag("--package", "-p")


def _take_flag(*names: str) -> str:
    """Remove `NAME VALUE` or `NAME=VALUE` from the command line; return the value, "" if there is none."""
    for i, word in enumerate(sys.argv[1:], start=1):
        name, equals, value = word.partition("=")
        if name in names:
            value = value if equals else " ".join(sys.argv[i + 1 : i + 2])
            del sys.argv[i : i + (1 if equals else 2)]
            return value
    return ""


def _print_config(section: str, config: Config) -> None:
    """Print the config, or a section or key of it, as YAML."""
    import yaml

    if section and section not in {name for walk in (walk_keys, walk_sections) for name, *_ in walk(config)}:
        raise UserError(no_such_key(section))
    nested: Any = dataclasses.asdict(config)
    for name in filter(None, section.split(".")):
        nested = nested[name]
    print(yaml.safe_dump(nested, sort_keys=False, allow_unicode=True).removesuffix("...\n"), end="")


def _run(job: Job) -> int:
    """Run the job, print how it ended, and return the exit status. Later signals are ignored."""
    try:
        try:
            _compose_and_run(job)
        finally:
            SIGNALS.ignore()
    except BaseException as error:
        stop = error if isinstance(error, (Stopped, KeyboardInterrupt)) else SIGNALS.raised
        if stop is not None:
            sentence = str(stop) or "stopped by an interrupt; the last checkpoint is as it was"
            print(sentence)
            LOG_FILE.write(sentence)
            return EXIT_STATUS
        if isinstance(error, SystemExit):
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        traceback.print_exc()
        LOG_FILE.write(traceback.format_exc())
        return 1
    return 0


def _compose_and_run(job: Job) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    SIGNALS.check()
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through to here instead of printing them itself

    @hydra.main(version_base="1.3", config_path=conf_dir(), config_name="config")
    def app(dict_config: DictConfig) -> None:
        nonlocal composed
        composed = True
        # Here as well, because Hydra would print a line of its own about a job that raises.
        with _errors_as_sentences():
            config = to_config(dict_config)
            SIGNALS.check()
            LOG_FILE.close()  # in a sweep, the last job's
            if HydraConfig.get().mode == hydra.types.RunMode.MULTIRUN:
                print(f"[{HydraConfig.get().job.num}] {config.trainer.run_dir}", flush=True)
            job(config)

    composed = False
    with _errors_as_sentences():
        try:
            app()
        except OSError as error:
            if composed or isinstance(error, HydraException):  # a missing config is an OSError too
                raise
            raise UserError(
                f"hydra.sweep.dir: {error.filename} cannot be written ({error.strerror}); work in another "
                "directory, or choose another with hydra.sweep.dir=DIRECTORY"
            ) from error


@contextlib.contextmanager
def _errors_as_sentences() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        stop = SIGNALS.stop_behind(error)
        if stop is not None:
            raise stop from error
        _exit_with_sentence(error)
        raise


def _exit_with_sentence(error: BaseException) -> None:
    """Print one sentence and exit, if `error` has one."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, (UserError, HydraException, OmegaConfBaseException)):
        sentence, status = f"error: {explain(error)}", 2
    elif isinstance(error, (WorkerError, NonFiniteError, NotSavedError)):
        sentence, status = f"error: {error}", 1
    elif isinstance(error, Exception) and memory_ran_out(error):
        sentence, status = (
            f"error: the driver has no memory left ({one_line(str(error)) or 'MemoryError'}); lower "
            "trainer.train_batch_size, or give the machine more memory, and restart the job with the same command",
            1,
        )
    else:
        return
    print(sentence, file=sys.stderr)
    LOG_FILE.write(sentence)
    sys.exit(status)
