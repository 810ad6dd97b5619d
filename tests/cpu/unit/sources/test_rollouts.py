"""The road of a rollout: from the journal, or run, scored and recorded while others are generated."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.unit.data.test_records import bits
from tests.support.replies import FakeEngines, evaluator_beside, journal_in, sampling_source, source_of
from tests.support.runs import configured
from trainer.config import DataConfig, RewardConfig
from trainer.data.records import decode_groups
from trainer.errors import UserError
from trainer.generation.engine import Completion, Request, Sampling
from trainer.journal.history import Identity
from trainer.journal.journal import Journal
from trainer.models.tokenizer import load_tokenizer
from trainer.process import time_limits

SAMPLING = Sampling(1.0, 1.0, -1, 8, ())
REWARD = """
from pathlib import Path

def plain(completion, row, **given):
    return float(completion)

def group(completions, row):
    Path({seen!r}, completions[0]).touch()
    return [float(text) + len(completions) / 100 for text in completions]
"""


class InOrder(FakeEngines):
    """Completions of two digits, the number of the request, one after another; the last one once `is_last_ready()`."""

    unit = "request"

    def __init__(self, tokenizer: Any, order: Sequence[int], is_last_ready: Any = lambda: True):
        super().__init__()
        self._tokenizer, self._order, self._is_last_ready = tokenizer, list(order), is_last_ready
        self._count = 0

    async def complete(self, request: Request) -> Completion:
        number, self._count = self._count, self._count + 1
        while self._order[0] != number or len(self._order) == 1 and not self._is_last_ready():
            await asyncio.sleep(0.005)
        self._order.pop(0)
        tokens = self._tokenizer.encode(f"{number:02}", add_special_tokens=False)
        return Completion(tokens, [-1.0] * len(tokens), "stop", 1)


def rewards(
    tmp_path: Path, model: str, order: Sequence[int], before_last: int = 0, recorded: int = 0
) -> list[tuple[str, float]]:
    """The rewards of three groups of two completions, which are complete in this order.

    Args:
        before_last: groups whose rewards are there before the last completion.
        recorded: groups that the journal has before it.
    """
    seen, run = tmp_path / "seen", tmp_path / "run"
    seen.mkdir()
    (tmp_path / "streamed_rewards.py").write_text(REWARD.format(seen=str(seen)))
    cfg = configured(run, train_batch_size=3, mini_batch_size=3, val_interval=-1)
    cfg.rollout.n = 2
    cfg.data = DataConfig(synthetic="arithmetic", synthetic_args={"max_value": 9}, train_size=3, val_size=1)
    cfg.reward = RewardConfig(name=["streamed_rewards:group", "streamed_rewards:plain"], num_processes=2)

    def is_last_ready() -> bool:
        return len(list(seen.iterdir())) >= before_last and len(recorded_in(run)) >= 2 * recorded

    journal = Journal(cfg.trainer.run_dir, Identity("", ""), lambda: None, is_on=recorded > 0)
    journal.start(0, "start")
    with sampling_source(cfg, InOrder(load_tokenizer(model), order, is_last_ready), model, journal=journal) as source:
        episodes = source.next(1)
        journal.close()
    assert sorted(path.name for path in seen.iterdir()) == ["00", "02", "04"], "a group is judged once, as a whole"
    return [(episode.uid, episode.reward) for episode in episodes]


def recorded_in(run: Path) -> list[str]:
    """The uids of the episodes in the journal of a run."""
    groups = [decode_groups(file.read_bytes())[0] for file in run.rglob("step_1-*.arrow")]
    return [episode.uid for one in groups for some in one.values() for episode in some]


@pytest.mark.parametrize(("order", "before_last", "recorded"), [([0, 2, 3, 4, 1, 5], 2, 0), (range(6), 0, 2)])
def test_groups_are_scored_and_recorded_while_others_are_generated(
    tmp_path, model, monkeypatch, order, before_last, recorded
):
    """The engine gives its last completion after the rewards, or records, of the other complete groups."""
    monkeypatch.syspath_prepend(str(tmp_path))
    found = rewards(tmp_path, model, order, before_last, recorded)
    assert [reward for _, reward in found] == pytest.approx([2 * number + 0.02 for number in range(6)])


def chance(prompt: str, number: int, sampling: Sampling) -> str:
    """A reply that is another each time."""
    return os.urandom(4).hex()[: 1 + number * int(prompt[1:]) % 3]


def two_steps(root: Path, model: str, edit: Any = lambda cfg: None) -> tuple[Any, int]:
    """Two steps of a run from its start, and an evaluation; returns all episodes, and how many were generated."""
    journal = journal_in(root)
    with source_of(root, model, chance, validation=3, needs_baselines=True, journal=journal) as source:
        cfg = source.cfg
        cfg.trainer.train_batch_size, cfg.rollout.val_n = 4, 2
        cfg.algorithm.dynamic_sampling, cfg.algorithm.options["max_gen_batches"] = True, 3
        edit(cfg)
        source.start(1, is_initial=True)
        episodes: list[Any] = []
        for step in (1, 2):
            trained = source.next(step)
            journal.wait()
            journal.trained(trained)
            source.publish(step + 1)
            source.commit(step)
            evaluation = evaluator_beside(source, model).evaluate(step)
            episodes += [trained, evaluation.greedy, evaluation.sampled, evaluation.metrics]
        journal.close()
        return bits(episodes), len(source.rollouts.engines.seeds)


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
        assert len(source.rollouts.engines.seeds) == 2, "its completions alone"


@pytest.mark.parametrize(("reward", "lost"), [("length", 0), ("rank", 1)])
def test_a_kill_costs_no_finished_episode_unless_its_reward_needs_the_group(
    tmp_path, model, monkeypatch, caplog, reward, lost
):
    """Killed behind the first episode of the second group, in whichever order episodes end."""
    monkeypatch.setattr(time_limits, "JOURNAL_FLUSH_S", 0.02)
    caplog.set_level("INFO")

    class CutOff(InOrder):
        async def complete(self, request: Request) -> Completion:
            if self._count >= 3:
                self._count += 1
                while len(recorded_in(tmp_path / "run")) < 3 - lost:
                    await asyncio.sleep(0.02)
                raise RuntimeError("killed")
            return await super().complete(request)

    def steps(engines: Any = None) -> tuple[Any, int]:
        journal = journal_in(tmp_path)
        with source_of(tmp_path, model, chance, journal=journal, reward=reward) as source:
            if engines is not None:
                source.rollouts.engines.unit, source.rollouts.engines.complete = "request", engines.complete
            source.cfg.trainer.train_batch_size = 5
            try:
                return source.next(1), len(source.rollouts.engines.seeds)
            finally:
                journal.close()

    with pytest.raises(RuntimeError, match="killed"):
        steps(CutOff(load_tokenizer(model), range(3)))
    assert len(recorded_in(tmp_path / "run")) == 3 - lost
    episodes, generated = steps()
    assert generated == 10 - 3, "a reply is sampled again"
    assert [episode.uid.rpartition(":")[2] for episode in episodes] == ["0", "1"] * 5
    assert "1 groups came from the journal and 4 were generated" in caplog.text, "one of them in part"
    again, generated = steps()
    assert bits(again) == bits(episodes) and generated == 0


def test_rewards_that_fail_are_kept_only_once_the_step_accepts_them(tmp_path, model, monkeypatch):
    """A step that ends because too many fail gets new ones, when the reward is repaired, for the same replies."""

    def run(broken: bool, most: float) -> tuple[list[Any], int]:
        monkeypatch.setenv("BROKEN_LENGTH", "1" if broken else "")
        journal = journal_in(tmp_path)
        with source_of(tmp_path, model, chance, journal=journal, reward="length_unless_broken") as source:
            source.cfg.trainer.train_batch_size, source.cfg.reward.max_error_rate = 12, most
            try:
                return source.next(1), len(source.rollouts.engines.seeds)
            finally:
                journal.close()

    with pytest.raises(UserError, match="max_error_rate"):
        run(broken=True, most=0.0)
    accepted, generated = run(broken=True, most=1.0)
    failed = sum(len(chance(f"p{prompt}", number, SAMPLING)) == 1 for prompt in range(12) for number in range(2))
    assert generated == 0 and 0 < failed < 24 and any(episode.failure for episode in accepted)
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
            assert len(source.rollouts.engines.seeds) == generated
            journal.close()
    assert sum(bool(episode.failure) for episode in episodes) == 2, "half of those that were generated"


def test_a_failure_of_the_engines_ends_all_groups(tmp_path, model):
    def broken(prompt: str, number: int, sampling: Sampling) -> str:
        raise RuntimeError("the engines are gone")

    with source_of(tmp_path, model, broken) as source:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the engines are gone"):
                source.next(1)
            source.load_state_dict(source.state_dict())
        with contextlib.suppress(Exception):
            source.publish(2)
