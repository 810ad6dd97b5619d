"""Episodes that come from the journal, and those that are generated besides."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cpu.unit.data.test_records import bits
from tests.support.replies import evaluator_beside, source_of
from trainer.data.datasets import Prompt
from trainer.environments.episode_runner import RolloutRequest
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.generation.engine import Sampling
from trainer.journal.history import Identity
from trainer.journal.journal import Journal
from trainer.process import time_limits
from trainer.sources.recorded import RecordedGroups


def chance(prompt: str, number: int, sampling: Sampling) -> str:
    """A reply that is another each time."""
    return os.urandom(4).hex()[: 1 + number * int(prompt[1:]) % 3]


def journal_in(root: Path) -> Journal:
    journal = Journal(str(root / "run"), Identity("", ""), lambda: None)
    journal.start(0, "start")
    return journal


def two_steps(root: Path, model: str, edit: Any = lambda cfg: None) -> tuple[Any, int]:
    """Two steps of a run from its start, and an evaluation; returns all episodes, and how many were generated.

    The engines are woken only in the steps and evaluations that generate.
    """
    woken: list[None] = []

    @contextlib.contextmanager
    def awake() -> Iterator[None]:
        woken.append(None)
        yield

    journal = journal_in(root)
    with source_of(root, model, chance, validation=3, needs_baselines=True, journal=journal) as source:
        cfg, source.runner.engines.awake = source.cfg, awake
        cfg.trainer.train_batch_size, cfg.rollout.val_n = 4, 2
        cfg.algorithm.dynamic_sampling, cfg.algorithm.max_gen_batches = True, 3
        edit(cfg)
        episodes: list[Any] = []
        for step in (1, 2):
            trained = source.next(step)
            journal.wait()
            source.commit(step)
            journal.trained(trained)
            evaluation = evaluator_beside(source, model).evaluate(step)
            episodes += [trained, evaluation.greedy, evaluation.sampled, evaluation.metrics]
        journal.close()
        assert len(woken) == (4 if source.runner.engines.seeds else 0)
        return bits(episodes), len(source.runner.engines.seeds)


def test_a_run_that_starts_again_gets_all_its_episodes_back(tmp_path, model):
    """Batches of dynamic sampling, baselines and validation too, from engines that never repeat themselves."""
    first, generated = two_steps(tmp_path, model)
    again, none = two_steps(tmp_path, model)
    assert again == first and generated > 40 and none == 0
    other, all_of_them = two_steps(tmp_path, model, lambda cfg: setattr(cfg.rollout, "temperature", 0.5))
    assert other != first and all_of_them > 20, "another sampling"


def test_a_row_that_was_edited_is_generated_again(tmp_path, model):
    with source_of(tmp_path, model, chance, journal=(journal := journal_in(tmp_path))) as source:
        source.cfg.trainer.train_batch_size = 12
        source.next(1)
        journal.close()
    with source_of(tmp_path, model, chance, journal=journal_in(tmp_path)) as source:
        source.cfg.trainer.train_batch_size = 12
        source.prompts[3].row["note"] = "read by a reward"
        source.next(1)
        assert len(source.runner.engines.seeds) == 2, "its completions alone"


def test_a_step_that_was_cut_off_keeps_its_finished_groups(tmp_path, model, monkeypatch):
    monkeypatch.setattr(time_limits, "JOURNAL_FLUSH_S", 0.0)
    asked: list[str] = []

    def cut_off(prompt: str, number: int, sampling: Sampling) -> str:
        asked.append(prompt)
        if len(asked) > 24 + 14:  # in the second step: the reward processes run
            if any(name.startswith("step_2-") for name in os.listdir(tmp_path / "run/.journal")):
                raise KeyboardInterrupt
            time.sleep(0.5)
        return chance(prompt, number, sampling)

    with source_of(tmp_path, model, cut_off, journal=(journal := journal_in(tmp_path))) as source:
        source.cfg.trainer.train_batch_size = 12
        first = source.next(1)
        journal.wait()
        with pytest.raises(KeyboardInterrupt):
            source.next(2)
        journal.close()
    with source_of(tmp_path, model, chance, journal=journal_in(tmp_path)) as source:
        source.cfg.trainer.train_batch_size = 12
        assert bits(source.next(1)) == bits(first) and not source.runner.engines.seeds
        assert len(source.next(2)) == 24 and 0 < len(source.runner.engines.seeds) < 24


def test_rewards_that_fail_are_kept_only_once_the_step_accepts_them(tmp_path, model, monkeypatch):
    """A step that ends because too many fail gets new ones, when the reward is repaired."""
    monkeypatch.setattr(time_limits, "JOURNAL_FLUSH_S", 0.0)

    def run(broken: bool, most: float) -> tuple[list[Any], int]:
        monkeypatch.setenv("BROKEN_LENGTH", "1" if broken else "")
        with source_of(
            tmp_path, model, chance, journal=(journal := journal_in(tmp_path)), reward="length_unless_broken"
        ) as source:
            source.cfg.reward.max_error_rate = most
            try:
                return source.next(1), len(source.runner.engines.seeds)
            finally:
                journal.close()

    with pytest.raises(UserError, match="max_error_rate"):
        run(broken=True, most=0.0)
    accepted, generated = run(broken=True, most=1.0)
    assert generated and any(episode.failure for episode in accepted)
    again, generated = run(broken=False, most=0.0)
    assert bits(again) == bits(accepted) and not generated


def test_failures_are_a_share_of_the_whole_step_with_what_the_journal_has(tmp_path, model, monkeypatch):
    """So a step that was cut off ends the run no sooner than it would have without the kill."""
    for size, broken, generated in ((10, "", 20), (12, "1", 4)):
        monkeypatch.setenv("BROKEN_LENGTH", broken)
        journal = journal_in(tmp_path)
        with source_of(tmp_path, model, chance, journal=journal, reward="length_unless_broken") as source:
            source.cfg.trainer.train_batch_size, source.cfg.reward.max_error_rate = size, 0.2
            episodes = source.next(1)
            assert len(source.runner.engines.seeds) == generated
            journal.close()
    assert sum(bool(episode.failure) for episode in episodes) == 2, "half of those that were generated"


def test_an_episode_is_given_once_while_it_waits_for_its_group(tmp_path):
    """A group that is given in parts, in any order, is recorded when it is complete; one with a failure is not yet."""
    journal, prompt = journal_in(tmp_path), Prompt(0, (1,), "p", "x")
    requests = [
        RolloutRequest(prompt, f"0:{group}", 1, number, Sampling(1.0, 1.0, -1, 8, ()))
        for group in range(2)
        for number in range(3)
    ]
    sample = Sample(np.zeros(2, np.int32), np.ones(2, np.float32))
    episodes = [Episode(request.uid, request.group, [sample], failure="why" if i == 3 else "")
                for i, request in enumerate(requests)]  # fmt: skip
    recorded = RecordedGroups(journal, requests)
    for index in (2, 3, 0, 5, 4):
        assert recorded.lacks(index)
        recorded.keep({index: episodes[index]})
        assert not recorded.lacks(index)
    recorded.keep({1: episodes[1]})
    journal.wait()
    found = RecordedGroups(journal_in(tmp_path), requests)
    assert found.missing == requests[3:]
    recorded.keep_rest(episodes)
    journal.close()
    whole = RecordedGroups(journal_in(tmp_path), requests)
    assert not whole.missing and bits(whole.keep_rest([])) == bits(episodes)
