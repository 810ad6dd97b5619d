"""The command line of a job: overrides in, an exit status out, and one sentence for each error of the user."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.config.config_file import ConfigFiles
from trainer.config.explanation import explain
from trainer.config.hydra import conf_dir, prepared, register, register_plugins, to_config
from trainer.config.launched import JobResult, note_end, noted_ends, wait_for_local_jobs
from trainer.config.overrides import find_groups
from trainer.config.schema import Config, is_name, no_such_key, valid_keys
from trainer.config.tasks import ACCURACY
from trainer.errors import (
    DivergedError,
    NonFiniteError,
    NonRetryableError,
    NotSavedError,
    UserError,
    WorkerError,
    describe_with_place,
    is_disk_unwritable,
    is_out_of_memory,
    one_line,
)
from trainer.files.documents import dump_yaml
from trainer.files.redaction import redact, redact_text
from trainer.process.log_setup import LOG_FILE, guard_output, logging_to_file, show, show_messages
from trainer.process.signals import CONTINUES, EXIT_STATUS, SIGNALS, Stopped

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Hydra, which takes long to import, is imported where it is used: signals are handled from the first moment on.

Job = Callable[[Config], float | None]
"""Returns the best value of `trainer.best_metric`, for sweepers that look for the best job."""
Begin = Callable[[list[str]], list[str]]
"""Returns the words that Hydra gets in place of those of the command line."""

_HELP = """usage: trainer {command} [GROUP=CHOICE ...] [KEY=VALUE ...] [FLAG ...]

Groups, each a set of values for some keys:
{groups}

Sections of keys ({sections}):
  docs/config.md explains every key. An unknown key is refused with those most like it.

Flags:
  --config FILE    take choices and values from a YAML file; the command line wins (docs/experiments.md)
  --cfg job        print the config instead of running it (with -p SECTION: a section of it)
  -m, --multirun   run one job for each combination of values: trainer.seed=1,2 algorithm=grpo,ppo
  --hydra-help     print further flags, of Hydra
"""


_FILES = ConfigFiles()
"""The YAML files of the user that the command line names."""


def lines_of_files() -> Mapping[str, str]:
    """Return `FILE:LINE` of each dotted key in the YAML files of the user that the command line names."""
    return _FILES.lines


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    status: int
    """Exit status: 0 done, 2 the user must change something, 3 the run itself is at fault, 1 any other error, 75
    stopped early."""
    text: str = ""
    """One sentence."""
    trace: str = ""
    """In place of the sentence: the traceback of an unexpected error."""

    @property
    def shown(self) -> str:
        """Return the text for the user and the log, without secrets."""
        return redact_text(
            self.trace or (f"error: {self.text}" if self.text and self.status != EXIT_STATUS else self.text)
        )

    def show(self) -> None:
        """Print and log the text: on stdout if the run stopped on request, else on stderr."""
        if self.shown:
            show(self.shown, error=self.status != EXIT_STATUS)
            LOG_FILE.write(self.shown)


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
    guard_output()
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(_help(command), end="")
        return
    if (section := _section_to_print()) is not None:
        job = functools.partial(_print_config, section)
    sys.argv[1:1] = overrides
    show_messages()
    with SIGNALS.listening(), logging_to_file():
        outcome = run_to_end(job, begin, command)
        outcome.show()
        exit_with(outcome)


def exit_with(outcome: Outcome) -> NoReturn:
    """Exit with the status of a job that has ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    SIGNALS.end_watch()
    # Not sys.exit: while the interpreter ends, a late signal would replace the status by death of a signal.
    os._exit(outcome.status)


def run_to_end(job: Job, begin: Begin = lambda words: words, command: str = "train") -> Outcome:
    """Compose the config from the command line, hand it to `job`, and return how that ended.

    Later signals are ignored. The text of a job of a sweep is printed.
    """
    try:
        try:
            sys.argv[1:] = begin(sys.argv[1:])
            _compose_and_run(job, command)
        finally:
            SIGNALS.ignore()
    except BaseException as error:
        return _outcome(error)
    return Outcome(0)


