"""The command line: one sentence and an exit status for each way in which a job can end."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import pytest
import yaml

from tests.support.config import config_of
from tests.support.jobs import environment
from tests.support.namespaces import small_disk
from trainer.config import compose
from trainer.config.command_line import outcome_of, run_app, run_words
from trainer.errors import NonRetryableError, UserError, WorkerError
from trainer.main import _check_metrics, prepare, train
from trainer.process.signals import Stopped

TORCHLESS = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is not for this")
sys.meta_path.insert(0, Block())
from trainer.__main__ import main
sys.exit(main())
"""


def process(*words: str, code: str = TORCHLESS, cwd) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process that cannot import torch."""
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env=environment())


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as error:
        run_words(prepare, words)  # no cluster starts
    assert "\n" not in str(error.value)
    return str(error.value)


REFUSED = {
    "--cfg job -p algorthm": r"algorthm: no such key; did you mean algorithm\?$",
    "trainer.run_name=../../x": "trainer.run_name=../../x: must be a plain name",
    "trainer.allow_config_change=[nothing]": "trainer.allow_config_change=.*nothing: no such key",
    "trainer.run_dir=/dev/null/run": "trainer.run_dir=/dev/null/run: cannot be written",
    "trainer.best_metric=accuracy": "trainer.best_metric=accuracy: there is no such",
}


def test_what_no_run_can_do_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, sentence in REFUSED.items():
        assert re.search(sentence, refusal(*words.split())), words
        assert os.listdir(tmp_path) in ([], ["outputs"]) and not list(tmp_path.glob("outputs/*")), words


UNMEASURED = {
    "trainer.best_metric=val/pass@k": "val/pass@k: is not measured with rollout.val_n=0$",
    "trainer.best_metric=val/pass@8 rollout.val_n=4": "val/pass@8: is not measured with rollout.val_n=4$",
    "trainer.best_metric=val/math/accuracy": "there is no validation set math; data.val_sets names none$",
    "trainer.best_metric=val/math/pass@4 data.val_sets.math.files=[a.jsonl]": "pass@4: is not measured with data.val_",
}


def test_metrics_that_a_run_does_not_measure_are_refused():
    for words, sentence in UNMEASURED.items():
        with pytest.raises(UserError, match=sentence):
            _check_metrics(config_of(words.split()))


def test_wrong_words_end_a_process_with_one_sentence_and_status_2(tmp_path):
    done = process("train", "trainer.nub_workers=2", cwd=tmp_path)
    sentence = "error: trainer.nub_workers: no such key; did you mean trainer.num_workers?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)
    assert os.listdir(tmp_path) == []


def test_the_config_is_printed_without_torch(tmp_path, monkeypatch, capsys):
    done = process("train", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0 and yaml.safe_load(done.stdout) == dataclasses.asdict(compose([])), done.stderr
    assert os.listdir(tmp_path) == []

    def shown(*words: str) -> str:
        run_words(train, words)
        return capsys.readouterr().out

    for flags in (["--cfg", "job", "-p", "algorithm"], ["--cfg=job", "--package=algorithm"]):
        section = yaml.safe_load(shown("algorithm.policy_loss=gspo", *flags))
        assert (section["policy_loss"], section["clip_high"]) == ("gspo", None), (flags, "the default of the loss")
    assert shown("--cfg", "job", "-p", "trainer.policy.optimizer.lr") == "0.0004\n", "resolved"
    files = ["--cfg", "job", "-p", "data.synthetic", "data.train_files=[a.jsonl]", "trainer.val_interval=-1"]
    assert shown(*files) == "null\n", "data=files"


def test_help_names_groups_choices_and_sections(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trainer train", "trainer.seed=1", "--help"])
    run_app(train)
    text = capsys.readouterr().out
    assert text.startswith("usage: trainer train ") and re.search(r"\n  rollout: .*vllm\n", text)
    assert "(trainer, algorithm, model, data, reward, " in text


def test_the_outcome_says_how_a_job_ended():
    for error, status, text in (
        (UserError("x=1: mend it"), 2, "error: x=1: mend it"),
        (WorkerError("rank 1 died"), 1, "error: rank 1 died"),
        (MemoryError(), 1, "error: the driver has no memory left (MemoryError); lower trainer.train_batch_size"),
        (KeyboardInterrupt(), 75, "stopped by an interrupt; the last checkpoint is unchanged"),
        (Stopped("stopped after step 3"), 75, "stopped after step 3"),
        (RuntimeError("a bug"), 1, "RuntimeError: a bug\nerror: RuntimeError: a bug"),
        (NonRetryableError("a loss raises"), 3, "error: a loss raises"),
        (SystemExit(3), 3, ""),
    ):
        outcome = outcome_of(error)
        assert outcome.status == status and text in outcome.shown, error


ENDING = """
import os, signal, sys
from trainer.config.command_line import run_app
from trainer.process.signals import SIGNALS
def job(cfg):
    if cfg.trainer.seed == 1:
        raise RuntimeError("a bug")
    os.kill(os.getpid(), signal.SIGTERM)
    SIGNALS.check()
run_app(job, trains=sys.argv[1] != "trainer.seed=3")
"""


def test_a_bug_ends_a_process_with_status_1_and_a_signal_with_75(tmp_path):
    done = process("trainer.seed=1", code=ENDING, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" in done.stderr
    done = process("trainer.seed=2", code=ENDING, cwd=tmp_path)
    assert done.returncode == 75, done.stderr
    more = " before the first step of this start, so nothing is lost; the same command with "
    assert (done.stdout + done.stderr).startswith(f"stopped by SIGTERM{more}")
    done = process("trainer.seed=3", code=ENDING, cwd=tmp_path)
    assert (done.returncode, done.stdout + done.stderr) == (75, "stopped by SIGTERM\n"), "it does not train"


SWEEP = """
import logging
from trainer.config.command_line import run_app
def job(cfg):
    logging.getLogger("matplotlib").info("generated new fontManager")
    logging.getLogger("matplotlib").warning("a font is missing")
    print("seed", cfg.trainer.seed, "in", cfg.trainer.run_dir, cfg.algorithm.clip_high)
run_app(job)
"""


def test_each_job_of_a_sweep_names_its_directory(tmp_path):
    """And what libraries log is not shown unless it is a warning."""
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm/mine.yaml").write_text("clip_high: 0.33\n")
    (tmp_path / "own.yaml").write_text("defaults: [{algorithm: mine}]\n")
    words = ["trainer.seed=1,2", "-m", "rollout.n=4", "--config", "own.yaml"]
    done = process(*words, code=SWEEP, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "outputs/default/trainer.seed=1\nseed 1 in outputs/default/trainer.seed=1 0.33\n" in done.stdout
    assert "outputs/default/trainer.seed=2\nseed 2 in outputs/default/trainer.seed=2 0.33\n" in done.stdout
    assert done.stderr == "a font is missing\n" * 2


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


def test_a_full_disk_of_the_run_directory_is_one_sentence_with_status_1(tmp_path):
    step, file = 2, "metrics.jsonl"
    with small_disk("1m") as disk:
        overrides = [f"trainer.run_dir={disk}", f"trainer.total_steps={step}"]
        command = [sys.executable, "-c", WRITING, *overrides]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 1, done.stderr
    assert done.stderr == (
        f"error: {disk}/{file}: cannot be written (No space left on device); make room on the disk (or in a quota, or "
        "`ulimit -f`), or repair it, and then the same command with trainer.resume_mode=latest continues the run\n"
    )
