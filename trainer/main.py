"""`trainer train`, `sft`, `dpo` and `rm`: compose the config, check it and the machine, run the task."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from functools import partial

from trainer.config import Config
from trainer.config.command_line import refuse_unread, run_app
from trainer.config.hydra import words_given
from trainer.config.trainer import PROCESSES
from trainer.errors import UserError
from trainer.metrics.best import find_best
from trainer.metrics.estimates import attempts_of
from trainer.metrics.names import is_metric, pass_at, set_of_metric
from trainer.metrics.sinks import find_sink
from trainer.metrics.timing import logged_stages
from trainer.metrics.tracker import METRICS_FILE, MetricsLines
from trainer.process.machine_limits import usable_cores
from trainer.process.signals import SIGNALS
from trainer.process.startup import importing, stage
from trainer.run.run_metadata import has_metrics, second_run
from trainer.run.state import OnStep

LOG = logging.getLogger(__name__)
_RANK_MODULES = ("trainer.workers.rank", "torch._dynamo")
"""What every rank imports on CPUs. The first optimizer of a process imports the second one."""


def prepare(cfg: Config) -> str:
    """Find what the user must change before Ray starts, and return the device: `cuda` or `cpu`.

    Raises:
        UserError: the run directory cannot be written, or the machine or a function is not as the config says.
    """
    t = cfg.trainer
    with _run_dir(t.run_dir):
        if t.resume_mode in (None, "none") and has_metrics(t.run_dir):
            raise second_run(t.run_dir)
        _check_metrics(cfg)
        for sink in cfg.logger.sinks:
            find_sink(sink)
        return _check_machine(cfg)


def _check_metrics(cfg: Config) -> None:
    best = cfg.trainer.best_metric.removeprefix("-")
    for key, metrics in {"best_metric": [best], "divergence_limits": cfg.trainer.divergence_limits}.items():
        for metric in metrics:
            if (problem := _problem_of_metric(cfg, metric)) is not None:
                raise UserError(f"trainer.{key}={metric}: {problem}")


def _problem_of_metric(cfg: Config, metric: str) -> str | None:
    """Return why the run does not measure a metric that its config names; None: it does."""
    k, of_set = cfg.rollout.val_n, set_of_metric(metric)
    if metric.startswith(pass_at("")) and metric != pass_at(k):
        return f"is not measured with rollout.val_n={k}"
    if of_set is not None and cfg.reads("data.val_sets"):
        name, measure = of_set
        own = cfg.data.val_sets.get(name)
        if own is None:
            return f"there is no validation set {name}; data.val_sets names {', '.join(cfg.data.val_sets) or 'none'}"
        measures = ["accuracy", f"avg@{own.n}", *(f"pass@{k}" for k in attempts_of(own.n)), "failures"]
        if measure not in measures or own.interval_in(cfg) < 1:
            return f"is not measured with data.val_sets.{name}.n={own.n} and interval={own.interval_in(cfg)}"
        return None
    return None if is_metric(metric, cfg.task.metrics) else "there is no such metric; docs/metrics.md lists them"


def _check_machine(cfg: Config) -> str:
    """Check what needs torch, and return the device."""
    with SIGNALS.blocked(), importing():
        import numpy  # noqa: F401 - its threads, which torch would start, must block signals while Ray starts
    with stage("importing torch"), importing():
        import torch  # for the first time: the config has passed

        from trainer.objectives.base import make_objective
        from trainer.objectives.optimizer_check import check_optimizers
        from trainer.parallel.mesh import pick_device
    # So torch adds up in one order on machines with any number of cores: a resumed run, perhaps on another machine,
    # checks what it measures against the log to the last bit.
    torch.set_num_threads(1)
    with stage("checking the config"):
        device = pick_device(cfg.trainer.device, cfg.engine if cfg.task.generates else None)
        _check_devices(cfg, device)
        make_objective(cfg).check()
        check_optimizers(cfg)
    return device


@contextlib.contextmanager
def _run_dir(run_dir: str) -> Iterator[None]:
    """Make the run directory, and remove it again if the block fails and has left it empty."""
    is_new = not os.path.exists(run_dir)
    try:
        os.makedirs(run_dir, exist_ok=True)
        probe = os.path.join(run_dir, ".writable")
        with open(probe, "w"):
            pass
        os.remove(probe)
    except OSError as error:
        raise UserError(f"trainer.run_dir={run_dir}: cannot be written ({error.strerror}); choose another") from error
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            if is_new:
                os.rmdir(run_dir)
        raise


def _check_devices(cfg: Config, device: str) -> None:
    """Refuse more ranks than this machine has GPUs. A cluster to join is asked after it is joined."""
    if cfg.trainer.ray_address not in (None, PROCESSES):
        return
    if device != "cuda":
        if cfg.trainer.num_workers > (cores := usable_cores()):
            LOG.info("NOTE: trainer.num_workers=%d: the ranks share %d cores", cfg.trainer.num_workers, cores)
        return
    import torch

    count = torch.cuda.device_count()
    if cfg.trainer.num_workers > count:
        found = f"{count} CUDA devices" if count else "no CUDA device"
        raise UserError(
            f"trainer.device=cuda: torch finds {found} on this machine; lower trainer.num_workers="
            f"{cfg.trainer.num_workers}, set trainer.device=cpu, install the packages and the driver for GPUs "
            "(docs/install.md), or join a cluster with trainer.ray_address"
        )


def train(cfg: Config, on_step: OnStep | None = None) -> float | None:
    """Do what `trainer.task` names; returns `best_value`."""
    with logged_stages():
        refuse_unread(words_given(), cfg)
        from trainer.cluster.early_start import early_fork, early_ray  # a refused config does not wait for this

        with early_ray(cfg) as ray:
            device = prepare(cfg)
            with stage("importing transformers"):
                with importing():
                    from trainer.jobs import run_task
                    from trainer.tasks import build_task
                task = build_task(cfg)
            with early_fork(cfg, device, _RANK_MODULES) as server:
                run_task(task, device, ray or server, on_step)
    return best_value(cfg)


def best_value(cfg: Config) -> float | None:
    """Return the best value of the metric that runs are compared by; None if no step has measured it.

    It is for a search over configs. The initial weights, which all its jobs share, would hide which of them learn less:
    they count only if no later step has measured it.
    """
    rows = list(MetricsLines(os.path.join(cfg.trainer.run_dir, METRICS_FILE)).having(cfg.compared_by[0]))
    trained = [row for row in rows if row["step"] > 0]
    best = find_best(trained, *cfg.compared_by) or find_best(rows, *cfg.compared_by)
    return best and best.value


main = partial(run_app, train)
main_sft, main_dpo, main_rm = (partial(run_app, train, task, [f"trainer.task={task}"]) for task in ("sft", "dpo", "rm"))
"""Train as the command line says; end the process."""
