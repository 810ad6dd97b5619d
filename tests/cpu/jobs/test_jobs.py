"""Whole jobs from the command line, on plain processes of this machine."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.evaluations import evaluate, validation_of
from tests.support.jobs import (
    comparable,
    left_in_shared_memory,
    left_running,
    metrics,
    run_forked_job,
    shared_memory,
    wait_until,
)
from trainer.checkpoint.__main__ import main as checkpoint_command
from trainer.view.build import Builder, Limits
from trainer.view.episodes import find_steps, read_step

pytestmark = [pytest.mark.early, pytest.mark.slow, pytest.mark.timeout(600)]

STEP_METRICS = {
    "reward/mean", "reward/std", "reward/zero_std_frac", "response_length/mean", "response_length/max",
    "response_length/clip_ratio", "policy/loss", "policy/kl", "policy/clip_frac", "policy/entropy",
    "policy/grad_norm", "policy/lr", "rollout/logprob_diff_mean", "rollout/logprob_diff_max", "time/step",
    "time/rollout", "time/reward", "time/logprob", "time/update", "time/sync", "perf/tokens_per_s",
    "perf/samples_per_s", "perf/sync_gb_per_s", "progress/epoch", "progress/prompts", "progress/samples",
    "progress/tokens",
}  # fmt: skip


@pytest.mark.release
def test_a_sweep_leaves_complete_run_directories_and_nothing_else(tmp_path, marker):
    """PPO and DAPO, one after the other, as `-m` runs them, with a loss of our own that is 0.

    DAPO draws further prompts. Tokens are weighed by the engine's mismatch.
    """
    memory = shared_memory()
    (tmp_path / "own.py").write_text(OWN_LOSS)
    done = run_forked_job(
        "-m",
        "algorithm=ppo,dapo",
        "algorithm.rollout_correction=tis",
        "algorithm.policy_loss=own:loss",
        "+algorithm.options.factor=0",
        "reward.name=tests.cpu.jobs.test_jobs:starts_with_a_vowel",
        "rollout.val_n=2",
        "rollout.max_response_tokens=8",
        "logger.plot=true",
        cwd=tmp_path,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    dapo, ppo = runs = sorted((tmp_path / "outputs/default").glob("*algorithm=*"))
    assert ["algorithm=dapo" in dapo.name, "algorithm=ppo" in ppo.name] == [True, True]
    for run in runs:
        rows = metrics(run)
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert set(rows[2]) >= STEP_METRICS | {
            "val/accuracy",
            "val/reward/mean",
            "val/pass@2",
            "time/checkpoint_blocked",
        }
        for row in rows[1:]:
            assert row["rollout/logprob_diff_max"] < 1e-4 and row["rollout_is/clip_frac"] == 0
            assert row["rollout/ess"] == pytest.approx(1.0, abs=1e-4)
            assert row["policy/loss"] == 0, "the loss of our own was not used, or did not get its option"
        assert (rows[2]["progress/prompts"], rows[2]["progress/samples"]) == (16, 64)
        assert (run / "report.png").stat().st_size > 10_000
        checkpoint = run / "checkpoints/global_step_2"
        for name in ("manifest.json", "config.yaml", "trainer_state.json", "data.json", "policy/.metadata",
                     "policy/__0_0.distcp", "policy/fsdp_config.json", "policy/huggingface/config.json",
                     "policy/huggingface/tokenizer.json"):  # fmt: skip
            assert (checkpoint / name).exists(), name
        assert (run / "checkpoints/latest_ckpt_global_step.txt").read_text().strip() == "2"
    drawn = metrics(dapo)[1:]
    assert all(row["sampling/batches"] > 1 and row["sampling/filtered"] > 0 for row in drawn)
    passed_over = sum(8 + row["sampling/filtered"] for row in drawn)
    assert drawn[-1]["progress/epoch"] == passed_over / 64, "the ledger counts what was passed over, and nothing twice"
    assert (ppo / "checkpoints/global_step_2/critic/__0_0.distcp").exists()
    assert {"critic/loss", "critic/explained_variance", "critic/grad_norm"} <= set(metrics(ppo)[1])
    evaluated = evaluate(ppo, "--step=2", cwd=tmp_path)
    assert evaluated["metrics"] == validation_of(ppo, 2), "the run's own validation, to the last bit"
    assert left_running(marker) == []
    wait_until(lambda: left_in_shared_memory(memory) == set())


OWN_LOSS = """
from trainer.algorithms import POLICY_LOSSES


