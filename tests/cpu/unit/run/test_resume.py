"""From which checkpoint a run resumes, and which configs and names it accepts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.support.odd_files import resume, rewrite
from tests.support.runs import configured, opened, save_steps
from trainer.checkpoint.components import config_digest
from trainer.checkpoint.manifest import CorruptCheckpointError
from trainer.config import compose
from trainer.errors import UserError
from trainer.files.redaction import name_secrets
from trainer.run.directory import RunDirectory
from trainer.run.run_metadata import record_start


def test_a_checkpoint_of_a_step_that_no_run_reaches_is_compared_with_its_lines_at_once(run_dir):
    name, step = "global_step_900000000000000000", 900_000_000_000_000_000
    checkpoint = (run_dir / "checkpoints/global_step_2").rename(run_dir / "checkpoints" / name)
    rewrite(checkpoint, json.loads((checkpoint / "manifest.json").read_text()) | {"step": step, "metrics_from": 1})
    assert "metrics.jsonl: has no line for step 3" in resume(run_dir)


@pytest.mark.parametrize(
    "name", ["global_step_٢", "global_step_02", "global_step_9999999999999999999999", "global_step_2\n"]
)
def test_a_directory_with_almost_the_name_of_a_checkpoint_is_none(run_dir, name):
    shutil.copytree(run_dir / "checkpoints/global_step_2", run_dir / "checkpoints" / name)
    assert resume(run_dir) == 2


@pytest.mark.parametrize("path", ["checkpoints/global_step_7", "", "checkpoints"])
def test_a_path_of_no_checkpoint_is_refused(run_dir, tmp_path, path):
    cfg = configured(tmp_path / "fork", resume_mode="from_path", resume_path=str(run_dir / path))
    with pytest.raises(UserError, match=r"^trainer.resume_path=.*: .*; `trainer checkpoint ls RUN` names them"):
        RunDirectory(cfg).open()


def test_a_named_checkpoint_that_is_damaged_is_refused_with_the_remedy(run_dir, tmp_path):
    checkpoint = run_dir / "checkpoints/global_step_2"
    with (checkpoint / "data.json").open("ab") as file:
        file.truncate(1)
    cfg = configured(tmp_path / "fork", resume_mode="from_path", resume_path=str(checkpoint))
    with pytest.raises(CorruptCheckpointError) as refused:
        RunDirectory(cfg).open()
    problem, what_to_do = str(refused.value).split("; ", 1)
    assert problem.startswith(f"trainer.resume_path={checkpoint}: data.json has 1 bytes instead of ")
    assert what_to_do == "restore the checkpoint from a copy, or name another one"


# ----------------------------------------------------------------------------------------------------------
# What a resume may change


def with_options(directory: Path, more: dict | None = None, **options):
    cfg = configured(directory, resume_mode="latest" if more is None else None)
    cfg.environment.kwargs = options | (more or {})
    return cfg


def test_a_new_secret_is_no_change_and_is_shown_nowhere(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", "trainer")
    monkeypatch.setenv("MY_API_KEY", "from-a-variable-1")
    name_secrets({"api_key": "${oc.env:MY_API_KEY}"})
    secrets = {"api_key": "from-a-variable-1", "auth": {"user": "u-hush", "password": 47110815}, "token": None}
    save_steps(with_options(tmp_path, secrets, n=1, header="Bearer from-a-variable-1"), 1)
    checkpoint = tmp_path / "checkpoints/global_step_1"
    saved = yaml.safe_load((checkpoint / "config.yaml").read_text())["environment"]["kwargs"]
    assert saved["api_key"] == "${oc.env:MY_API_KEY}" and saved["auth"] == {"user": "***", "password": "***"}
    digest = json.loads((checkpoint / "manifest.json").read_text())["config_digest"]

    monkeypatch.setenv("MY_API_KEY", "from-a-variable-2")
    name_secrets({"api_key": "${oc.env:MY_API_KEY}"})
    new = {"api_key": "literal", "auth": {"user": "v-hush", "password": "x-hush"}, "token": "t-hush"}
    cfg = with_options(tmp_path, n=1, header="Bearer from-a-variable-2", **new)
    with RunDirectory(cfg).open() as directory:
        assert directory.resume is not None and directory.resume.checkpoint.step == 1
    assert config_digest(cfg) == digest, "a digest tells nothing of secrets"
    assert "environment.kwargs" not in caplog.text

    cfg = with_options(tmp_path, n=2, header="Bearer from-a-variable-2", **new)
    with pytest.raises(UserError, match=r"^environment.kwargs=.*'n': 2.*saved with .*'n': 1") as refused:
        RunDirectory(cfg).open()
    cfg.trainer.allow_config_change = ["environment.kwargs"]
    with RunDirectory(cfg).open():
        pass
    for file in checkpoint.iterdir():
        if file.is_file():
            assert not [word for word in ("hush", "4711", "variable-") if word in file.read_text()], file
    assert "environment.kwargs" in caplog.text
    for word in ("hush", "4711", "literal", "variable-"):
        assert word not in str(refused.value) and word not in caplog.text


POLICY_COSINE = {"trainer.policy.optimizer.scheduler": "cosine"}
SFT_COSINE = {"sft.optimizer.scheduler": "cosine"}
ADAPTIVE = {"algorithm.options": {"kl_target": 0.05}, "algorithm.kl_coef": 0.1}


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"rollout.temperature": 0.5}, r"rollout.temperature=0.5: .*saved with 1.0.*change=\[rollout.temperature\]"),
        ({"rollout.top_p": 0.5}, r"rollout.top_p=0.5: .*saved with 1.0.*change=\[rollout.top_p\]"),
        ({"rollout.top_k": 5}, r"rollout.top_k=5: .*saved with -1.*change=\[rollout.top_k\]"),
        (
            {"trainer.policy.optimizer.weight_decay": 0.1},
            r"weight_decay=0.1: .*change=\[trainer.policy.optimizer.weight_decay\]",
        ),
    ],
)
def test_what_is_computed_changes_with_permission_alone(tmp_path, caplog, change, sentence):
    save_steps(configured(tmp_path), 1)
    cfg = configured(tmp_path, change, resume_mode="latest")
    with pytest.raises(UserError, match=sentence):
        RunDirectory(cfg).open()
    (key,) = change
    cfg.trainer.allow_config_change = [key]
    caplog.set_level("INFO")
    with RunDirectory(cfg).open():
        assert any(line.startswith(f"config changed since the checkpoint: {key}: ") for line in caplog.messages)


def test_a_fork_does_not_list_the_paths_that_follow_from_its_name(tmp_path, caplog):
    save_steps(configured(tmp_path / "parent"), 1)
    (parent,) = (tmp_path / "parent/checkpoints").glob("global_step_*")
    changes = {"trainer.policy.optimizer.lr": 0.5, "trainer.export_path": str(tmp_path / "fork/exports")}
    settings = {"run_name": "fork", "resume_mode": "from_path", "resume_path": str(parent)}
    caplog.set_level("INFO")
    with RunDirectory(configured(tmp_path / "fork", changes, **settings)).open():
        listed = [line.split(": ")[1] for line in caplog.messages if line.startswith("config changed")]
    assert sorted(listed) == ["trainer.policy.optimizer.lr", "trainer.run_name"]


@pytest.mark.parametrize(
    "settings, key, task, refused",
    [
        ({}, "trainer.total_steps", "rl", ""),
        (POLICY_COSINE, "trainer.total_steps", "rl", "trainer.policy.optimizer.schedule_steps"),
        (POLICY_COSINE | {"trainer.policy.optimizer.schedule_steps": 5}, "trainer.total_steps", "rl", ""),
        (SFT_COSINE, "trainer.total_steps", "rl", ""),
        (POLICY_COSINE, "trainer.total_steps", "sft", ""),
        ({}, "sft.steps", "sft", ""),
        (SFT_COSINE, "sft.steps", "sft", "sft.optimizer.schedule_steps"),
        (SFT_COSINE | {"sft.optimizer.schedule_steps": 5}, "sft.steps", "sft", ""),
        ({}, "sft.steps", "rl", "sft.steps"),
        ({"model.path": "a/model"}, "sft.steps", "rl", ""),
    ],
)
def test_the_number_of_steps_is_free_unless_a_schedule_goes_by_it(tmp_path, settings, key, task, refused):
    save_steps(configured(tmp_path, settings, task=task), 1)
    cfg = configured(tmp_path, settings, {key: 777}, resume_mode="latest", task=task)
    if refused:
        with pytest.raises(UserError, match=rf"{refused}=777: .*allow_config_change=\[{refused}\]"):
            RunDirectory(cfg).open()
        cfg.trainer.allow_config_change = [refused]
    with RunDirectory(cfg).open() as run:
        assert run.resume.checkpoint.step == 1


@pytest.mark.parametrize(
    "change, critic, policy",
    [
        ({}, 0, 0),
        ({"trainer.mini_batch_size": 16}, 6, 6),
        ({"trainer.train_batch_size": 32}, -3, -3),
        ({"trainer.train_batch_size": 128, "trainer.mini_batch_size": 64}, 0, 0),
        ({"trainer.update_epochs": 3}, 12, 12),
        ({"trainer.critic.warmup_steps": 2}, 0, -4),
        ({"trainer.critic.warmup_steps": 9, "trainer.update_epochs": 2}, 6, -6),
        ({"trainer.policy.optimizer.lr": 1.0}, 0, 0),
    ],
)
def test_a_schedule_is_where_a_run_started_with_the_new_batch_sizes_would_be(tmp_path, change, critic, policy):
    """After 3 steps of 2 optimizer steps each."""
    gae = {"algorithm.advantage_estimator": "gae"}
    save_steps(configured(tmp_path, gae), 3)
    allowed = {"trainer.allow_config_change": list(change)}
    with RunDirectory(configured(tmp_path, gae, change, allowed, resume_mode="latest")).open() as run:
        assert run.resume.restore.added_steps == {"critic": critic, "policy": policy}
    save_steps(configured(tmp_path / "sft", task="sft"), 3)
    with RunDirectory(configured(tmp_path / "sft", change, allowed, resume_mode="latest", task="sft")).open() as run:
        assert not any(run.resume.restore.added_steps.values())


def test_the_weight_of_the_kl_does_not_change_under_an_adaptive_controller(tmp_path):
    change = {"algorithm.kl_coef": 0.3, "trainer.allow_config_change": ["algorithm"]}
    save_steps(configured(tmp_path / "adaptive", ADAPTIVE), 1)
    with pytest.raises(UserError, match="algorithm.kl_coef=0.3: .*saved with 0.1.*adaptive controller has steered"):
        RunDirectory(configured(tmp_path / "adaptive", ADAPTIVE, change, resume_mode="latest")).open()
    fixed = {"algorithm.options": {}}
    with RunDirectory(configured(tmp_path / "adaptive", ADAPTIVE, change, fixed, resume_mode="latest")).open():
        pass
    fork = {
        "trainer.resume_path": str(tmp_path / "adaptive/checkpoints/global_step_1"),
        "trainer.load_components": ["weights", "optimizer"],
    }
    with RunDirectory(configured(tmp_path / "fork", ADAPTIVE, change, fork, resume_mode="from_path")).open():
        pass  # the steered weight is not taken over
    save_steps(configured(tmp_path / "fixed", ADAPTIVE, fixed), 1)
    with RunDirectory(configured(tmp_path / "fixed", ADAPTIVE, change, resume_mode="latest")).open():
        pass


CHANGED: dict = {"trainer.policy.optimizer.lr": 0.5, "trainer.allow_config_change": ["trainer.policy.optimizer.lr"]}


@pytest.mark.parametrize(
    ("change", "resumed_step", "altered", "same_rounding"),
    [
        (CHANGED, 1, True, True),
        ({"trainer.num_workers": 2}, 1, False, False),
        (CHANGED, 0, False, True),  # it has saved this checkpoint, which holds its config
        ({}, 1, False, True),
    ],
)
def test_logged_lines_are_held_against_the_config_that_logged_them(
    tmp_path, change, resumed_step, altered, same_rounding
):
    """A start with another config has resumed here, and saved nothing. Then its change was undone."""
    save_steps(configured(tmp_path), 1)
    record_start(str(tmp_path), configured(tmp_path, change), resumed_step)
    with RunDirectory(configured(tmp_path, resume_mode="latest")).open() as directory:
        resume = directory.resume
        assert (resume.altered, resume.same_rounding) == (altered, same_rounding)


# ----------------------------------------------------------------------------------------------------------
# What a fork may change


LORA = ["trainer.policy.lora.rank=4"]


def documented_fork() -> list[str]:
    """The overrides of the fork in docs/checkpoints.md."""
    text = (Path(__file__).parents[4] / "docs/checkpoints.md").read_text()
    (block,) = [block for block in text.split("```") if "resume_mode=from_path" in block]
    return block.replace("\\\n", " ").split()[4:]


@pytest.mark.parametrize("algorithm", [["algorithm=grpo"], ["algorithm=ppo"], ["algorithm=ppo", *LORA]], ids=str)
def test_the_documented_fork_takes_another_learning_rate(tmp_path, caplog, monkeypatch, algorithm):
    monkeypatch.chdir(tmp_path)
    with opened(compose([*algorithm, "trainer.run_name=mine"])) as run:
        run.save(10)
    caplog.set_level("INFO")
    with opened(compose([*algorithm, *documented_fork()])) as run:
        assert run.resume.restore.fork and run.resume.checkpoint.step == 10
    changed = {line.split(": ", 1)[1] for line in caplog.messages if line.startswith("config changed")}
    assert "trainer.policy.optimizer.lr: 0.0004 -> 0.0001" in changed
    assert ("trainer.critic.optimizer.lr: 0.002 -> 0.0005" in changed) == ("algorithm=ppo" in algorithm)
    assert not any("compared" in line for line in caplog.messages), "a fork has logged nothing"


def test_a_resume_and_a_fork_list_all_that_they_refuse(tmp_path):
    save_steps(configured(tmp_path / "parent", ADAPTIVE), 1)
    change = {"algorithm.kl_coef": 0.3, "trainer.seed": 7, "model.path": "a/model", "rollout.n": 2}
    with pytest.raises(UserError) as refused:
        RunDirectory(configured(tmp_path / "parent", ADAPTIVE, change, resume_mode="latest")).open()
    keys = ["algorithm.kl_coef", "model.path", "rollout.n", "trainer.seed", "to allow all"]
    for line, key in zip(str(refused.value).splitlines()[1:], keys, strict=True):
        assert line.strip().startswith(key)
    path = str(tmp_path / "parent/checkpoints/global_step_1")
    fork = configured(tmp_path / "fork", ADAPTIVE, change, resume_mode="from_path", resume_path=path)
    with pytest.raises(UserError) as refused:
        RunDirectory(fork).open()
    lines = [line.strip() for line in str(refused.value).splitlines()[1:]]
    for line, key, remedy in zip(
        lines,
        ["algorithm.kl_coef", "model.path", "trainer.seed"],
        ["leave state out", "allow it with trainer.allow_config_change=[model.path]", "leave data out"],
        strict=True,
    ):
        assert line.startswith(key) and remedy in line
