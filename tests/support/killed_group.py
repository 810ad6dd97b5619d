"""A small training job without Ray, to be killed many times: real ranks, manager, ledger and tracker.

`python -m tests.support.killed_group` imports once and then forks a job for each line of JSON on its stdin, in a
process group of its own; it answers with the job's id and, when the job has ended, its exit status. Rank 0
plays the driver as well; the others serve the calls that it broadcasts, as rank actors do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 6


# ----------------------------------------------------------------------------------------------------------
# Inside the job


class GroupRanks:
    """What `trainer.cluster.ranks.Ranks` is to the loop, over torch.distributed alone."""

    saved_roles = ["policy", "critic"]

    def __init__(self, rank: Any):
        import torch.distributed as dist

        self.rank = rank
        self._calls = dist.new_group(backend="gloo")
        self._answers = dist.new_group(backend="gloo")

    def call(self, method: str, *args: Any) -> Any:
        import torch.distributed as dist

        dist.broadcast_object_list([(method, args)], src=0, group=self._calls)
        return getattr(self.rank, method)(*args)

    def serve(self) -> None:
        import threading

        import torch.distributed as dist

        while True:
            message: list[Any] = [None]
            dist.broadcast_object_list(message, src=0, group=self._calls)
            method, args = message[0]
            if method == "end":
                return
            getattr(self.rank, method)(*args)
            if method == "begin_save":
                threading.Thread(target=self._answer, daemon=True).start()

    def begin_save(self, files: Any) -> Callable[[], list[dict]]:
        self.call("begin_save", self.saved_roles, files)
        return self._answer

    def _answer(self) -> list[dict]:
        import torch.distributed as dist

        own = self.rank.finish_save()
        all_files: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_files, own, group=self._answers)
        return [entry for files in all_files for entry in files]

    def load(self, role: str, files: Any, what: Any, steps_added: int = 0) -> None:
        self.call("call", role, "load", files, what, steps_added)


def config(run_dir: str, model: str, world_size: int, **trainer: Any) -> Any:
    from trainer.config import Config

    cfg = Config()
    t = cfg.trainer
    t.run_dir, t.ckpt_path, t.export_path = run_dir, f"{run_dir}/checkpoints", f"{run_dir}/exports"
    t.num_workers, t.total_steps, t.train_batch_size, t.mini_batch_size = world_size, STEPS, 4, 2
    t.resume_mode, t.ckpt_interval, t.max_ckpts_to_keep = "latest", 2, 2
    t.policy.optimizer.lr = t.critic.optimizer.lr = 1e-3
    t.policy.optimizer.scheduler = "cosine"
    cfg.algorithm.advantage_estimator, cfg.algorithm.kl_coef, cfg.model.path = "gae", 0.0, model
    for name, value in trainer.items():
        setattr(t, name, value)
    return cfg


def experience(prompts: list[Any], step: int) -> dict[str, Any]:
    """A batch that depends on the prompts and the step: another prompt gives another loss."""
    import numpy as np

    from trainer.keyed import key

    rng = np.random.Generator(np.random.Philox(key=key(step, *[p.uid for p in prompts])))
    rows, width = 2 * len(prompts), 12
    mask = np.zeros((rows, width), np.float32)
    mask[:, 4:] = 1
    return {
        "input_ids": rng.integers(0, 256, (rows, width)),
        "mask": mask,
        "lengths": np.full(rows, width, np.int64),
        "group_ids": np.arange(rows) // 2,
        "rollout_logprobs": -5 * mask,
        "old_logprobs": -5 * mask,
        "values": rng.normal(size=(rows, width)).astype(np.float32),
        "returns": rng.normal(size=(rows, width)).astype(np.float32),
        "advantages": rng.normal(size=(rows, width)).astype(np.float32),
    }


def drive(cfg: Any, ranks: GroupRanks) -> None:
    """The loop of rank 0, as `trainer.loop` has it."""
    import random

    import torch

    from trainer.checkpoint.parts import json_part
    from trainer.data.datasets import Prompt
    from trainer.data.source import PromptSource
    from trainer.failpoints import failpoint
    from trainer.metrics.tracker import Tracker
    from trainer.run_directory import RunDirectory

    t = cfg.trainer
    state = {"step": 0}
    source = PromptSource([Prompt(i, f"prompt {i}", (i,), str(i)) for i in range(10)], t.seed)
    with RunDirectory(cfg).open() as directory:
        register = directory.parts.append
        register(directory.config_part())
        register(json_part("trainer_state", lambda: dict(state), state.update))
        register(json_part("data", source.state_dict, source.load_state_dict))
        register(directory.models_part(ranks))  # type: ignore[arg-type]
        audit = None
        if directory.resume:
            audit = directory.load()
        with Tracker(t.run_dir, cfg.logger, "killed", {}) as tracker:
            tracker.rewind(state["step"] if directory.resume else -1)
            directory.report(print)
            while state["step"] < t.total_steps:
                step = state["step"] + 1
                prompts = source.take(t.train_batch_size)
                batch = experience(prompts, step)
                metrics: dict[str, float] = {}
                for role in ("critic", "policy"):
                    result = ranks.call("call", role, "update", batch, step)
                    result = result if role == "critic" else result.metrics
                    metrics |= {f"{role}/{name}": value for name, value in result.items()}
                # What user code may draw: restored with every rank's generators.
                metrics["drawn/torch"], metrics["drawn/python"] = float(torch.rand(())), random.random()
                metrics["prompts/sum"] = sum(p.prompt.index for p in prompts)
                source.commit(prompts)
                state["step"] = step
                if audit and (problem := audit.check(step, metrics)):
                    raise AssertionError(problem)
                tracker.log(step, metrics)
                failpoint("logged")
                directory.report(print)
                if directory.schedule.due(step) or step == t.total_steps:
                    tracker.flush()
                    directory.save(step, metrics, ranks.saved_roles)
            target = os.path.join(t.export_path, "final")
            ranks.call("call", "policy", "write_weights", target, "float32")
            directory.finish(print)
    ranks.call_end()


def member(spec: dict[str, Any], rank_number: int) -> None:
    """One process of the job."""
    import torch.distributed as dist

    from trainer.workers.rank import Rank

    for name, value in spec.get("env", {}).items():
        os.environ[name] = value
    cfg = config(spec["run_dir"], spec["model"], spec["world_size"], **spec.get("trainer", {}))
    rank = Rank(cfg, rank_number, spec["world_size"], "cpu")
    rank.connect(f"127.0.0.1:{spec['port']}")
    ranks = GroupRanks(rank)
    rank.build(["policy", "critic"], spec["model"])
    if rank_number == 0:
        ranks.call_end = lambda: dist.broadcast_object_list([("end", ())], src=0, group=ranks._calls)  # type: ignore
        drive(cfg, ranks)
    else:
        ranks.serve()
    dist.barrier()
    dist.destroy_process_group()


def lead(spec: dict[str, Any]) -> int:
    """Fork the members into a process group of their own; their worst exit status."""
    os.setsid()
    output = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    children = []
    for number in range(spec["world_size"]):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                member(spec, number)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
    worst = 0
    for _ in children:
        _, status = os.wait()
        if status and not worst:
            worst = 1
            os.killpg(0, signal.SIGKILL)  # as a launcher does: one rank gone, all gone
    return worst


def serve_forks() -> None:
    import trainer.checkpoint.manager
    import trainer.run.replay
    import trainer.run_directory
    import trainer.workers.rank  # noqa: F401

    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(lead(json.loads(line)))
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(status, flush=True)


# ----------------------------------------------------------------------------------------------------------
# Outside


class Forks:
    """Starts jobs and kills them."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.killed_group"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).resolve().parents[2],
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n"

    def run(self, spec: dict[str, Any], kill_when: Callable[[float], bool] | None = None) -> bool:
        """Run a job; `kill_when(seconds)` is asked all the time and kills all of it at once. True: it finished.

        Raises:
            AssertionError: it failed by itself.
        """
        assert self._server.stdin is not None and self._server.stdout is not None
        import select
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._server.stdin.write(json.dumps({**spec, "port": port}) + "\n")
        self._server.stdin.flush()
        leader = int(self._server.stdout.readline())
        started, killed = time.monotonic(), False
        while not select.select([self._server.stdout], [], [], 0.002)[0]:
            seconds = time.monotonic() - started
            if kill_when is not None and not killed and kill_when(seconds):
                os.killpg(leader, signal.SIGKILL)
                killed = True
            assert seconds < 120, Path(spec["log"]).read_text()[-3000:]
        status = int(self._server.stdout.readline())
        assert killed or status == 0, Path(spec["log"]).read_text()[-3000:]
        return not killed

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(10)


if __name__ == "__main__":
    serve_forks()