def loss(logprobs, old_logprobs, advantages, mask, *, factor=1.0, aggregation="token_mean", totals=None):
    value, metrics = POLICY_LOSSES["clip"](
        logprobs, old_logprobs, factor * advantages, mask, aggregation=aggregation, totals=totals
    )
    return value, metrics
"""


def starts_with_a_vowel(completion: str, answer: str) -> float:
    """A reward that most groups of four agree on."""
    return float(completion[:1] in "aeiou")


WHOLE = ["trainer.total_steps=3", "algorithm=ppo", "trainer.policy.optimizer.scheduler=constant",
         "trainer.val_interval=-1"]  # fmt: skip


class Run(NamedTuple):
    """A run that has ended, in the directory of its job."""

    directory: Path
    output: str

    @property
    def start(self) -> str:
        """The model from which it has started."""
        return re.search(r"run whole in .*?: (\S+),", self.output).group(1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    """A run of three steps on two ranks. No test changes it."""
    cwd = tmp_path_factory.mktemp("jobs")
    job = [*WHOLE, "trainer.run_name=whole", "trainer.num_workers=2", "trainer.hf_save_interval=3"]
    done = run_forked_job(*job, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(cwd / "outputs/whole", done.stdout)


def test_a_fork_continues_another_run_on_another_number_of_ranks(whole, tmp_path, capsys):
    """The same prompts and, to rounding, the same losses; and it comes back as itself."""
    expected = comparable(metrics(whole.directory))
    again = run_forked_job(*WHOLE, f"trainer.run_dir={whole.directory}", cwd=tmp_path)
    assert again.returncode == 2 and "trainer.resume_mode=latest" in again.stderr, "an old run was to be overwritten"

    parent = str(whole.directory / "checkpoints/global_step_1")
    fork = [*WHOLE, "trainer.run_dir=fork", "trainer.resume_mode=from_path", f"trainer.resume_path={parent}"]
    done = run_forked_job(*fork, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path / "fork")
    assert [row["step"] for row in rows] == [2, 3]
    for name in ("policy/loss", "policy/kl", "policy/grad_norm", "critic/loss", "reward/mean", "progress/tokens"):
        assert rows[0][name] == pytest.approx(expected[1][name], rel=1e-4, abs=1e-5), name
    state = json.loads((tmp_path / "fork/checkpoints/global_step_3/manifest.json").read_text())["parent"]
    assert state["forked_from"] == parent and state["step"] == 1

    # Rolled back and restarted with the same command, it continues from its own checkpoint, not from the parent's.
    assert tool(capsys, "rollback", str(tmp_path / "fork"), "--to", "2", "--json")["step"] == 2
    assert tool(capsys, "rollback", str(tmp_path / "fork"), "--to", "3", status=2) == ""
    done = run_forked_job(*fork, cwd=tmp_path)
    assert done.returncode == 0 and "resume verified: 1 replayed step identical" in done.stdout, done.stdout
    assert comparable(metrics(tmp_path / "fork")) == comparable(rows)
    assert [row["valid"] for row in tool(capsys, "verify", str(tmp_path / "fork"), "--json")] == [True, True]
    (tmp_path / "fork/checkpoints/global_step_3/data.json").write_text("{}")
    assert tool(capsys, "verify", str(tmp_path / "fork"), status=1).count("DAMAGED: data.json has 2 bytes") == 1


def test_an_export_is_the_trained_policy(whole, tmp_path, capsys):
    """The one of the run, and the one that `trainer checkpoint export` makes of its checkpoint."""
    run, export = whole.directory, whole.directory / "exports/global_step_3/policy"
    model, before = (AutoModelForCausalLM.from_pretrained(path) for path in (export, whole.start))
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    assert any(not torch.equal(trained, first) for trained, first in pairs)
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert tokenizer.chat_template
    listed = tool(capsys, "ls", str(run), "--json")["checkpoints"]
    assert [(row["step"], row["ranks"], row["valid"]) for row in listed] == [(step, 2, True) for step in (1, 2, 3)]
    state = json.loads((run / "checkpoints/global_step_3/trainer_state.json").read_text())
    assert state["step"] == 3 and state["counters"]["prompts"] == 24
    last, copy = str(run / "checkpoints/global_step_3"), str(tmp_path / "by_tool")
    exported = tool(capsys, "export", str(run), copy, "--max-file-gb", "0.0006", "--json")
    assert exported["checkpoint"] == last
    assert len(exported["files"]) > 1, "one file held more than it was to"
    by_tool = AutoModelForCausalLM.from_pretrained(copy)
    for ours, theirs in zip(by_tool.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert AutoTokenizer.from_pretrained(copy).chat_template == tokenizer.chat_template
    assert tool(capsys, "export", last, copy, status=2) == ""
    assert tool(capsys, "ls", str(tmp_path), status=2) == ""
    assert tool(capsys, "verify", str(tmp_path / "global_step_9"), status=2) == ""


def tool(capsys, *args: str, status: int = 0) -> Any:
    """What `trainer checkpoint` prints, as JSON with `--json`."""
    capsys.readouterr()
    found = checkpoint_command(list(args))
    printed = capsys.readouterr()
    assert found == status, printed.out + printed.err
    return json.loads(printed.out) if "--json" in args else printed.out


def test_a_nan_stops_the_run_and_names_the_step_and_the_last_checkpoint(tmp_path):
    """The step is tried once more, with new ranks."""
    done = run_forked_job("trainer.policy.optimizer.lr=1e30", "trainer.val_interval=-1", cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    sentence = done.stderr.strip().splitlines()[-1]
    assert "policy" in sentence and "step" in sentence and "checkpoint" in sentence
    assert "Traceback" not in done.stderr


def supervised(cwd: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    done = run_forked_job(*overrides, job="sft", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.release
def test_supervised_training_is_a_run_with_checkpoints(tmp_path):
    """It continues on another number of ranks."""
    first = supervised(tmp_path, "sft.steps=2", "trainer.num_workers=2", "trainer.hf_save_interval=1")
    exports = [line for line in first.stdout.splitlines() if line.startswith("exported ")]
    assert [line.split("exports/")[1] for line in exports] == ["global_step_1/policy", "global_step_2/policy"]
    supervised(tmp_path, "sft.steps=4", "trainer.resume_mode=latest", "trainer.hf_save_interval=4")
    rows = metrics(tmp_path / "outputs/default")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["sft/loss"] < rows[0]["sft/loss"]
    assert [row["step"] for row in rows if "val/loss" in row] == [2, 4]
    assert rows[3]["val/loss"] < rows[1]["val/loss"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "outputs/default/exports/global_step_4/policy")


def test_supervised_training_learns_from_the_rollouts_of_another_run(whole, tmp_path):
    """With adapters, which are exported alone. The other run can be viewed."""
    from peft import PeftModel

    files = sorted((whole.directory / "rollouts").iterdir())
    assert [file.name for file in files] == ["step_1.arrow"], "what a run keeps by default"
    first = read_step(find_steps(str(whole.directory))[0])
    assert all(f'"{name}": 1'.encode() in first.tokens for name in ("logprob", "difference", "entropy", "advantage"))
    builder = Builder([str(whole.directory)], Limits())
    assert len(builder.page()) > 50_000 and builder.notes == []
    supervised(
        tmp_path,
        f"model.path={whole.start}",
        "trainer.run_name=offline",
        "sft.source=rollouts",
        "sft.max_weight=4",
        f"data.train_files=[{files[0]}]",
        "data.synthetic=null",
        "trainer.val_interval=-1",
        "sft.steps=3",
        "trainer.policy.lora.rank=4",
        "trainer.hf_save_lora=adapter",
    )
    rows = metrics(tmp_path / "outputs/offline")
    # The weights that sampled them see them first: ratios are 1, and move away from there.
    assert rows[0]["sft/kl"] < 1e-8 < rows[2]["sft/kl"] and rows[0]["sft/clip_frac"] == 0
    adapter = tmp_path / "outputs/offline/exports/global_step_3/policy"
    assert (adapter / "tokenizer.json").exists() and not (adapter / "config.json").exists()
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(whole.start), adapter)
    assert any(parameter.any() for name, parameter in adapted.named_parameters() if "lora_B" in name)


def test_a_job_that_cannot_save_its_last_step_exits_with_1(tmp_path):
    """What a save writes has longer names than what tries the directory before: no save succeeds."""
    place = str(tmp_path)
    while len(place) < 4035:
        place += "/" + "x" * min(200, 4035 - len(place) - 1)
    words = ("sft.steps=2", "trainer.hf_save_interval=1", f"trainer.ckpt_path={place}")
    done = run_forked_job(*words, job="sft", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "is trained but not saved: trainer.ckpt_path=" in sentence and "name too long" in sentence, sentence
    assert "run default in" in done.stdout and "finished" not in done.stdout and "Traceback" not in done.stderr
    assert len(metrics(tmp_path / "outputs/default")) == 2
