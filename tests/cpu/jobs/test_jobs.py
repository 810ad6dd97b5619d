"""Whole jobs from the command line, on plain processes of this machine."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.evaluations import evaluate, validation_of
from tests.support.forks import run_forked
from tests.support.jobs import (
    comparable,
    environment,
    left_in_shared_memory,
    left_running,
    metrics,
    run_forked_job,
    shared_memory,
    wait_until,
)
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


def test_a_sweep_leaves_complete_run_directories_and_nothing_else(tmp_path, marker):
    """GRPO and PPO, one after the other, as `-m` runs them."""
    memory = shared_memory()
    done = run_forked_job("-m", "algorithm=grpo,ppo", "rollout.val_n=2", "logger.plot=true", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted((tmp_path / "outputs/default").glob("*algorithm=*"))
    assert ["algorithm=grpo" in runs[0].name, "algorithm=ppo" in runs[1].name] == [True, True] and len(runs) == 2
    for run in runs:
        rows = metrics(run)
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert set(rows[2]) >= STEP_METRICS | {
            "val/accuracy",
            "val/reward/mean",
            "val/pass@2",
            "time/checkpoint_blocked",
        }
        assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows[1:])
        assert (rows[2]["progress/prompts"], rows[2]["progress/samples"]) == (16, 64)
        assert (run / "report.png").stat().st_size > 10_000
        checkpoint = run / "checkpoints/global_step_2"
        for name in ("manifest.json", "config.yaml", "trainer_state.json", "data.json", "policy/.metadata",
                     "policy/__0_0.distcp", "policy/fsdp_config.json", "policy/huggingface/config.json",
                     "policy/huggingface/tokenizer.json"):  # fmt: skip
            assert (checkpoint / name).exists(), name
        assert (run / "checkpoints/latest_ckpt_global_step.txt").read_text().strip() == "2"
    assert (runs[1] / "checkpoints/global_step_2/critic/__0_0.distcp").exists()
    evaluated = evaluate(runs[0], "--step=2", cwd=tmp_path)
    assert evaluated["metrics"] == validation_of(runs[0], 2), "the run's own validation, to the last bit"
    assert {"critic/loss", "critic/explained_variance", "critic/grad_norm"} <= set(metrics(runs[1])[1])
    assert left_running(marker) == []
    wait_until(lambda: left_in_shared_memory(memory) == set())


def test_presets_that_sample_in_their_own_way(tmp_path):
    """DAPO draws further prompts, ReMax a greedy completion for each; tokens are weighed by the engine's mismatch."""
    (tmp_path / "own.py").write_text(OWN_LOSS)
    done = run_forked_job(
        "-m",
        "algorithm=dapo,remax",
        "algorithm.rollout_correction=tis",
        "algorithm.policy_loss=own:loss",
        "+algorithm.options.factor=0",
        "reward.name=tests.cpu.jobs.test_jobs:starts_with_a_vowel",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    dapo, remax = (metrics(next((tmp_path / "outputs/default").glob(f"*algorithm={n}*"))) for n in ("dapo", "remax"))
    for row in dapo[1:]:
        assert row["sampling/batches"] > 1 and row["sampling/filtered"] > 0
        assert row["progress/prompts"] == 8 * row["step"]
    drawn = sum(8 + row["sampling/filtered"] for row in dapo[1:])
    assert dapo[-1]["progress/epoch"] == drawn / 64, "the ledger counts what was passed over, and nothing twice"
    for row in remax[1:]:
        assert row["rollout/ess"] == pytest.approx(1.0, abs=1e-4)
    for row in dapo[1:] + remax[1:]:
        assert row["policy/loss"] == 0, "the loss of our own was not used, or did not get its option"
        assert row["rollout_is/clip_frac"] == 0


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


def test_a_fork_continues_another_run_on_another_number_of_ranks(tmp_path):
    """The same prompts and, to rounding, the same losses; and it comes back as itself."""
    base = [
        "trainer.total_steps=4",
        "trainer.num_workers=2",
        "algorithm=ppo",
        "trainer.policy.optimizer.scheduler=constant",
    ]  # a schedule would see that half the run ends earlier
    whole = run_forked_job(*base, "trainer.run_name=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    expected = comparable(metrics(tmp_path / "outputs/whole"))

    again = run_forked_job(*base, "trainer.run_name=whole", cwd=tmp_path)
    assert again.returncode == 2 and "trainer.resume_mode=latest" in again.stderr, "an old run was to be overwritten"

    fork = [*base, "trainer.run_name=fork", "trainer.num_workers=1", "trainer.resume_mode=from_path",
            "trainer.resume_path=outputs/whole/checkpoints/global_step_2"]  # fmt: skip
    done = run_forked_job(*fork, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path / "outputs/fork")
    assert [row["step"] for row in rows] == [3, 4]
    for name in ("policy/loss", "policy/kl", "policy/grad_norm", "critic/loss", "reward/mean", "progress/tokens"):
        assert rows[0][name] == pytest.approx(expected[3][name], rel=1e-4, abs=1e-5), name
    parent = json.loads((tmp_path / "outputs/fork/checkpoints/global_step_4/manifest.json").read_text())["parent"]
    assert parent["forked_from"].endswith("whole/checkpoints/global_step_2") and parent["step"] == 2

    # Restarted with the same command, it continues from its own checkpoint, not from the parent's again.
    shutil.rmtree(tmp_path / "outputs/fork/checkpoints/global_step_4")
    done = run_forked_job(*fork, cwd=tmp_path)
    assert done.returncode == 0 and "resume verified: 1 replayed step identical" in done.stdout, done.stdout
    assert comparable(metrics(tmp_path / "outputs/fork")) == comparable(rows)

    # The weights alone, into a run of another kind, whose reference would be in its checkpoints. A fork may have
    # another learning rate without permission.
    done = run_forked_job("trainer.total_steps=1", "trainer.run_name=weights",
                   "algorithm.kl_coef=0.01", "algorithm.ref_sync_interval=1", "trainer.load_components=[weights]",
                   "trainer.policy.optimizer.lr=1e-4",
                   "trainer.resume_mode=from_path", "trainer.resume_path=outputs/whole/checkpoints/global_step_2",
                   cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the checkpoint holds no reference: it starts from scratch" in done.stdout
    assert "config changed since the checkpoint: trainer.policy.optimizer.lr" in done.stdout
    assert metrics(tmp_path / "outputs/weights")[-1]["policy/lr"] <= 1e-4
    saved = tmp_path / "outputs/weights/checkpoints/global_step_1"
    assert {path.name for path in saved.iterdir() if path.is_dir()} == {"policy", "reference"}


def test_an_export_is_the_trained_policy(tmp_path):
    base = ["trainer.hf_save_interval=2", "trainer.num_workers=2"]
    done = run_forked_job(*base, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    export = tmp_path / "outputs/default/exports/global_step_2/policy"
    model = AutoModelForCausalLM.from_pretrained(export)
    tokenizer = AutoTokenizer.from_pretrained(export)
    start = re.search(r"run default in .*?: (\S+),", done.stdout).group(1)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(model.parameters(), AutoModelForCausalLM.from_pretrained(start).parameters(), strict=True)
    )
    assert tokenizer.chat_template
    state = json.loads((tmp_path / "outputs/default/checkpoints/global_step_2/trainer_state.json").read_text())
    assert state["step"] == 2

    # What the tools say of, and do with, the checkpoints of that run.
    run = tmp_path / "outputs/default"
    second = str(run / "checkpoints/global_step_2")
    listed = tool("ls", str(run), "--json")["checkpoints"]
    assert [(row["step"], row["ranks"], row["valid"]) for row in listed] == [(1, 2, True), (2, 2, True)]
    assert state["counters"]["prompts"] == 16
    exported = tool("export", str(run), str(tmp_path / "by_tool"), "--max-file-gb", "0.0006", "--json")
    assert exported["checkpoint"] == second
    files = exported["files"]
    assert len(files) > 1, "one file held more than it was to"
    by_tool = AutoModelForCausalLM.from_pretrained(tmp_path / "by_tool")
    for ours, theirs in zip(by_tool.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert AutoTokenizer.from_pretrained(tmp_path / "by_tool").chat_template == tokenizer.chat_template
    assert tool("export", second, str(tmp_path / "by_tool"), status=2) == ""
    assert tool("rollback", str(run), "--to", "1", "--json")["step"] == 1
    assert tool("rollback", str(run), "--to", "2", status=2) == ""
    assert tool("ls", str(tmp_path), status=2) == ""
    assert tool("verify", str(tmp_path / "global_step_9"), status=2) == ""
    back = run_forked_job(*base, "trainer.resume_mode=latest", cwd=tmp_path)
    assert back.returncode == 0 and "resume verified: 1 replayed step identical" in back.stdout, back.stdout
    assert [row["valid"] for row in tool("verify", str(run), "--json")] == [True, True]
    (run / "checkpoints/global_step_2/data.json").write_text("{}")
    assert tool("verify", str(run), status=1).count("DAMAGED: data.json has 2 bytes") == 1


def tool(*args: str, status: int = 0):
    """What `trainer checkpoint` prints, as JSON with `--json`."""
    done = run_forked("trainer.checkpoint", args, Path(__file__).parent, environment(), timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout) if "--json" in args else done.stdout


def test_a_nan_stops_the_run_and_names_the_step_and_the_last_checkpoint(tmp_path):
    """The step is tried once more, with new ranks."""
    done = run_forked_job("trainer.policy.optimizer.lr=1e30", "trainer.val_interval=-1", cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    sentence = done.stderr.strip().splitlines()[-1]
    assert "policy" in sentence and "step" in sentence and "checkpoint" in sentence
    assert "Traceback" not in done.stderr


GSM8K = Path(__file__).resolve().parents[3] / "../shared/data/gsm8k"


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K files are not beside this checkout")
def test_real_gsm8k_trains_on_two_ranks(tmp_path):
    files = [f"data.train_files=[{GSM8K}/train.jsonl]", f"data.val_files=[{GSM8K}/test.jsonl]"]
    settings = ["trainer.num_workers=2", "rollout.max_response_tokens=64", "sft.steps=5"]
    done = run_forked_job("data=gsm8k", *files, *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path / "outputs/default")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows[1:])


def test_supervised_training_is_a_run_with_checkpoints_and_learns_from_the_rollouts_of_another(tmp_path):
    first = run_forked_job(
        "sft.steps=4", "trainer.num_workers=2", "trainer.hf_save_interval=2", job="sft", cwd=tmp_path
    )
    assert first.returncode == 0, first.stderr
    exports = [line for line in first.stdout.splitlines() if line.startswith("exported ")]
    assert [line.split("exports/")[1] for line in exports] == ["global_step_2/policy", "global_step_4/policy"]
    more = run_forked_job("sft.steps=6", "trainer.resume_mode=latest", "trainer.num_workers=1", job="sft", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    rows = metrics(tmp_path / "outputs/default")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["sft/loss"] < rows[0]["sft/loss"]
    assert [row["step"] for row in rows if "val/loss" in row] == [2, 4, 6]
    assert rows[5]["val/loss"] < rows[3]["val/loss"] < rows[1]["val/loss"]
    model = tmp_path / "outputs/default/exports/global_step_6/policy"
    AutoModelForCausalLM.from_pretrained(model)

    sampled = run_forked_job(
        f"model.path={model}",
        "trainer.run_name=sampler",
        "trainer.val_interval=-1",
        cwd=tmp_path,
    )
    assert sampled.returncode == 0, sampled.stderr
    files = sorted((tmp_path / "outputs/sampler/rollouts").iterdir())
    assert [file.name for file in files] == ["step_1.arrow"], "what a run keeps by default"
    first = read_step(find_steps(str(tmp_path / "outputs/sampler"))[0])
    assert all(f'"{name}": 1'.encode() in first.tokens for name in ("logprob", "difference", "entropy", "advantage"))
    builder = Builder([str(tmp_path / "outputs/sampler")], Limits())
    assert len(builder.page()) > 50_000 and builder.notes == []
    offline = run_forked_job(
        f"model.path={model}",
        "trainer.run_name=offline",
        "sft.source=rollouts",
        "sft.max_weight=4",
        f"data.train_files=[{files[0]}]",
        "data.synthetic=null",
        "trainer.val_interval=-1",
        "sft.steps=3",
        "trainer.policy.lora.rank=4",
        "trainer.hf_save_lora=adapter",
        job="sft",
        cwd=tmp_path,
    )
    assert offline.returncode == 0, offline.stderr
    rows = metrics(tmp_path / "outputs/offline")
    # The weights that sampled them see them first: ratios are 1, and move away from there.
    assert rows[0]["sft/kl"] < 1e-8 < rows[2]["sft/kl"] and rows[0]["sft/clip_frac"] == 0
    adapter = tmp_path / "outputs/offline/exports/global_step_3/policy"
    assert (adapter / "tokenizer.json").exists() and not (adapter / "config.json").exists()
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    assert any(parameter.any() for name, parameter in adapted.named_parameters() if "lora_B" in name)

    burst = run_forked_job(
        f"model.path={model}",
        "trainer.run_name=burst",
        "trainer.max_restarts=0",
        "sft.optimizer.lr=1e30",
        "sft.optimizer.warmup_steps=0",
        job="sft",
        cwd=tmp_path,
    )
    sentence = burst.stderr.strip().splitlines()[-1]
    assert burst.returncode == 3 and "the last good checkpoint is" in sentence and "sft.optimizer.lr" in sentence


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("job", ["train", "sft"])
def test_a_job_that_cannot_save_its_last_step_exits_with_1(tmp_path, job):
    """What a save writes has longer names than what tries the directory before: no save succeeds."""
    place = str(tmp_path)
    while len(place) < 4035:
        place += "/" + "x" * min(200, 4035 - len(place) - 1)
    done = run_forked_job(
        "trainer.val_interval=-1",
        "logger.plot=false",
        "sft.steps=3",
        "trainer.hf_save_interval=2",
        f"trainer.ckpt_path={place}",
        job=job,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "is trained but not saved: trainer.ckpt_path=" in sentence and "name too long" in sentence, sentence
    run = done.stdout.partition("run default in")[2]  # after the warm start
    assert run and "finished" not in run and "Traceback" not in done.stderr
    assert len(metrics(tmp_path / "outputs/default")) == (2 if job == "train" else 3)
