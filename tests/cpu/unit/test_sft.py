"""`trainer sft` is `trainer train trainer.task=sft`."""

from __future__ import annotations

import sys

import pytest

from trainer import sft
from trainer.config import command_line
from trainer.process.log_setup import LOG_FILE


@pytest.fixture
def composed(monkeypatch, tmp_path):
    """The config that `main` hands to the job, for the words of a command line."""

    def compose(*words: str):
        found = []
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["trainer sft", *words])
        monkeypatch.setattr(sft, "train", found.append)
        begin = command_line._compose_and_run
        monkeypatch.setattr(command_line, "run_to_end", lambda job, _, command: begin(job, command) or ended)
        monkeypatch.setattr(command_line.os, "_exit", lambda status: None)
        ended = command_line.Outcome(0)
        sft.main()
        return found[0]

    return compose


def test_the_task_is_sft_and_the_user_s_keys_count(composed):
    config = composed("sft.steps=7")
    assert (config.trainer.task, config.sft.steps, config.total_steps) == ("sft", 7, 7)
    assert LOG_FILE is not None


def test_help_names_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trainer sft", "--help"])
    sft.main()
    assert capsys.readouterr().out.startswith("usage: trainer sft ")
