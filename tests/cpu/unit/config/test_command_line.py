"""The command line answers wrong input with one sentence and status 2, without importing torch."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import pytest
import yaml

from tests.support.forks import run_forked
from tests.support.jobs import environment
from tests.support.namespaces import small_disk
from trainer.config import compose

TORCHLESS = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is not for this")
sys.meta_path.insert(0, Block())
from trainer.config.command_line import run_app
from trainer.main import train
run_app(train)
"""


def without_torch(*overrides: str, cwd) -> subprocess.CompletedProcess[str]:
    """The command line of `trainer train` in a process that cannot import torch."""
    command = [sys.executable, "-c", TORCHLESS, *overrides]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env=environment())


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (["trainer.nub_workers=2"], r"trainer.nub_workers: no such key; did you mean trainer.num_workers"),
        (["total_steps=10"], r"total_steps: no such key; did you mean trainer.total_steps\?$"),
        (["rollout.total_steps=10"], r"rollout.total_steps: no such key; did you mean trainer.total_steps\?$"),
        (["algoritm=ppo"], r"algoritm: no such key; did you mean algorithm\?$"),
        (["experment=smoke"], r"experment: no such key; did you mean experiment, or logger.mlflow.experiment\?$"),
        (["trainer.total_steps"], "trainer.total_steps: has no value; write KEY=VALUE or GROUP=CHOICE$"),
        (["--cfg", "job", "-p", "algorthm"], r"algorthm: no such key; did you mean algorithm\?$"),
        (["--cfg", "job", "rollout.m=2"], "rollout.m: no such key; docs/config.md lists the keys of rollout$"),
        (
            ["algorithm.beta=2"],
            r"beta: no such key; in place of .*; an option of .* task is \+algorithm.options.beta=VALUE$",
        ),
        (["algorithm.clip_hihg=2"], r"algorithm.clip_hihg: no such key; did you mean [^;]*$"),
        (["nothing=2"], "nothing: no such key; valid are trainer, algorithm"),
        (["trainer.num_workers=two"], "trainer.num_workers=two: must be a whole number$"),
        (["data.train_files=a.jsonl"], r"data.train_files: must be a list; write data.train_files=\[a.jsonl\]$"),
        (["reward.weights=1"], r"reward.weights: must be a list; write reward.weights=\[1\]$"),
        (["--trainer.seed=5"], "--trainer.seed=5: keys have no dashes before them; write trainer.seed=5$"),
        (["--total_steps", "5"], "--total_steps: keys have no dashes before them; write total_steps=VALUE$"),
        (["algorithm.options.mine=2"], r"algorithm.options.mine: .* write \+algorithm.options.mine=VALUE"),
        (["+trainer.nub_workers=2"], r"trainer.nub_workers: no such key; did you mean trainer.num_workers"),
        (
            ["+lr=1e-5"],
            "lr: no such key; did you mean trainer.policy.optimizer.lr, or trainer.critic.optimizer.lr, or ",
        ),
        (["+trainer.policy.lora.extra={x: 1}"], "trainer.policy.lora.extra: no such key; valid are .*lora.rank"),
        (["+nothing=2"], "nothing: no such key; valid are trainer, algorithm"),
        (["algorithm=grop"], r"algorithm=grop: no such choice; did you mean grpo\?$"),
        (["model=Qwen/Qwen3-0.6B"], "model=Qwen/Qwen3-0.6B: no such choice; write model.path=Qwen/Qwen3-0.6B$"),
        (["data=b.jsonl"], r"choose one of arithmetic.*, or write data=files data.train_files=\[b.jsonl\]$"),
        (["reward=mine:good"], "reward=mine:good: reward is a section; its keys are reward.name, .*reward.weights"),
        (["trainer.policy=x"], "trainer.policy=x: trainer.policy is a section; its keys are .*trainer.policy.lora"),
        (["experiment=nothing"], "experiment=nothing: no such choice; choose one of gsm8k.*, smoke$"),
        (["trainer.run_name=../../x"], "trainer.run_name=../../x: must be a plain name"),
        (["trainer.allow_config_change=[nothing]"], "trainer.allow_config_change=.*no key or section nothing"),
        (
            ["trainer.total_steps=9", "trainer.profile=[2,10]"],
            r"trainer.profile=\[2, 10\]: the run ends with step 9, before step 10; choose steps of the run$",
        ),
        (["trainer.run_dir=/dev/null/run"], "trainer.run_dir=/dev/null/run: cannot be written"),
        (["trainer.run_dir=x", "trainer.best_metric=accuracy"], "trainer.best_metric=accuracy: there is no such"),
        (
            ["trainer.run_dir=x", "trainer.best_metric=val/pass@k"],
            "val/pass@k: .* rollout.val_n=0; set rollout.val_n to",
        ),
        (["trainer.run_dir=x", "trainer.best_metric=val/pass@k", "rollout.val_n=4"], "; name val/pass@4$"),
        (["trainer.run_dir=x", "trainer.best_metric=val/pass@8", "rollout.val_n=4"], "; name val/pass@4$"),
        (
            ["trainer.run_dir=x", "trainer.best_metric=val/math/accuracy"],
            "trainer.best_metric=val/math/accuracy: there is no validation set math; data.val_sets names none$",
        ),
        (
            ["trainer.run_dir=x", "trainer.best_metric=val/math/pass@4", "data.val_sets.math.files=[a.jsonl]"],
            "pass@4: is not measured with data.val_sets.math.n=1; the set measures accuracy, avg@1, failures$",
        ),
        (
            ["trainer.run_dir=x", "+trainer.divergence_limits={a: 1}"],
            "trainer.divergence_limits=a: there is no such metric",
        ),
    ],
)
def test_wrong_input_is_refused_with_status_2(overrides, sentence, tmp_path):
    (tmp_path / "deep").mkdir()
    done = run_forked("trainer", ["train", *overrides], tmp_path / "deep", environment(), timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ") and re.search(sentence, line), done.stderr
    assert [p.name for p in tmp_path.rglob("*")] == ["deep"]


def test_all_wrong_keys_of_a_command_are_listed(tmp_path):
    done = without_torch("trainer.sed=2", "rollout.n=2", "algorithm=ppo", "reward.nme=math", cwd=tmp_path)
    assert done.returncode == 2
    headline, first, second = done.stderr.splitlines()
    assert headline == "error: the command has wrong keys:"
    assert first == "  trainer.sed: no such key; did you mean trainer.seed, or model.tiny.seed?"
    assert second.startswith("  reward.nme: no such key; did you mean reward.name, or ")
    for first_wrong in ("model=Qwen/Qwen3-0.6B", "reward=mine:good"):
        done = without_torch(first_wrong, "seed=2", "lr=1e-5", cwd=tmp_path)
        headline, first, *others = done.stderr.splitlines()
        assert headline == "error: the command has wrong keys:" and first.startswith(f"  {first_wrong}: ")
        assert [line.split(":")[0] for line in others] == ["  seed", "  lr"]


def test_the_config_is_printed_without_torch(tmp_path):
    done = without_torch("--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0 and yaml.safe_load(done.stdout) == dataclasses.asdict(compose([]))
    for flags in (
        ["--cfg", "job", "-p", "algorithm"],
        ["--cfg=job", "--package=algorithm"],
        ["-c", "job", "--resolve"],
    ):
        done = without_torch("algorithm.policy_loss=gspo", *flags, cwd=tmp_path)
        printed = yaml.safe_load(done.stdout)
        section = printed.get("algorithm", printed)
        assert (section["clip_high"], section["aggregation"]) == (4e-4, "seq_mean_token_mean"), flags
    done = without_torch("--cfg", "job", "-p", "trainer.policy.optimizer.lr", cwd=tmp_path)
    assert done.stdout == "0.0004\n", "resolved"
    files = ["--cfg", "job", "-p", "data.synthetic", "data.train_files=[a.jsonl]", "trainer.val_interval=-1"]
    assert without_torch(*files, cwd=tmp_path).stdout == "null\n", "data=files"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_groups_choices_and_sections(flag, tmp_path):
    done = without_torch("trainer.seed=1", flag, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert "  rollout: server, transformers, vllm\n" in done.stdout
    sections = "trainer, algorithm, model, data, reward, environment, rollout, inference, sft, logger, plan"
    assert f"({sections})" in done.stdout


@pytest.mark.parametrize(
    "ending, status, text",
    [
        ("pass", 0, ""),
        ("raise UserError('x=1: mend it')", 2, "error: x=1: mend it\n"),
        ("raise WorkerError('rank 1 died')", 1, "error: rank 1 died\n"),
        ("raise MemoryError", 1, "error: the driver has no memory left (MemoryError); lower trainer.train_batch_size"),
        ("raise KeyboardInterrupt", 75, ""),
        ("raise RuntimeError('a bug')", 1, "Traceback"),
        ("sys.exit(3)", 3, ""),
    ],
)
def test_the_exit_status_says_how_the_job_ended(ending, status, text, tmp_path):
    code = (
        "import sys\n"
        "from trainer.config.command_line import run_app\n"
        "from trainer.errors import UserError, WorkerError\n"
        f"def job(cfg):\n    {ending}\n"
        "run_app(job)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.returncode == status and text in done.stderr, done.stderr
    assert bool(done.stderr) == bool(text)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("trains", [True, False])
def test_only_a_command_that_trains_is_said_to_continue(tmp_path, trains):
    code = (
        "import os, signal\n"
        "from trainer.config.command_line import run_app\n"
        "from trainer.process.signals import SIGNALS\n"
        "def job(cfg):\n    os.kill(os.getpid(), signal.SIGTERM)\n    SIGNALS.check()\n"
        f"run_app(job, trains={trains})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.returncode == 75, done.stderr
    more = " before the first step of this start, so nothing is lost; the same command with "
    said = done.stdout + done.stderr
    assert said.startswith(f"stopped by SIGTERM{more}") if trains else said == "stopped by SIGTERM\n"


def test_each_job_of_a_sweep_names_its_directory(tmp_path):
    code = (
        "from trainer.config.command_line import run_app\n"
        "def job(cfg): print('seed', cfg.trainer.seed, 'in', cfg.trainer.run_dir)\n"
        "run_app(job)\n"
    )
    command = [sys.executable, "-c", code, "-m", "trainer.seed=1,2", "rollout.n=4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr
    assert "outputs/default/trainer.seed=1\nseed 1 in outputs/default/trainer.seed=1\n" in done.stdout
    assert "outputs/default/trainer.seed=2\nseed 2 in outputs/default/trainer.seed=2\n" in done.stdout


def test_what_libraries_log_is_not_shown_unless_it_is_a_warning(tmp_path):
    code = (
        "import logging\n"
        "from trainer.config.command_line import run_app\n"
        "def job(cfg):\n"
        "    logging.getLogger('matplotlib').info('generated new fontManager')\n"
        "    logging.getLogger('matplotlib').warning('a font is missing')\n"
        "run_app(job)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment()
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "a font is missing\n")


WRITING = """
import os, sys
from trainer.config.command_line import run_app
from trainer.config.schema import LoggerConfig
from trainer.files.atomic_io import write_file
from trainer.metrics.samples import Transcript, write_validation
from trainer.metrics.tracker import Tracker

def job(cfg):
    if cfg.trainer.total_steps == 1:
        prompt = [{"role": "user", "content": "x" * 2**20}]
        write_validation(cfg.trainer.run_dir, 1, [Transcript("val:0", 0, prompt, [], "a", 1.0)])
    tracker = Tracker(cfg.trainer.run_dir, LoggerConfig(), {})
    with open(f"{cfg.trainer.run_dir}/rest", "wb", buffering=0) as rest:
        try:
            while rest.write(b"x" * 4096):
                pass
        except OSError:
            pass
    tracker.log(1, {"reward/mean": 1.0})
    tracker.flush()

run_app(job)
"""


@pytest.mark.parametrize("step, file", [(1, "validation/step_1.jsonl"), (2, "metrics.jsonl")])
def test_a_full_disk_of_the_run_directory_is_one_sentence_with_status_1(step, file, tmp_path):
    with small_disk("1m") as disk:
        overrides = [f"trainer.run_dir={disk}", f"trainer.total_steps={step}"]
        command = [sys.executable, "-c", WRITING, *overrides]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 1, done.stderr
    assert done.stderr == (
        f"error: {disk}/{file}: cannot be written (No space left on device); free space on the disk, or repair it, "
        "and then the same command with trainer.resume_mode=latest continues the run\n"
    )
