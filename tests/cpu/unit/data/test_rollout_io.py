"""Rollouts written as data."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from tests.support.runs import OpenRun, configured
from trainer.config import TinyConfig
from trainer.data.rollout_io import read_rollouts, write_conversations, write_rollouts
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.models.tiny import build_tiny
from trainer.models.tokenizer import load_tokenizer


def test_a_job_that_lost_its_run_directory_publishes_no_rollouts(tmp_path):
    with OpenRun(configured(tmp_path)) as run:
        write_rollouts(str(tmp_path), 1, [], run.directory.check)
        (tmp_path / ".lock").unlink()
        with pytest.raises(UserError, match="lost the run directory"):
            write_rollouts(str(tmp_path), 2, [], run.directory.check)
    assert os.listdir(tmp_path / "rollouts") == ["step_1.jsonl"]


def test_episodes_of_several_turns_are_written_with_their_turns_and_tokens(tmp_path):
    mask, logprobs = np.array([0, 1], np.float32), np.array([0, -0.5], np.float32)
    samples = [Sample(np.array([7, 8]), mask, logprobs, (1, 1)), Sample(np.array([9, 10]), mask, logprobs, (1, 1))]
    chat = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "x"}]
    write_conversations(str(tmp_path), 3, [Episode("0:1:0", "0:1", samples, 0.5, {}, "turns", messages=chat)])
    tokens = [{"token_ids": ids, "mask": [0, 1], "logprobs": [0.0, -0.5]} for ids in ([7, 8], [9, 10])]
    assert json.loads((tmp_path / "rollouts/step_3.jsonl").read_text()) == {
        "step": 3, "uid": "0:1", "prompt": chat[:1], "completion": chat[1:], "reward": 0.5, "rewards": {},
        "finish_reason": "turns", "failure": None, "metrics": {}, "samples": tokens,
    }  # fmt: skip


def test_a_reward_that_failed_reaches_no_limit(tmp_path):
    """Left out or counted as 0, it may have been any."""
    build_tiny(TinyConfig(hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1), str(tmp_path / "model"))
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    sample = Sample(np.array([1, 65]), np.array([0, 1], np.float32), np.array([0, -0.5], np.float32), (1, 1))
    rewards = [(None, "is nan"), (0.0, "is nan"), (0.0, "")]
    chat = [{"role": "user", "content": "p"}, {"role": "assistant", "content": tokenizer.decode([65])}]
    made = [
        Episode(f"0:0:{i}", "0:0", [sample], reward, failure=reason, messages=chat)
        for i, (reward, reason) in enumerate(rewards)
    ]
    write_rollouts(str(tmp_path), 1, made)
    file = str(tmp_path / "rollouts/step_1.jsonl")
    assert len(read_rollouts(file, tokenizer, None)) == 3 and len(read_rollouts(file, tokenizer, -1.0)) == 1
