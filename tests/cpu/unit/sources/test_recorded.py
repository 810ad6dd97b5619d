"""Episodes that come from the journal, and those that are generated besides."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cpu.unit.data.test_records import bits
from tests.support.replies import evaluator_beside, source_of
from trainer.data.datasets import Prompt
from trainer.data.records import decode_groups
from trainer.environments.episode_runner import RolloutRequest
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.generation.engine import Completion, Request, Sampling
from trainer.journal.history import Identity
from trainer.journal.journal import Journal
from trainer.process import time_limits
from trainer.sources.recorded import RecordedEpisodes

SAMPLING = Sampling(1.0, 1.0, -1, 8, ())


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


@pytest.mark.parametrize(("reward", "lost"), [("length", 0), ("rank", 1)])
def test_a_kill_costs_no_finished_episode_unless_its_reward_needs_the_group(
    tmp_path, model, monkeypatch, caplog, reward, lost
):
    """Killed behind the first episode of the second group."""
    monkeypatch.setattr(time_limits, "JOURNAL_FLUSH_S", 0.0)
    caplog.set_level("INFO")
    journal = journal_in(tmp_path)

    def recorded() -> int:
        pieces = journal._pieces
        return sum(len(one) for name in pieces.names() for one in decode_groups(pieces.read(name))[0].values())

    with source_of(tmp_path, model, chance, journal=journal, reward=reward) as source:
        source.cfg.trainer.train_batch_size, stream = 5, source.runner.engines.stream

        def cut_off(requests: Sequence[Request], idle_s: float) -> Iterator[dict[int, Completion]]:
            yield from itertools.islice(stream(requests), 3)
            end = time.monotonic() + 60
            while recorded() < 3 - lost:
                assert time.monotonic() < end
                time.sleep(0.02)
                yield {}
            raise KeyboardInterrupt

        source.runner.engines.stream = cut_off
        with pytest.raises(KeyboardInterrupt):
            source.next(1)
        journal.close()
    assert recorded() == 3 - lost
    with source_of(tmp_path, model, chance, journal=(journal := journal_in(tmp_path)), reward=reward) as source:
        source.cfg.trainer.train_batch_size = 5
        episodes = source.next(1)
        assert len(source.runner.engines.seeds) == 10 - 3 + lost
        journal.close()
    assert [episode.uid.rpartition(":")[2] for episode in episodes] == ["0", "1"] * 5
    part, generated = ("", 4) if lost else (", 1 in part", 3)
    assert f"1 groups came from the journal{part} and {generated} were generated" in caplog.text
    with source_of(tmp_path, model, chance, journal=journal_in(tmp_path), reward=reward) as source:
        source.cfg.trainer.train_batch_size = 5
        assert bits(source.next(1)) == bits(episodes) and not source.runner.engines.seeds


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


def test_rewards_that_succeed_are_kept_when_too_many_others_fail(tmp_path, model, monkeypatch):
    """Also those that became known since the journal was last looked after."""
    monkeypatch.setattr(time_limits, "JOURNAL_FLUSH_S", 3600.0)
    generated = []
    for broken in ("1", ""):
        monkeypatch.setenv("BROKEN_LENGTH", broken)
        journal = journal_in(tmp_path)
        with source_of(tmp_path, model, chance, journal=journal, reward="length_unless_broken") as source:
            source.cfg.trainer.train_batch_size, source.cfg.reward.max_error_rate = 12, 0.0
            with pytest.raises(UserError, match="max_error_rate") if broken else contextlib.nullcontext():
                source.next(1)
            generated.append(len(source.runner.engines.seeds))
            journal.close()
    failed = sum(len(chance(f"p{prompt}", number, SAMPLING)) == 1 for prompt in range(12) for number in range(2))
    assert generated == [24, failed] and 0 < failed < 24


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
    requests = [RolloutRequest(prompt, f"0:{group}", 1, number, SAMPLING) for group in range(2) for number in range(3)]
    sample = Sample(np.zeros(2, np.int32), np.ones(2, np.float32))
    episodes = [Episode(request.uid, request.group, [sample], failure="why" if i == 3 else "")
                for i, request in enumerate(requests)]  # fmt: skip
    recorded = RecordedEpisodes(journal, requests)
    for index in (2, 3, 0, 5, 4):
        assert recorded.lacks(index)
        recorded.keep({index: episodes[index]})
        assert not recorded.lacks(index)
    recorded.keep({1: episodes[1]})
    journal.wait()
    found = RecordedEpisodes(journal_in(tmp_path), requests)
    assert found.missing == requests[3:]
    recorded.keep_rest(episodes)
    journal.close()
    whole = RecordedEpisodes(journal_in(tmp_path), requests)
    assert not whole.missing and bits(whole.keep_rest([])) == bits(episodes)


def test_sources_record_their_episodes_one_by_one_or_in_groups(tmp_path):
    """Of two groups of each source, one episode of each has ended before a kill."""
    journal = journal_in(tmp_path)
    requests = [
        RolloutRequest(Prompt(group, (1,), "p", "x", source=source), f"0:{group}", 1, number, SAMPLING)
        for group, source in enumerate("abab")
        for number in range(2)
    ]
    sample = Sample(np.zeros(2, np.int32), np.ones(2, np.float32))
    episodes = [Episode(request.uid, request.group, [sample]) for request in requests]

    def of_call() -> RecordedEpisodes:
        return RecordedEpisodes(journal_in(tmp_path), requests, are_single=lambda source: source == "a")

    recorded = RecordedEpisodes(journal, requests, are_single=lambda source: source == "a")
    recorded.keep({index: episodes[index] for index in (1, 2, 4, 7)})
    journal.wait()
    again = of_call()
    assert again.missing_indices == [0, 2, 3, 5, 6, 7], "1 and 4 are of the source whose episodes are recorded alone"
    assert all(again.lacks(position) for position in range(6))
    again.keep({3: episodes[5]})
    assert not again.lacks(3) and again.lacks(2)
    recorded.keep_rest(episodes)
    journal.close()
    whole = of_call()
    assert not whole.missing and bits(whole.keep_rest([])) == bits(episodes)
