"""The command line of a job: words in, an exit status out; with `-m` a sweep, which runs several jobs in this process.

A job of a sweep that fails does not end the others. The extra `sweeps` has Optuna's sweeper, which continues a killed
sweep.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import importlib.metadata
import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.config.fields import matches, value_of
from trainer.config.hydra import compose, conf_dir, find_groups, hydra_words, key_in, to_config
from trainer.config.schema import Config, no_such_key, section_named, valid_keys, without_source
from trainer.config.tasks import ACCURACY, OPTIONS
from trainer.errors import (
    DivergedError,
    NonFiniteError,
    NonRetryableError,
    NotSavedError,
    UserError,
    WorkerError,
    describe_with_place,
    did_you_mean,
    is_disk_unwritable,
    is_out_of_memory,
    one_line,
    sentence_of,
)
from trainer.files.documents import dump_yaml
from trainer.files.redaction import redact, redact_text
from trainer.process import time_limits
from trainer.process.log_setup import LOG_FILE, ToolParser, guard_output, logging_to_file, show, show_messages
from trainer.process.signals import CONTINUES, EXIT_STATUS, SIGNALS, Stopped

if TYPE_CHECKING:
    from omegaconf import DictConfig

Job = Callable[[Config], float | None]
"""Returns the best value of `trainer.best_metric`, for sweepers that look for the best job."""
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
    config = compose(flags.overrides, flags.config, flags.config_dir)
    SIGNALS.check()
    if flags.cfg:
        print(_shown(config, flags.package), end="")
    else:
        job(config)


def parsed(words: Sequence[str], command: str = "train") -> argparse.Namespace:
    """Return the flags and `overrides` of a command line, in which flags may stand anywhere.

    Raises:
        UserError: a flag is not known, or has no value.
    """
    parser = ToolParser(prog=f"trainer {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--config-dir")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("-p", "--package", default="")
    parser.add_argument("-m", "--multirun", action="store_true")
    flags, rest = parser.parse_known_args(list(words))
    for word in rest:
        if word.startswith("-"):
            name = word.partition("=")[0]
            meant = f"write {word.lstrip('-')}" if "." in name else did_you_mean(name, ("--config", "--multirun"))
            raise UserError(f"{word}: no such flag; {meant or f'`trainer {command} --help` lists them'}")
    flags.overrides = rest
    return flags


def unread_words(words: Sequence[str], config: Config) -> list[str]:
    """Return the keys and choices in the overrides that the task does not read (`TaskSpec.unread`)."""
    unread = []
    for word in dict.fromkeys(words):
        key, unread_keys = key_in(word), config.task.unread
        shown = without_source(key)
        is_option = key.startswith(f"{OPTIONS}.") and config.task.options
        if not is_option and (matches(shown, unread_keys) or matches(f"{shown}.", unread_keys)):
            unread.append(word if section_named(key) is not None and "{" not in word else key)
    return unread


def refuse_unread(words: Sequence[str], config: Config) -> None:
    """Refuse overrides that the task does not read, and rewards where an environment gives them: they would change
    nothing. Files are not searched for such keys, because one file may serve several tasks.

    Raises:
        UserError: names the keys.
    """
    if unread := unread_words(words, config):
        task, them = config.trainer.task, "it" if len(unread) == 1 else "them"
        raise UserError(
            f"{', '.join(unread)}: trainer.task={task} does not read {them}, so leave {them} out or choose another "
            "task (a config file may have keys of several tasks)"
        )
    for key in map(key_in, words):
        shown = without_source(key)
        is_read = shown == "reward.success_threshold" or not config.task.reward_functions or not config.reads(key)
        if is_read or not f"{shown}.".startswith("reward."):
            continue
        source = key.removesuffix(shown)
        name = f"{source}environment.name"
        names = [value_of(config, name)] if source else [one.name for one in config.environments]
        if all(names):
            raise UserError(
                f"{key}: {name}={value_of(config, name)} gives the rewards, so {key} is not read; leave it out, or set "
                f"{name}=null"
            )


def _shown(config: Config, section: str) -> str:
    """Return the config, or a section or key of it, as YAML."""
    nested: Any = redact(dataclasses.asdict(config))
    for name in filter(None, section.split(".")):
        if not isinstance(nested, dict) or name not in nested:
            raise UserError(no_such_key(section))
        nested = nested[name]
    return dump_yaml(nested, allow_unicode=True).removesuffix("...\n")


# --- How a job ends ---

_ODD_FILES = (errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.EINVAL, errno.ELOOP)
"""Errors of a path at which something else is than a file of its kind."""


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

    def exit(self) -> NoReturn:
        """Exit with the status."""
        sys.stdout.flush()
        sys.stderr.flush()
        SIGNALS.end_watch()
        # Not sys.exit: while the interpreter ends, a late signal would replace the status by death of a signal.
        os._exit(self.status)


class JobEnded(BaseException):
    """Ends a sweep with an outcome. Not an `Exception`: Hydra would print a line of its own about it."""

    def __init__(self, outcome: Outcome):
        self.outcome = outcome


def outcome_of(error: BaseException) -> Outcome:
    """Return how a job ended that has raised `error`."""
    if isinstance(error, JobEnded):
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
    if isinstance(error, UserError):
        return Outcome(2, str(error))
    if isinstance(error, Exception) and is_out_of_memory(error):
        return Outcome(
            1,
            f"the driver has no memory left ({one_line(str(error)) or 'MemoryError'}); lower "
            "trainer.train_batch_size, or give the machine more memory, and restart the job with the same command",
        )
    if isinstance(error, OSError) and is_disk_unwritable(error):
        return Outcome(
            1,
            f"{error.filename or 'a file of the run'}: cannot be written ({error.strerror}); make room on the disk "
            f"(or in a quota, or `ulimit -f`), or repair it, and then {CONTINUES}",
        )
    if isinstance(error, OSError) and error.filename and error.errno in _ODD_FILES:
        return Outcome(2, sentence_of(error))
    return Outcome(1, trace=_trace_of(error, describe_with_place(error)))


def _trace_of(error: BaseException, sentence: str) -> str:
    """Return the traceback, and in the last line what a reader of the log's end needs."""
    return f"{''.join(traceback.format_exception(error)).rstrip()}\nerror: {sentence}"


