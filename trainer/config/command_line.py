"""The command line of a job: overrides in, an exit status out, and one sentence for each error of the user."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.config.fields import walk_keys, walk_sections
from trainer.config.hydra import conf_dir, register, register_plugins, to_config, with_files_group
from trainer.config.launched import End, note_end, noted_ends, wait_for_local_jobs
from trainer.config.schema import Config, no_such_key, valid_keys
from trainer.config.suggestions import did_you_mean
from trainer.errors import (
    DivergedError,
    JobFault,
    NonFiniteError,
    NotSavedError,
    UserError,
    WorkerError,
    as_list,
    disk_refuses,
    memory_ran_out,
    one_line,
)
from trainer.output import LOG_FILE, guard_output, logging_to_file, show, show_messages
from trainer.redaction import redact, redact_text
from trainer.signals import CONTINUES, EXIT_STATUS, SIGNALS, Stopped

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Hydra, which takes long to import, is imported where it is used: signals are handled from the first moment on.

Job = Callable[[Config], float | None]
"""Returns the best value of `trainer.best_metric`, for sweepers that look for the best job."""

_HELP = """usage: trainer {command} [GROUP=CHOICE ...] [KEY=VALUE ...] [FLAG ...]

Groups, each a set of values for some keys:
{groups}

Sections of keys ({sections}):
  docs/config.md explains every key. An unknown key is refused with those most like it.

Flags:
  --cfg job        print the config instead of running it (with -p SECTION: a section of it)
  -m               run one job for each combination of values: trainer.seed=1,2 algorithm=grpo,ppo
  --hydra-help     print further flags, of Hydra
"""


_MEANT = {"model": "model.path={}", "data": "data=files data.train_files=[{}]"}
"""What to write in place of `GROUP=PATH`."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    status: int
    """Exit status: 0 done, 2 the user must change something, 3 the run itself is at fault, 1 any other error, 75
    stopped early."""
    text: str = ""
    """One sentence."""
    trace: str = ""
    """In place of the sentence: the traceback of an error that nobody expects."""

    @property
    def shown(self) -> str:
        """What the user and the log get to read, without secrets."""
        return redact_text(
            self.trace or (f"error: {self.text}" if self.text and self.status != EXIT_STATUS else self.text)
        )

    def show(self) -> None:
        """Print and log the text: on stdout if the run stopped as it was told, else on stderr."""
        if self.shown:
            show(self.shown, error=self.status != EXIT_STATUS)
            LOG_FILE.write(self.shown)


def run_app(job: Job, command: str = "train") -> None:
    """Compose the config from the command line and hand it to `job`; then exit with the status of the `Outcome`.

    Args:
        command: for the help.
    """
    guard_output()
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(_help(command), end="")
        return
    if (section := _section_to_print()) is not None:
        job = functools.partial(_print_config, section)
    show_messages()
    with SIGNALS.listening(), logging_to_file():
        outcome = run_to_end(job)
        outcome.show()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: while the interpreter ends, a late signal would replace the status by death of a signal.
        os._exit(outcome.status)


def run_to_end(job: Job) -> Outcome:
    """Compose the config from the command line, hand it to `job`, and return how that ended.

    Later signals are ignored. What a job of a sweep has to say is printed.
    """
    try:
        try:
            _compose_and_run(job)
        finally:
            SIGNALS.ignore()
    except BaseException as error:
        return _outcome(error)
    return Outcome(0)


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
            return _with_wrong_keys(cause.full_key)
        if isinstance(cause, ValidationError) and cause.full_key:
            key = cause.full_key
            if "is not a ListConfig" in first_lines[-1]:
                return f"{key}: must be a list; write {key}=[{_given(key)}]"
            if key in (sections := dict(walk_sections(Config()))):
                keys = ", ".join(f"{key}.{field.name}" for field in dataclasses.fields(sections[key]))
                return _with_wrong_keys(text=f"{key}={_given(key)}: {key} is a section; its keys are {keys}")
            return f"{key}: {first_lines[-1].rstrip('.')}"
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").partition("/")
        if group in (choices := _groups()):
            known = f"choose one of {', '.join(choices[group])}"
            own = f"write {_MEANT[group].format(choice)}" if group in _MEANT else ""
            meant = own if own and "/" in choice else did_you_mean(choice, choices[group])
            meant = meant or (f"{known}, or {own}" if own else known)
            return _with_wrong_keys(text=f"{group}={choice}: no such choice; {meant}")
    if isinstance(error, OverrideParseException) and "=" not in error.override:
        return f"{error.override}: has no value; write KEY=VALUE or GROUP=CHOICE"
    if isinstance(error, (ConfigCompositionException, OverrideParseException)):
        return " ".join(str(error).split())
    return first_lines[0]


