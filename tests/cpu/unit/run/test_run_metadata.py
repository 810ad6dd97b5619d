"""The records of each start in the run directory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import yaml

from tests.support.namespaces import small_disk
from trainer.config import Config
from trainer.files.redaction import name_secrets
from trainer.run.run_metadata import git_states, record_start, versions


def test_each_start_adds_a_line_and_the_last_config_is_kept(tmp_path):
    first, second = Config(), Config()
    second.trainer.total_steps = 7
    record_start(str(tmp_path), first)
    record_start(str(tmp_path), second)
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [start["config"]["trainer"]["total_steps"] for start in starts] == [first.trainer.total_steps, 7]
    assert starts[0]["command"] == sys.orig_argv
    assert starts[0]["versions"]["torch"] and starts[0]["versions"]["python"].startswith("3.")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == starts[1]["config"]


def test_secrets_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    name_secrets({"a": "${oc.env:WANDB_API_KEY}"})
    arguments = [
        "python",
        "data.stop_token=ends here",
        "environment.kwargs={api_key:abc,n:1}",
        "+environment.kwargs.secret_key=4711",
        "reward.url=https://user:words@host/judge?token=abc&n=1",
        "reward.api_key=abc",
        "trainer.run_name=0123456789abcdef",
        "rollout.max_prompt_tokens=64",
    ]
    monkeypatch.setattr(sys, "orig_argv", arguments)
    config = Config()
    config.logger.project = "0123456789abcdef"
    config.environment.kwargs = {"api_key": "0123456789abcdef", "authorization": "Bearer xyz", "password": 4711, "n": 1}
    record_start(str(tmp_path), config)
    start = json.loads((tmp_path / "starts.jsonl").read_text())
    assert start["command"] == [
        "python",
        "data.stop_token=ends here",
        "environment.kwargs={api_key:***,n:1}",
        "+environment.kwargs.secret_key=***",
        "reward.url=https://***@host/judge?token=abc&n=1",
        "reward.api_key=***",
        "trainer.run_name=${oc.env:WANDB_API_KEY}",
        "rollout.max_prompt_tokens=64",
    ]
    for file in tmp_path.iterdir():
        assert "0123456789abcdef" not in file.read_text()
    shown = {"api_key": "${oc.env:WANDB_API_KEY}", "authorization": "***", "password": "***", "n": 1}
    assert start["config"]["environment"]["kwargs"] == shown


def git(directory, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    command = ["git", "-C", str(directory), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_and_changes_of_a_repository_are_named(tmp_path):
    outside, repository = tmp_path / "outside", tmp_path / "repository"
    for directory in (outside, repository / "folder"):
        directory.mkdir(parents=True)
    git(repository, "init")
    (repository / "file").write_text("one")
    git(repository, "add", ".")
    git(repository, "commit", "-m", "c")
    clean = {"directory": str(repository), "commit": git(repository, "rev-parse", "HEAD"), "dirty": False}
    assert git_states([str(repository / "folder"), str(repository), str(outside)]) == [clean]
    (repository / "file").write_text("two")
    assert git_states([str(repository)]) == [{**clean, "dirty": True}]


def test_the_versions_are_of_all_packages():
    known = {name.lower(): version for name, version in versions().items()}
    assert known["torch"].partition("+")[0] == torch.__version__.partition("+")[0]  # some builds have "+cpu" here
    assert {"python", "trainer", "pytest", "pyyaml"} <= set(known)


def test_a_start_that_a_full_disk_cannot_record_is_an_error():
    with small_disk("8k") as directory, pytest.raises(OSError, match="No space left on device.*starts.jsonl"):
        record_start(directory, Config())
