"""Failures of a batch with rows of several sources: which of them end the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cpu.unit.sources.test_routes import mixed
from tests.support.replies import Replies, sampling_source
from trainer.config import Config, RewardConfig
from trainer.errors import UserError
from trainer.models.tokenizer import load_tokenizer
from trainer.sources.sampling import SamplingSource

MODES = pytest.mark.parametrize("mode", ["plain", "in flight"])


@contextmanager
def failing(cfg: Config, model: str, mode: str = "plain") -> Iterator[SamplingSource]:
    if mode == "in flight":
        cfg.rollout.engine, cfg.rollout.in_flight_updates = "vllm", True
    engines = Replies(load_tokenizer(model), lambda *_: "a")
    with sampling_source(cfg, engines, model) as source:
        source.start(1, is_initial=True)
        yield source
        source._cancel()


def broken_echo(root: Path, most: float) -> Config:
    """The same mix, but all episodes of `loud` fail. `most` is the limit of `echo` and `again`, and that of `loud`."""
    cfg = mixed(root)
    (root / "broken.jsonl").write_text(json.dumps({"prompt": "a", "do": "raise", "at": 0}))
    cfg.data.mix["loud"].files = [str(root / "broken.jsonl")]
    for name in ("echo", "again", "loud"):
        cfg.data.mix[name].environment.max_error_rate = most
    return cfg


@MODES
def test_episodes_that_fail_are_a_share_of_all_sources_with_environments(tmp_path, model, mode, caplog):
    """Two environments serve three sources, which have 10 episodes."""
    with failing(broken_echo(tmp_path, 0.5), model, mode) as source:
        failed = sum(bool(episode.failure) for episode in source.next(1))
    assert 0 < failed <= 4
    assert f"{failed} of {failed} episodes of step 1 for loud (100.0%) failed and have a reward of 0" in caplog.text
    sentence = (
        rf"=0.1: {failed} of 10 episodes of step 1 \(.*%\) failed, {failed} of them for loud \(the first: reset rais"
    )
    with failing(broken_echo(tmp_path, 0.1), model, mode) as source, pytest.raises(UserError, match=sentence):
        source.next(1)


@MODES
def test_a_source_whose_episodes_all_fail_is_not_hidden_by_the_others(tmp_path, model, mode):
    cfg = broken_echo(tmp_path, 0.9)
    cfg.trainer.train_batch_size *= 4
    sentence = r"=0.9: (\d+) of \1 episodes of step 1 for loud \(100.0%\) failed"
    with failing(cfg, model, mode) as source, pytest.raises(UserError, match=sentence):
        source.next(1)


def test_a_source_with_a_limit_of_its_own_is_judged_by_itself(tmp_path, model):
    cfg = broken_echo(tmp_path, 0.5)
    cfg.data.mix["loud"].environment.max_error_rate = 0.6
    with (
        failing(cfg, model) as source,
        pytest.raises(UserError, match=r"=0.6: (\d) of \1 episodes of step 1 \(100.0%\)"),
    ):
        source.next(1)


@MODES
def test_rewards_that_fail_are_a_share_of_all_sources_with_rewards(tmp_path, model, monkeypatch, mode):
    """Sources with environments do not make up for them."""
    monkeypatch.setenv("BROKEN_LENGTH", "1")
    cfg = mixed(tmp_path)
    cfg.data.mix["plain"].reward = RewardConfig(name="tests.support.named_rewards:length_unless_broken")
    sentence = r"=0.2: 6 of 6 rewards of step 1 \(100.0%\) failed, 6 of them for plain"
    with failing(cfg, model, mode) as source, pytest.raises(UserError, match=sentence):
        source.next(1)