def _with_wrong_keys(key: str = "", text: str = "") -> str:
    """Return a sentence about `key`, or `text`, and one about each other wrong key on the command line."""
    keys = dict.fromkeys([*filter(None, [key]), *_wrong_keys()])
    sentences = [no_such_key(wrong, _groups()) for wrong in keys]
    return as_list("the command has wrong keys:", [*filter(None, [text]), *sentences])


def _wrong_keys() -> list[str]:
    """Return the keys of `KEY=VALUE` on the command line that the schema does not have."""
    known = {name for walk in (walk_keys, walk_sections) for name, *_ in walk(Config())} | set(_groups())
    words = [word.partition("=")[0] for word in sys.argv[1:] if re.match(r"[\w.]+=", word)]
    return [key for key in words if key not in known and not key.startswith("hydra.")]


def _given(key: str) -> str:
    """Return the last value that the command line gives to `key`."""
    return next((word[len(key) + 1 :] for word in reversed(sys.argv) if word.startswith(f"{key}=")), "VALUE")


def _refuse_dashes() -> None:
    """Refuse `--key=value`, which other programs want.

    Raises:
        UserError: names the first such key, without dashes.
    """
    for word in sys.argv[1:]:
        key, _, value = word.lstrip("-").partition("=")
        if word.startswith("--") and re.search(r"[._]", key):
            raise UserError(f"{word}: keys have no dashes before them; write {key}={value or 'VALUE'}")


def _help(command: str) -> str:
    # Hydra's own help takes seconds: it composes the schema once for each group.
    groups = [f"  {group}: {', '.join(choices)}" for group, choices in _groups().items()]
    return _HELP.format(command=command, groups="\n".join(groups), sections=", ".join(valid_keys()))


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
    nested: Any = redact(dataclasses.asdict(config))
    for name in filter(None, section.split(".")):
        nested = nested[name]
    print(yaml.safe_dump(nested, sort_keys=False, allow_unicode=True).removesuffix("...\n"), end="")


class _JobError(BaseException):
    """A job has failed. Not an `Exception`: Hydra would print a line of its own about it."""

    def __init__(self, outcome: Outcome):
        self.outcome = outcome