# --- Sweeps ---


OPTUNA = "optuna>=4.9,<5"
"""What the sweeper works with. It asks for 2.x itself, and the package index knows nothing else."""
DIRECTION = "${optuna_direction:${trainer.task},${trainer.best_metric}}"
"""In which Optuna looks, if the command line does not say it."""
_OPTUNA = {
    "defaults": [{"sampler": "keyed_tpe"}, "_self_"],
    "_target_": "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper",
    "direction": DIRECTION,
    # In the directory of the sweep, so that the same command continues a killed sweep.
    "storage": "sqlite:///${hydra.sweep.dir}/optuna.db",
    "study_name": "sweep",
    "n_trials": 20,
    "n_jobs": 1,  # trials that are chosen together do not learn from one another
    "max_failure_rate": 1.0,
    "search_space": None,
    "params": None,
    "custom_search_space": None,
}
_KEYED_TPE = {"_target_": "trainer.sweeps.sampler.KeyedTPESampler", "seed": "${trainer.seed}", "n_startup_trials": 10}


def run_sweep(job: Job, flags: argparse.Namespace) -> None:
    """Run one job for each combination of values, as Hydra's `--multirun` does.

    Raises:
        JobEnded: with status 75 if a job has stopped early, 2 if all that have failed were refused, else 1.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf.errors import OmegaConfBaseException

    words = hydra_words(flags.overrides, flags.config, flags.config_dir, sweeps=True)
    ends: list[tuple[str, int]] = []
    register_plugins(words)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through to here instead of printing them itself
    sys.argv[1:] = ["--multirun", *words]

    @hydra.main(version_base="1.3", config_path=conf_dir(), config_name="config")
    def app(dict_config: DictConfig) -> float | None:
        LOG_FILE.close()  # the last job's
        value, outcome = None, Outcome(0)
        try:
            name = str(dict_config.trainer.run_dir)
        except OmegaConfBaseException:
            name = f"job {HydraConfig.get().job.num}"
        try:
            show(name)
            config = to_config(dict_config)
            SIGNALS.check()
            value = job(config)
            if str(HydraConfig.get().sweeper._target_).endswith(".OptunaSweeper"):
                _check_value(value, config.compared_by[0])
        except (Exception, Stopped, KeyboardInterrupt) as error:
            outcome = outcome_of(error)
            if outcome.status == EXIT_STATUS:
                raise JobEnded(outcome) from error
        outcome.show()
        ends.append((name, outcome.status))
        return value

    error = None
    try:
        app()
    except ValueError as caught:  # Optuna cannot name the best trial if all have failed
        error = caught
    LOG_FILE.close()  # the last job's, which does not hold what is said of the sweep
    if failed := [(name, status) for name, status in ends if status]:  # two trials may have one name
        text = f"{len(failed)} of {len(ends)} jobs failed: {'; '.join(name for name, _ in failed)}"
        raise JobEnded(Outcome(min(status for _, status in failed), text))
    if error is not None:
        raise error


def _check_value(value: float | None, metric: str) -> None:
    """Refuse a job that tells Optuna nothing, because no step has measured the metric; warn of an accuracy of 0."""
    if value is None:
        raise UserError(f"trainer.best_metric={metric}: no step has measured it")
    if value == 0 and metric == ACCURACY:
        show(
            "WARNING: val/accuracy is 0 in this job, which tells Optuna nothing if other jobs have 0 too; "
            "a new sweep with trainer.best_metric=val/reward/mean compares such jobs"
        )


def register_plugins(words: Sequence[str]) -> None:
    """Prepare the sweeper that the overrides choose.

    Raises:
        UserError: it is not installed, or with a version of Optuna that does not work; or a launcher is chosen.
    """
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    if launcher := next((word for word in words if word.startswith("hydra/launcher=")), None):
        raise UserError(f"{launcher}: jobs of a sweep run one after another; start a sweep for each machine instead")
    chosen = next((word for word in words if word.startswith("hydra/sweeper=optuna")), None)
    if chosen is None:
        return
    if importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
        raise UserError(f"{chosen}: needs the package hydra-optuna-sweeper; install the extra `sweeps`")
    version = importlib.metadata.version("optuna")
    major, minor = map(int, version.split(".")[:2])
    if not (4, 9) <= (major, minor) < (5, 0):  # the sweeper asks for 2.x, which pip installs, and SQLAlchemy 2 breaks
        raise UserError(
            f"{chosen}: needs {OPTUNA}, and {version} is installed; give `pip install '{OPTUNA}'`, although "
            "hydra-optuna-sweeper asks for an older one (docs/sweeps.md)"
        )
    warnings.filterwarnings("ignore", category=FutureWarning, module="optuna|hydra_plugins")
    Plugins.instance()  # the plugin registers its own defaults, which ours replace
    store = ConfigStore.instance().store
    store(group="hydra/sweeper", name="optuna", node=_OPTUNA)
    store(group="hydra/sweeper/sampler", name="keyed_tpe", node=_KEYED_TPE)
