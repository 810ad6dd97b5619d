"""`train` from Python: what needs no model."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
import torch

import trainer
from tests.support.jobs import environment
from tests.support.jobs import metrics as metrics_of
from trainer import RunFailed, RunStopped, UserError, train
from trainer.algorithms import aggregate
from trainer.api.running import _conclude, _words
from trainer.process.signals import HANDLED
from trainer.rewards.functions import gsm8k
from trainer.tasks import Metric, Task, TaskSpec

PATHS = {"run_dir": "run", "ckpt_path": "run/checkpoints", "export_path": "run/exports"}


@pytest.mark.parametrize(
    "reports, status, kind, text",
    [
        ([{"text": "a key is wrong"}], 2, UserError, "^a key is wrong$"),
        ([PATHS, {"text": "a key is wrong"}], 2, UserError, "^a key is wrong$"),
        ([], 2, RunFailed, "^its process ended with status 2$"),
        ([PATHS], 2, RunFailed, "^its process ended with status 2$"),
        ([PATHS, {"text": "a rank died"}], 1, RunFailed, "^a rank died$"),
        ([PATHS, {"text": "step 3 saved"}], -9, RunFailed, "was killed by SIGKILL, perhaps because memory ran out"),
        ([], 0, RunFailed, "^its process ended with status 0$"),
        ([{"text": "stopped early"}], 75, RunStopped, "^stopped early$"),
        ([], 75, RunStopped, "^stopped by signals, without cleaning up$"),
    ],
)
def test_the_end_of_the_process_says_how_the_run_ended(reports, status, kind, text):
    with pytest.raises(kind, match=text):
        _conclude(reports, status)


@pytest.mark.parametrize(
    "arguments, options, sentence",
    [
        ("algorithm=ppo", {}, "overrides='algorithm=ppo': must be a list of texts"),
        (["-m"], {}, "-m: must be KEY=VALUE; flags such as -m are for the command line"),
        (["reward.name=math"], {"reward": "math"}, "reward.name: the overrides and reward= both set it"),
        ([], {"policy_loss": 3}, "policy_loss: must be a function or the name of one, not int"),
        (["trainer.task=rl"], {"task": "sft"}, "trainer.task: the overrides and task= both set it"),
    ],
)
def test_wrong_arguments_are_refused_before_a_process_starts(arguments, options, sentence):
    with pytest.raises(UserError) as refused:
        train(arguments, **options)
    assert sentence in str(refused.value)


def test_a_refused_config_raises_and_prints_nothing(tmp_path, monkeypatch, capfd):
    """On the main thread, and on another one."""
    monkeypatch.chdir(tmp_path)
    handlers = [signal.getsignal(number) for number in HANDLED]
    logger = logging.getLogger("trainer")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with pytest.raises(UserError, match="trainer.nub_workers: no such key; did you mean trainer.num_workers"):
        train(["trainer.nub_workers=2"])
    errors = []

    def call():
        try:
            train(["+environment.kwargs={api_key:hush,n:"])
        except UserError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(errors) == 1 and re.search("kwargs=.*cannot be read.*write KEY=VALUE", errors[0])
    assert capfd.readouterr() == ("", "")
    assert [signal.getsignal(number) for number in HANDLED] == handlers
    assert (logger.level, logger.propagate, logger.handlers) == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(HANDLED) == set()
    assert os.listdir(tmp_path) == []


def test_a_reward_that_cannot_be_imported_is_refused_in_its_process(tmp_path, monkeypatch):
    """`passed_functions` is written and imported before anything expensive starts."""
    monkeypatch.chdir(tmp_path)

    class Fragile:
        def __call__(self, completion, answer):
            return 0.0

        def __setstate__(self, state):
            raise ValueError("not here")

        def __getstate__(self):
            return {"x": 1}

    with pytest.raises(UserError, match=r"reward.name=passed_functions.\w+:\w+: cannot be imported .*not here"):
        train(["trainer.run_dir=run", "rollout=transformers"], reward=Fragile())


def test_a_task_is_passed_by_value(tmp_path):
    """Its process knows the task before the config, which names it, is composed."""

    def build(cfg):
        def refuse(*, asks_servers):
            raise UserError(f"refused by {cfg.trainer.task}: {cfg.total_steps} steps, compared by {cfg.compared_by}")

        return Task(cfg, source=lambda given: None, check_inputs=refuse)

    metrics = {"my/loss": Metric("A loss.", "nats", "min")}
    task = TaskSpec(build, total_steps="sft.steps", best="my/loss", metrics=metrics)
    sentence = r"^refused by passed_functions.task:task: 7 steps, compared by \('my/loss', 'min'\)$"
    with pytest.raises(UserError, match=sentence):
        train([f"trainer.run_dir={tmp_path}/run", "sft.steps=7"], task=task)


STOPPED = """
import os, signal, sys, threading, time
from trainer import RunStopped, train

def send():
    while not os.path.exists("ready"):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=send, daemon=True).start()
class SlowToImport:
    def __reduce__(self):
        return eval, ("__import__('pathlib').Path('ready').touch() or __import__('time').sleep(600)",)
    def __call__(self, completion, answer):
        return 0.0
