"""A whole run, from a config to its report: open its directory, check its inputs, run its task."""

from __future__ import annotations

import contextlib
import logging

from trainer.checkpoint.exports import check_export_path, is_exported
from trainer.cluster.early_start import Early
from trainer.cluster.fork_server import ForkServer
from trainer.cluster.ray_head import RayHead
from trainer.cluster.worker_groups import Cluster
from trainer.config import Config
from trainer.config.trainer import PROCESSES, THIS_PROCESS
from trainer.errors import TrialError, sentences_of
from trainer.files.shared_memory import clear_abandoned
from trainer.metrics import best
from trainer.metrics.prometheus import MetricsServer
from trainer.models.export import export_target
from trainer.models.files import import_configs
from trainer.process import time_limits
from trainer.process.signals import SIGNALS
from trainer.process.startup import importing, stage
from trainer.process.watchdog import Watchdog
from trainer.reports.report import final_report
from trainer.run.directory import RunDirectory
from trainer.run.run_metadata import record_start
from trainer.run.state import OnStep, StopRequest
from trainer.tasks.base import Task, make_trainer

LOG = logging.getLogger(__name__)


def run_task(task: Task, device: str, early: Early = None, on_step: OnStep | None = None) -> None:
    """Run a task to its end.

    Args:
        device: `cuda` or `cpu`.
        early: what of the cluster has been started, for a job on CPUs.
        on_step: not called for the steps of a warm start.
    """
    cfg, t = task.cfg, task.cfg.trainer
    exports = task.exports_last or t.hf_save_interval > 0
    if exports:
        check_export_path(t.export_path)
    if task.warm_start is not None and task.start_weights is not None and task.start_weights() is None:
        with contextlib.suppress(TrialError):  # this run will say so itself, or continue
            task.check_inputs(asks_servers=False)
        run_task(task.warm_start(), device, early if isinstance(early, ForkServer) else None)
        SIGNALS.moment = "starting"  # the last step of a warm start is none of this run
    stop = StopRequest(t.deadline, on_step)
    with RunDirectory(cfg).open(wait=task.is_made is not None) as directory:
        if task.is_made is not None and task.is_made():
            return  # another job has made it
        total, continued = cfg.total_steps, directory.continued
        record_start(t.run_dir, cfg, continued and continued.step)
        # All steps are committed, validated, uploaded and, if wanted, exported: to start again changes nothing.
        done = -1 if continued is None else continued.step
        if done >= total and (not exports or is_exported(export_target(cfg, done))):
            LOG.info(f"finished step {total} of {total} before; nothing is left to do in {t.run_dir}")
            return
        try:
            task.check_inputs(asks_servers=True)
        except TrialError as error:
            if continued is None:
                raise
            for sentence in sentences_of(error):
                LOG.warning("%s; the run continues, because it has trained before", sentence)
        with contextlib.ExitStack() as ends:
            server = None
            if cfg.logger.prometheus is not None:
                server = ends.enter_context(MetricsServer(*cfg.logger.prometheus_address, t.run_name, total))
            ends.callback(clear_abandoned)  # the ranks, which are killed, may keep weights for engines in shared memory
            with stage("importing transformers"):
                import_configs()  # while Ray starts; the tokenizers follow while ranks do
            cluster = ends.enter_context(cluster_of(cfg, device, early))
            ends.enter_context(directory.checkpoints.ended())
            watchdog = Watchdog(time_limits.HANG_S, time_limits.CALL_S)
            if t.ray_address != THIS_PROCESS:  # a debugger may hold a run in one process
                ends.enter_context(watchdog)
            if server is not None:
                server.progress = watchdog.progress
            trainer = make_trainer(task, cluster, directory, task.initial_weights(), stop, server)
            trainer.run()
            model = f"; model: {trainer.exports.export_last(trainer.state.step)}" if task.exports_last else ""
    LOG.info(f"finished step {trainer.state.step} of {total}{best.sentence(trainer.state.best)}{model}")
    if cfg.logger.plot:
        final_report(t.run_dir)


def cluster_of(cfg: Config, device: str, early: Early = None) -> Cluster:
    """Return the cluster on which the processes of a job run, not yet started. `device`: `cuda` or `cpu`."""
    if cfg.trainer.ray_address == PROCESSES:
        from trainer.cluster.process_cluster import ProcessCluster

        return ProcessCluster(cfg, device, rank_server=early if isinstance(early, ForkServer) else None)
    if cfg.trainer.ray_address == THIS_PROCESS:
        from trainer.cluster.process_cluster import ThreadCluster

        return ThreadCluster(cfg, device)
    with importing():
        from trainer.cluster.ray_cluster import RayCluster  # imports Ray

    return RayCluster(cfg, device, early if isinstance(early, RayHead) else None)