def _help(command: str) -> str:
    # Hydra's own help takes seconds: it composes the schema once for each group.
    groups = [f"  {group}: {', '.join(choices)}" for group, choices in find_groups(conf_dir()).items()]
    return _HELP.format(command=command, groups="\n".join(groups), sections=", ".join(valid_keys()))


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
    if section and not is_name(section):
        raise UserError(no_such_key(section))
    nested: Any = redact(dataclasses.asdict(config))
    for name in filter(None, section.split(".")):
        if name not in nested:
            raise UserError(no_such_key(section))
        nested = nested[name]
    print(dump_yaml(nested, allow_unicode=True).removesuffix("...\n"), end="")


class _JobError(BaseException):
    """A job has failed. Not an `Exception`: Hydra would print a line of its own about it."""

    def __init__(self, outcome: Outcome):
        self.outcome = outcome


class _Sweep:
    """The jobs of a sweep. A job that fails does not end the others."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._ends: list[JobResult] = []

    def run(self, job: Job, dict_config: DictConfig) -> float | None:
        """Run one job, and print how it failed if it did. Returns its best value; None if it has none."""
        if os.getpid() != self._process:  # a launcher has started this one
            return _run_launched(job, dict_config)
        LOG_FILE.close()  # the last job's
        value, outcome = _run_swept(job, dict_config)
        if outcome.status == EXIT_STATUS:
            raise _JobError(outcome)
        outcome.show()
        self._ends.append(JobResult(_swept_name(dict_config), outcome.status, outcome.shown))
        return value

    def check(self, lost: str = "") -> None:
        """Check that no job has failed.

        Args:
            lost: the message of a launcher that has lost a job.

        Raises:
            _JobError: with status 75 if a job has stopped early, 2 if all that have failed were refused, else 1.
        """
        if self._ends:
            LOG_FILE.close()  # the last job's, which does not hold what is said of the sweep
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
            metric, _ = config.compared_by
            if value is None:
                raise UserError(f"trainer.best_metric={metric}: no step has measured it")
            if value == 0 and metric == ACCURACY:
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
    note_end(HydraConfig.get().job.num, JobResult(_swept_name(dict_config), outcome.status, outcome.shown))
    return value


@contextlib.contextmanager
def _hydra_output() -> Iterator[None]:
    """Leave secrets out of what Hydra prints of the config with `--info` and `--cfg`, which run no job."""
    if not any(word.startswith(("--info", "--cfg", "-c", "-i")) for word in sys.argv[1:]):
        yield
        return
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        show(redact_text(printed.getvalue().rstrip("\n")))


def _compose_and_run(job: Job, command: str) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    SIGNALS.check()
    register()
    sys.argv[1:] = prepared(sys.argv[1:], _FILES, command)
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
        with _hydra_output():
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
        return Outcome(EXIT_STATUS, str(stop) or "stopped by an interrupt; the last checkpoint is unchanged")
    if isinstance(error, SystemExit):
        return Outcome(error.code if isinstance(error.code, int) else int(error.code is not None))
    if isinstance(error, NonRetryableError):
        is_told = isinstance(error, DivergedError) or isinstance(error.__cause__, (WorkerError, NonFiniteError))
        return Outcome(3, str(error), "" if is_told else _trace_of(error, str(error)))
    if isinstance(error, (WorkerError, NonFiniteError, NotSavedError)):
        return Outcome(1, str(error))
    if isinstance(error, Exception) and is_out_of_memory(error):
        return Outcome(
            1,
            f"the driver has no memory left ({one_line(str(error)) or 'MemoryError'}); lower "
            "trainer.train_batch_size, or give the machine more memory, and restart the job with the same command",
        )
    if isinstance(error, OSError) and is_disk_unwritable(error):
        return Outcome(
            1,
            f"{error.filename or 'a file of the run'}: cannot be written ({error.strerror}); free space on the disk, "
            f"or repair it, and then {CONTINUES}",
        )
    if _is_of_config(error):
        return Outcome(2, explain(error, sys.argv[1:], _FILES, conf_dir()))
    return Outcome(1, trace=_trace_of(error, describe_with_place(error)))


def _trace_of(error: BaseException, sentence: str) -> str:
    """Return the traceback, and in the last line what a reader of the log's end needs."""
    return f"{''.join(traceback.format_exception(error)).rstrip()}\nerror: {sentence}"


def _is_of_config(error: BaseException) -> bool:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return isinstance(error, (UserError, HydraException, OmegaConfBaseException))
