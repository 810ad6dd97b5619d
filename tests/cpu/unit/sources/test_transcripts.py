"""Transcripts of the episodes of a step."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from tests.support.runs import configured, rollouts_of
from trainer.data.records import decode_groups
from trainer.data.rollout_io import kept_files
from trainer.episodes import Episode, Sample, TokenScores
from trainer.metrics.samples import Transcript
from trainer.sources.base import Evaluation
from trainer.sources.transcripts import TranscriptLog, transcript

SAMPLE = Sample(np.array([7, 8]), np.array([0, 1], np.float32), np.array([0, -0.5], np.float32), (1, 1))
CHAT = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]
EPISODES = [Episode(f"0:{i}:1", f"0:{i}", [SAMPLE], float(i), messages=CHAT, answer="b") for i in range(60)]


@pytest.mark.parametrize("val_interval", [-1, 1])
def test_some_episodes_are_shown_every_tenth_step(tmp_path, caplog, val_interval):
    """On the terminal, too, if there is no validation to show. A resumed run samples the same ones."""
    cfg = configured(tmp_path, val_interval=val_interval)
    cfg.logger.samples = 2
    caplog.set_level("INFO")
    logs = [TranscriptLog(cfg, lambda: None) for _ in range(2)]
    for log in logs:
        for step in (1, 10, 20):
            log.add_step(step, EPISODES)
    shown = [[log.pop(step) for step in (1, 10, 20)] for log in logs]
    assert shown[0] == shown[1] and shown[0][0] == {} and shown[0][1] != shown[0][2]
    assert [len(samples["training"]) for samples in shown[0][1:]] == [2, 2]
    assert logs[0].pop(10) == {}, "they are forgotten"
    assert ("training of step 10, sample 1 of 2" in caplog.text) == (val_interval < 0)
    assert kept_files(str(tmp_path)).keys() == {1, 10, 20}, "for the viewer"


def test_a_run_keeps_the_rollouts_of_some_steps_for_people(tmp_path):
    log = TranscriptLog(configured(tmp_path), lambda: None)
    for step in range(1, 22):
        log.add_step(step, EPISODES)
    assert list(kept_files(str(tmp_path))) == [1, 10, 20]


def test_episodes_without_messages_have_no_transcripts(tmp_path):
    """Episodes of supervised training, or of a source that knows no text."""
    cfg = configured(tmp_path)
    cfg.logger.save_rollouts = True
    log = TranscriptLog(cfg, lambda: None)
    log.add_step(10, [Episode("0:0:0", "0:0", [SAMPLE])])
    assert log.pop(10) == {} and not (tmp_path / "rollouts").exists()


def test_a_transcript_has_the_whole_episode(tmp_path):
    turns = [*CHAT, {"role": "user", "content": "again"}, {"role": "assistant", "content": "b"}]
    episode = Episode(
        "0:4:1", "0:4", [SAMPLE], 0.5, {"x": 0.5}, "turns", None, "why", {"moves": 2.0}, turns, 2, "answer"
    )
    assert transcript(episode) == Transcript(
        "0:4", 1, turns[:1], turns[1:], "answer", 0.5, {"x": 0.5}, "turns", "why", {"moves": 2.0}
    )
    assert (episode.text, episode.length) == ("b", 1)


def test_rollouts_are_kept_until_the_run_goes_back_behind_their_step(tmp_path):
    """With prompt and completion apart. What the user has put there stays."""
    cfg = configured(tmp_path)
    cfg.logger.save_rollouts = True
    log = TranscriptLog(cfg, lambda: None)
    log.rewind(0)
    for step in (1, 2, 10):
        log.add_step(step, EPISODES)
    line = rollouts_of(tmp_path, 1)[2]
    assert (line["step"], line["group"], line["answer"], line["reward"]) == (1, "0:2", "b", 2.0)
    assert (line["prompt"], line["completion"]) == (CHAT[:1], CHAT[1:])
    assert line["samples"] == [
        {
            "token_ids": [7, 8],
            "mask": [0.0, 1.0],
            "logprobs": [0.0, -0.5],
            "weight_versions": [1, 1],
            "version_spans": [],
        }
    ]
    (tmp_path / "rollouts/step_3.jsonl").touch()
    log.rewind(2)
    assert sorted(os.listdir(tmp_path / "rollouts")) == ["step_1.arrow", "step_2.arrow", "step_3.jsonl"]


def test_a_prompt_is_shown_as_the_policy_saw_it(tmp_path, caplog, tokenizer):
    """And not as the messages from which it was rendered: a template may leave out some of these."""
    cfg = configured(tmp_path)
    cfg.logger.save_rollouts = True
    caplog.set_level("INFO")
    tokens = np.asarray(tokenizer.encode("<|user|>seen<|assistant|>said"), np.int32)
    mask = np.zeros(len(tokens), np.float32)
    mask[-4:] = 1
    chat = [{"role": "system", "content": "never seen"}, {"role": "user", "content": "meant"}]
    chat.append({"role": "assistant", "content": "said"})
    sample = Sample(tokens, mask, np.zeros(len(tokens), np.float32), (1, 1))
    episodes = [Episode(f"0:1:{i}", "0:1", [sample], 1.0, messages=chat) for i in range(2)]
    log = TranscriptLog(cfg, lambda: None, tokenizer)
    log.add_step(10, episodes)
    log.add_evaluation(10, Evaluation({}, greedy=episodes[:1]))
    prompt = [{"role": "prompt", "content": "<|user|>seen<|assistant|>"}]
    assert [(row["prompt"], row["completion"]) for row in rollouts_of(tmp_path, 10)] == 2 * [(prompt, chat[-1:])]
    [line] = (tmp_path / "validation/step_10.jsonl").read_text().splitlines()
    assert json.loads(line)["prompt"] == prompt
    assert "<|user|>seen<|assistant|>" in caplog.text and "meant" not in caplog.text


def test_what_was_computed_for_tokens_is_kept_beside_the_samples(tmp_path):
    cfg = configured(tmp_path)
    cfg.logger.save_rollouts = True
    scores = [
        TokenScores(np.float32([0, -i]), None, np.float32([0, i / 2]))
        for i, episode in enumerate(EPISODES)
        for _ in episode.samples
    ]
    TranscriptLog(cfg, lambda: None).add_step(1, EPISODES, scores)
    assert rollouts_of(tmp_path, 1)[2]["scores"] == [
        {"logprobs": [0.0, -2.0], "entropy": None, "advantages": [0.0, 1.0]}
    ]
    (file,) = (tmp_path / "rollouts").iterdir()
    (found,) = decode_groups(file.read_bytes())[0].values()
    assert [episode.uid for episode in found] == [episode.uid for episode in EPISODES]


def test_samples_show_why_a_reward_failed():
    given = ("val:0", 0, [{"role": "user", "content": "?"}], [{"role": "assistant", "content": "1"}], "")
    assert Transcript(*given, None, failure="raised TimeoutError: x\x1b").block() == (
        "prompt      ?\ncompletion  1\nreward      none\nfailure     raised TimeoutError: x\\x1b"
    )
    assert Transcript(*given, 0.0, failure="is nan").row()[4:] == (0.0, "", "stop", "is nan", "")
