"""The jobs of a sweep (`-m`). Hydra runs them in this process, or a launcher of Hydra in others (`submitit_…`).

A job that fails does not end the others. Launchers pass on values alone, so each of their jobs leaves a note of its end
in the directory of the sweep, which the process of the sweep reads.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config.hydra import conf_dir, hydra_words, to_config
from trainer.config.outcome import JobEnded, Outcome, outcome_of
from trainer.config.schema import Config
from trainer.config.sweep_plugins import register_plugins
from trainer.config.tasks import ACCURACY
from trainer.errors import UserError, one_line
from trainer.files.atomic_io import write_file
from trainer.process import time_limits
from trainer.process.log_setup import LOG_FILE, guard_output, logging_to_file, show, show_messages
from trainer.process.signals import CONTINUES, EXIT_STATUS, SIGNALS, Stopped

if TYPE_CHECKING:
    from omegaconf import DictConfig

Job = Callable[[Config], float | None]
"""Returns the best value of `trainer.best_metric`, for sweepers that look for the best job."""
_NOTES = "TRAINER_SWEEP_NOTES"  # the processes of the jobs inherit it


class JobResult(NamedTuple):
    """How a job of a sweep ended."""

    name: str
    status: int
    text: str


def run_sweep(job: Job, flags: argparse.Namespace) -> None:
    """Run one job for each combination of values, as Hydra's `--multirun` does.

    Raises:
        JobEnded: with status 75 if a job has stopped early, 2 if all that have failed were refused, else 1.
    """
    import hydra

    words, process, ends = hydra_words(flags), os.getpid(), list[JobResult]()
    register_plugins(words)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through to here instead of printing them itself
    sys.argv[1:] = ["--multirun", *words]

    @hydra.main(version_base="1.3", config_path=conf_dir(), config_name="config")
    def app(dict_config: DictConfig) -> float | None:
        from trainer.config.sweep_jobs import _run_in  # launchers pickle this function, with all globals that it names

        return _run_in(process, job, dict_config, ends)

    try:
        app()
    except ValueError:
        check_ends(ends)  # Optuna cannot name the best trial if all have failed
        raise
    except (Stopped, RuntimeError) as error:
        lost = type(error).__module__.startswith("submitit.")
        if (isinstance(error, Stopped) or lost) and (wait_for_local_jobs() or lost):
            check_ends(ends, one_line(str(error)) if lost else "")
        raise
    check_ends(ends)


def _run_in(process: int, job: Job, dict_config: DictConfig, ends: list[JobResult]) -> float | None:
    """Run a job of a sweep, whose process has the id `process`; this process may be another one. Adds to `ends`."""
    if os.getpid() != process:
        return _run_launched(job, dict_config)
    LOG_FILE.close()  # the last job's
    value, outcome = _run(job, dict_config)
    if outcome.status == EXIT_STATUS:
        raise JobEnded(outcome)
    outcome.show()
    ends.append(JobResult(_name_of(dict_config), outcome.status, outcome.shown))
    return value


def _run(job: Job, dict_config: DictConfig) -> tuple[float | None, Outcome]:
    """Run a job of a sweep. Returns its best value, None if it has none, and how it ended."""
    from hydra.core.hydra_config import HydraConfig

    try:
        show(_name_of(dict_config))
        config = to_config(dict_config)
        SIGNALS.check()
        value = job(config)
        if str(HydraConfig.get().sweeper._target_).endswith(".OptunaSweeper"):
            metric, _ = config.compared_by
            if value is None:
                raise UserError(f"trainer.best_metric={metric}: no step has measured it")
            if value == 0 and metric == ACCURACY:
                show(
                    "WARNING: val/accuracy is 0 in this job, which tells Optuna nothing if other jobs have 0 too; "
                    "a new sweep with trainer.best_metric=val/reward/mean compares such jobs"
                )
        return value, Outcome(0)
    except (Exception, Stopped, KeyboardInterrupt) as error:
        return None, outcome_of(error)


def _run_launched(job: Job, dict_config: DictConfig) -> float | None:
    """Run a job of a sweep in a process that a launcher has started, and leave a note of its end."""
    from hydra.core.hydra_config import HydraConfig

    guard_output()
    show_messages()
    with SIGNALS.listening(), logging_to_file():
        value, outcome = _run(job, dict_config)
        outcome.show()
    note_end(HydraConfig.get().job.num, JobResult(_name_of(dict_config), outcome.status, outcome.shown))
    return value


def _name_of(dict_config: Any) -> str:
    from hydra.core.hydra_config import HydraConfig
    from omegaconf.errors import OmegaConfBaseException

    try:
        return str(dict_config.trainer.run_dir)
    except OmegaConfBaseException:
        return f"job {HydraConfig.get().job.num}"


def check_ends(ends: list[JobResult], lost: str = "") -> None:
    """Check that no job has failed, neither those of this process nor those that a launcher ran.

    Args:
        lost: the message of a launcher that has lost a job.

    Raises:
        JobEnded: see `run_sweep`.
    """
    LOG_FILE.close()  # the last job's, which does not hold what is said of the sweep
    launched = noted_ends()
    for end in launched:
        if end.status:
            show(f"{end.name}: {end.text}", error=True)
    ends = [*ends, *launched]
    failed = [end for end in ends if end.status not in (0, EXIT_STATUS)]
    texts = [f"{len(failed)} of {len(ends)} jobs failed: {'; '.join(end.name for end in failed)}"] if failed else []
    if lost:
        texts.append(f"a job has ended without a result ({lost})")
    if stopped := [end.name for end in ends if end.status == EXIT_STATUS]:
        texts.append(f"stopped early: {'; '.join(stopped)}; {CONTINUES}")
        raise JobEnded(Outcome(EXIT_STATUS, "; ".join(texts)))
    if texts:
        raise JobEnded(Outcome(min([1] if lost else [end.status for end in failed]), "; ".join(texts)))


def prepare_notes(directory: str) -> None:
    """Make a directory for the notes of this sweep below `directory`. The process of the sweep calls this."""
    parent = os.path.join(directory, ".ends")
    os.makedirs(parent, exist_ok=True)
    os.environ[_NOTES] = os.path.abspath(tempfile.mkdtemp(dir=parent))


def note_end(number: int, end: JobResult) -> None:
    """Leave a note of how this job ended."""
    write_file(os.path.join(os.environ[_NOTES], f"{number:06d}.json"), json.dumps(end))


def noted_ends() -> list[JobResult]:
    """Return how the jobs ended that have left a note, in the order of the jobs."""
    ends = []
    if directory := os.environ.get(_NOTES):
        for path in sorted(glob.glob(os.path.join(glob.escape(directory), "*.json"))):
            with open(path) as file:
                ends.append(JobResult(*json.load(file)))
    return ends


def wait_for_local_jobs() -> int:
    """Wait until the jobs have ended that submitit runs on this machine. Returns their number.

    They get SIGTERM if this process has received a signal, and again for each further signal.
    """
    import psutil

    jobs = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            jobs += [child] if any("submitit.local._local" in word for word in child.cmdline()) else []
    running, sent = jobs, 0
    with contextlib.suppress(Stopped), SIGNALS.deferred():
        while running:
            if SIGNALS.count > sent:
                sent = SIGNALS.count
                for job in running:
                    job.terminate()
            _, running = psutil.wait_procs(running, timeout=time_limits.POLL_INTERVAL_S)
    return len(jobs)