class _Sweep:
    """The jobs of a sweep. A job that fails does not end the others."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._ends: list[End] = []

    def run(self, job: Job, dict_config: DictConfig) -> float | None:
        """Run one job, and print how it failed if it did. Returns its best value; None if it has none."""
        if os.getpid() != self._process:  # a launcher has started this one
            return _run_launched(job, dict_config)
        LOG_FILE.close()  # the last job's
        value, outcome = _run_swept(job, dict_config)
        if outcome.status == EXIT_STATUS:
            raise _JobError(outcome)
        outcome.show()
        self._ends.append(End(_swept_name(dict_config), outcome.status, outcome.shown))
        return value

    def check(self, lost: str = "") -> None:
        """Check that no job has failed.

        Args:
            lost: a launcher has lost a job, and this is what it says.

        Raises:
            _JobError: with status 75 if a job has stopped early, 2 if all that have failed were refused, else 1.
        """
        launched = noted_ends()
        for end in launched:
            if end.status:
                show(f"{end.name}: {end.text}", error=True)
        ends = [*self._ends, *launched]
        failed = [end for end in ends if end.status not in (0, EXIT_STATUS)]
        texts = [f"{len(failed)} of {len(ends)} jobs failed: {'; '.join(end.name for end in failed)}"] if failed else []
        if lost:
            texts.append(f"a job has ended without a result ({lost})")
        if stopped := [end.name for end in ends if end.status == EXIT_STATUS]:
            texts.append(f"stopped early: {'; '.join(stopped)}; {CONTINUES}")
            raise _JobError(Outcome(EXIT_STATUS, "; ".join(texts)))
        if texts:
            raise _JobError(Outcome(min([1] if lost else [end.status for end in failed]), "; ".join(texts)))


def _swept_name(dict_config: DictConfig) -> str:
    from hydra.core.hydra_config import HydraConfig
    from omegaconf.errors import OmegaConfBaseException

    try:
        return str(dict_config.trainer.run_dir)
    except OmegaConfBaseException:
        return f"job {HydraConfig.get().job.num}"


def _run_swept(job: Job, dict_config: DictConfig) -> tuple[float | None, Outcome]:
    """Run a job of a sweep. Returns its best value, None if it has none, and how it ended."""
    from hydra.core.hydra_config import HydraConfig

    try:
        show(_swept_name(dict_config))
        config = to_config(dict_config)
        SIGNALS.check()
        value = job(config)
        if str(HydraConfig.get().sweeper._target_).endswith(".OptunaSweeper"):
            if value is None:
                raise UserError(f"trainer.best_metric={config.trainer.best_metric}: no step has measured it")
            if value == 0 and config.trainer.best_metric == "val/accuracy":
                print(
                    "WARNING: val/accuracy is 0 in this job, which tells Optuna nothing if other jobs have 0 too; "
                    "a new sweep with trainer.best_metric=val/reward/mean compares such jobs",
                    flush=True,
                )
        return value, Outcome(0)
    except (Exception, Stopped, KeyboardInterrupt) as error:
        return None, _outcome(error)


def _run_launched(job: Job, dict_config: DictConfig) -> float | None:
    """Run a job of a sweep in a process of its own, and leave a note of its end for the sweep."""
    from hydra.core.hydra_config import HydraConfig

    guard_output()
    show_messages()
    with SIGNALS.listening(), logging_to_file():
        value, outcome = _run_swept(job, dict_config)
        outcome.show()
    note_end(HydraConfig.get().job.num, End(_swept_name(dict_config), outcome.status, outcome.shown))
    return value


def _compose_and_run(job: Job) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    SIGNALS.check()
    register()
    _refuse_dashes()
    sys.argv[1:] = with_files_group(sys.argv[1:])
    register_plugins(sys.argv[1:])
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through to here instead of printing them itself

    @hydra.main(version_base="1.3", config_path=conf_dir(), config_name="config")
    def app(dict_config: DictConfig) -> float | None:
        nonlocal composed
        composed = True
        if HydraConfig.get().mode == hydra.types.RunMode.MULTIRUN:
            return sweep.run(job, dict_config)
        try:
            config = to_config(dict_config)
            SIGNALS.check()
            return job(config)
        except Exception as error:
            raise _JobError(_outcome(error)) from error

    composed, sweep = False, _Sweep()
    try:
        app()
        sweep.check()
    except ValueError:
        sweep.check()  # Optuna cannot name the best trial if all have failed
        raise
    except (Stopped, RuntimeError) as error:
        lost = type(error).__module__.startswith("submitit.")
        if (isinstance(error, Stopped) or lost) and (wait_for_local_jobs() or lost):
            sweep.check(one_line(str(error)) if lost else "")
        raise
    except OSError as error:
        if composed or isinstance(error, HydraException):  # a missing config is an OSError too
            raise
        raise UserError(
            f"hydra.sweep.dir: {error.filename} cannot be written ({error.strerror}); work in another "
            "directory, or choose another with hydra.sweep.dir=DIRECTORY"
        ) from error


def _outcome(error: BaseException) -> Outcome:
    """Return how a job ended that has raised `error`."""
    if isinstance(error, _JobError):
        return error.outcome
    stop = error if isinstance(error, (Stopped, KeyboardInterrupt)) else SIGNALS.stop_behind(error)
    if stop is not None:
        return Outcome(EXIT_STATUS, str(stop) or "stopped by an interrupt; the last checkpoint is as it was")
    if isinstance(error, SystemExit):
        return Outcome(error.code if isinstance(error.code, int) else int(error.code is not None))
    if isinstance(error, JobFault):
        is_told = isinstance(error, DivergedError) or isinstance(error.__cause__, (WorkerError, NonFiniteError))
        return Outcome(3, str(error), "" if is_told else "".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, (WorkerError, NonFiniteError, NotSavedError)):
        return Outcome(1, str(error))
    if isinstance(error, Exception) and memory_ran_out(error):
        return Outcome(
            1,
            f"the driver has no memory left ({one_line(str(error)) or 'MemoryError'}); lower "
            "trainer.train_batch_size, or give the machine more memory, and restart the job with the same command",
        )
    if isinstance(error, OSError) and disk_refuses(error):
        return Outcome(
            1,
            f"{error.filename or 'a file of the run'}: cannot be written ({error.strerror}); free space on the disk, "
            f"or repair it, and then {CONTINUES}",
        )
    if _is_of_config(error):
        return Outcome(2, explain(error))
    return Outcome(1, trace="".join(traceback.format_exception(error)).rstrip())


def _is_of_config(error: BaseException) -> bool:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return isinstance(error, (UserError, HydraException, OmegaConfBaseException))