try:
    train(["trainer.run_dir=run", "rollout=transformers"], reward=SlowToImport())
except RunStopped as stopped:
    print("stopped:", stopped, stopped.result.status, os.path.basename(stopped.result.run_dir))
"""


def test_a_signal_to_the_script_stops_the_run(tmp_path):
    """SIGTERM arrives while the process of the run imports the reward, which would take ten minutes."""
    (tmp_path / "script.py").write_text(STOPPED)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stopped: stopped by SIGTERM" in done.stdout and done.stdout.endswith("stopped run\n")
    assert done.stderr == ""


def test_names_are_imported_lazily():
    code = (
        "import sys, trainer\n"
        "assert not {'torch', 'hydra', 'ray', 'pandas'} & set(sys.modules)\n"
        "assert 'trainer.api' not in sys.modules\n"
        "from trainer import train, load_checkpoint, read_metrics\n"
        "assert not {'torch', 'hydra', 'ray', 'pandas'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    assert {"train", "load_checkpoint", "RunStopped"} <= set(dir(trainer))
    assert issubclass(RunFailed, RuntimeError) and issubclass(RunStopped, Exception)
    with pytest.raises(AttributeError, match="module trainer has no attribute nothing"):
        _ = trainer.nothing


def test_several_rewards_are_a_list_of_their_own():
    def length(completion, answer):
        return float(len(completion))

    overrides, pickles = _words([], {"reward": [gsm8k, length, "math"]})
    assert overrides == ["reward.name=[trainer.rewards.functions:gsm8k,passed_functions.reward_1:length,math]"]
    assert list(pickles) == ["reward_1"] and pickles["reward_1"][0] == "length"


def test_a_callback_gets_each_step_and_stops_the_run_which_continues(tmp_path):
    """It stops after step 1 by what it returns, after step 2 by an exception."""
    overrides = [f"trainer.run_dir={tmp_path}/run", "trainer.ray_address=processes", "trainer.resume_mode=latest"]
    overrides += ["model.cache_dir=null", "data.train_size=16", "data.val_size=4", "sft.steps=3", "logger.plot=false"]
    seen = []

    def on_step(metrics):
        seen.append(metrics)
        if metrics["step"] == 2:
            raise KeyError("the second step")
        return metrics["step"] == 1

    result = train(overrides, task="sft", on_step=on_step)
    assert result.status == "stopped" and [os.path.basename(path) for path in result.checkpoints] == ["global_step_1"]
    with pytest.raises(KeyError, match="the second step"):
        train(overrides, task="sft", on_step=on_step)
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in seen] == [row["step"] for row in rows] == [1, 2]
    assert all(row.items() <= metrics.items() for row, metrics in zip(rows, seen, strict=True))


LOSSES: list[tuple[int, str]] = []


def recorded_loss(logprobs, old_logprobs, advantages, mask, *, aggregation, totals):
    LOSSES.append((os.getpid(), threading.current_thread().name))
    return aggregate(-(logprobs - old_logprobs).exp() * advantages, mask, aggregation, totals), {}


def test_a_run_in_this_process_computes_the_same_and_leaves_nothing_behind(tmp_path):
    common = ["trainer.total_steps=3", "trainer.train_batch_size=4", "trainer.mini_batch_size=4", "rollout.n=2"]
    common += ["rollout.max_response_tokens=12", "data.train_size=16", "data.val_size=4", "sft.steps=4"]
    common += ["model.tiny.hidden_size=32", "model.tiny.num_layers=1", "logger.plot=false"]
    plain = ["trainer.ray_address=processes", "rollout=transformers", f"trainer.run_dir={tmp_path}/plain"]
    expected = train([*common, *plain, f"model.cache_dir={tmp_path}/cache"], policy_loss=recorded_loss)
    assert LOSSES == []
    # The other cache is empty, so the warm start runs here, too.
    here = [*common, f"trainer.run_dir={tmp_path}/here", f"model.cache_dir={tmp_path}/other"]
    options = {"policy_loss": recorded_loss, "in_process": True}
    environ, handlers = dict(os.environ), [signal.getsignal(number) for number in HANDLED]
    logger = logging.getLogger("trainer")
    log = logger.level, logger.propagate, list(logger.handlers)
    with pytest.raises(UserError, match="rollout.ahead=1: choose 0: trainer.ray_address=this_process has one rank"):
        train([*here, "rollout.ahead=1"], **options)
    assert train(here, on_step=lambda metrics: metrics["step"] == 2, **options).status == "stopped"
    result = train([*here, "trainer.resume_mode=latest"], **options)
    assert result.status == "finished" and {pid for pid, _ in LOSSES} == {os.getpid()}
    assert os.environ == environ and [signal.getsignal(number) for number in HANDLED] == handlers
    assert (logger.level, logger.propagate, logger.handlers) == log
    assert not torch.distributed.is_initialized()
    for ours, theirs in zip(result.rows, expected.rows, strict=True):
        same = {name for name in theirs if not name.startswith(("time/", "perf/", "journal/"))}
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
