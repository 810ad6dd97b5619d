"""Rollouts written as data."""

from __future__ import annotations

import json
import os

import numpy as np
import pandas
import pyarrow.feather
import pytest

from tests.support.runs import OpenRun, configured
from trainer.data.rollout_io import main, read_rollouts, write_rollouts
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer


def test_a_job_that_lost_its_run_directory_publishes_no_rollouts(tmp_path):
    with OpenRun(configured(tmp_path)) as run:
        write_rollouts(str(tmp_path), 1, [], run.directory.check)
        (tmp_path / ".lock").unlink()
        with pytest.raises(UserError, match="lost the run directory"):
            write_rollouts(str(tmp_path), 2, [], run.directory.check)
    assert os.listdir(tmp_path / "rollouts") == ["step_1.arrow"]


def test_kept_rollouts_are_printed_as_lines_and_read_by_other_tools(tmp_path, capsys):
    import datasets

    mask, logprobs = np.array([0, 1], np.float32), np.array([0, -0.5], np.float32)
    samples = [Sample(np.array([7, 8]), mask, logprobs, (1, 1)), Sample(np.array([9, 10]), mask, logprobs, (1, 1))]
    chat = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "x"}]
    for step in (10, 3):
        episode = Episode("0:1:0", "0:1", samples, 0.5, {"a": 0.5}, "turns", metrics={"m": 1.0}, messages=chat)
        write_rollouts(str(tmp_path), step, [episode])
    tokens = [
        {"token_ids": ids, "mask": [0, 1], "logprobs": [0.0, -0.5], "weight_versions": [1, 1], "version_spans": []}
        for ids in ([7, 8], [9, 10])
    ]
    line = {
        "step": 3, "group": "0:1", "uid": "0:1:0", "source": "", "prompt": chat[:1], "completion": chat[1:],
        "answer": "", "status": "turns", "failure": "", "reward": 0.5, "baseline": None, "rewards": {"a": 0.5},
        "metrics": {"m": 1.0}, "turns": 1, "samples": tokens,
    }  # fmt: skip
    assert main([str(tmp_path)]) == 0
    assert [json.loads(text) for text in capsys.readouterr().out.splitlines()] == [line, {**line, "step": 10}]
    file = f"{tmp_path}/rollouts/step_3.arrow"
    assert main([file, "--no-tokens"]) == 0
    assert json.loads(capsys.readouterr().out) == {name: line[name] for name in line if name != "samples"}
    frame = pandas.read_feather(file)
    assert frame.reward.tolist() == [0.5] and json.loads(frame.messages[0]) == chat
    assert frame.samples[0][1]["token_ids"].tolist() == [9, 10]
    loaded = datasets.load_dataset("arrow", data_files=file, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded[0]["samples"] == tokens and loaded[0]["key"] is None


@pytest.mark.parametrize("path", ["empty", "other.arrow", "cut.arrow", "other.jsonl", "missing.arrow", "no_run"])
def test_what_holds_no_rollouts_is_refused_in_one_sentence(tmp_path, capsys, path):
    write_rollouts(str(tmp_path), 1, [Episode("0:1:0", "0:1", [])])
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.arrow").write_bytes((tmp_path / "rollouts/step_1.arrow").read_bytes()[:-50])
    pyarrow.feather.write_feather(pyarrow.table({"messages": ["["]}), str(tmp_path / "other.arrow"))
    (tmp_path / "other.jsonl").write_text("[1]")
    assert main([str(tmp_path / path)]) == 2
    printed = capsys.readouterr()
    assert (
        printed.err.startswith("error: ") and printed.err.count("\n") == 1 and path in printed.err and not printed.out
    )
    assert ("no such file or directory; name the directory of a run" in printed.err) == (
        path in ("missing.arrow", "no_run")
    )


def test_an_episode_that_cannot_be_kept_is_named(tmp_path):
    with pytest.raises(UserError, match="logger.save_rollouts: the rollouts of step 4 cannot be written"):
        write_rollouts(str(tmp_path), 4, [Episode("u", "g", [], messages=[{(1, 2): "no key of JSON"}])])


def test_a_reward_that_failed_reaches_no_limit(tmp_path):
    """Left out or counted as 0, it may have been any."""
    build_tiny(TinyShape(hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1), str(tmp_path / "model"))
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    sample = Sample(np.array([1, 65]), np.array([0, 1], np.float32), np.array([0, -0.5], np.float32), (1, 1))
    rewards = [(None, "is nan"), (0.0, "is nan"), (0.0, "")]
    chat = [{"role": "user", "content": "p"}, {"role": "assistant", "content": tokenizer.decode([65])}]
    made = [
        Episode(f"0:0:{i}", "0:0", [sample], reward, failure=reason, messages=chat)
        for i, (reward, reason) in enumerate(rewards)
    ]
    write_rollouts(str(tmp_path), 1, made)
    file = str(tmp_path / "rollouts/step_1.arrow")
    assert len(read_rollouts(file, tokenizer, None)) == 3 and len(read_rollouts(file, tokenizer, -1.0)) == 1
