"""Which episodes a step trains on, and which rows it uses up."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.replies import source_of
from tests.support.runs import rollouts_of
from trainer.data.ledger import SampleIndex
from trainer.generation.engine import Sampling
from trainer.seeding import request_seed
from trainer.sources.routes import prompt_ledger
from trainer.sources.sampling import SamplingSource
from trainer.sources.transcripts import TranscriptLog


def test_the_baseline_of_remax_is_the_shaped_reward_of_a_greedy_episode(tmp_path, model):
    """The baseline is compared with shaped rewards. With 8 of at most 8 tokens, the penalty is the full factor."""

    def reply(prompt: str, number: int, sampling: Sampling) -> str:
        if sampling.temperature == 0.0:
            return "a" * {"p0": 8, "p1": 7}.get(prompt, 2)
        return "ab"

    with source_of(tmp_path, model, reply, needs_baselines=True) as source:
        source.cfg.trainer.train_batch_size = 12
        a = source.cfg.algorithm
        a.overlong_buffer, a.options["overlong_factor"] = 2, 3.0
        episodes = source.next(1)
        assert len(set(source.rollouts.engines.seeds)) == 3 * 12, "the greedy episodes have seeds of their own"
        assert {episode.reward for episode in episodes} == {2.0}
        row = {episode.group: source.prompts[int(episode.group.split(":")[1])].text for episode in episodes}
        baselines = {row[episode.group]: episode.baseline for episode in episodes}
        assert baselines == {f"p{i}": {0: 8 - 3.0, 1: 7 - 1.5}.get(i, 2.0) for i in range(12)}
    with source_of(tmp_path, model, reply) as source:
        assert {episode.baseline for episode in source.next(1)} == {None}


def test_each_prompt_has_its_own_baseline_when_others_are_left_out(tmp_path, model):
    """Every second prompt teaches nothing, so that draws and episodes count differently."""

    def reply(prompt: str, number: int, sampling: Sampling) -> str:
        index = int(prompt[1:])
        return "a" * (1 + index % 7 if sampling.temperature == 0.0 else 1 + number * (index % 2))

    with source_of(tmp_path, model, reply, needs_baselines=True) as source:
        source.cfg.trainer.train_batch_size = 4
        a = source.cfg.algorithm
        a.dynamic_sampling, a.options["max_gen_batches"] = True, 3
        episodes = source.next(1)
        rows = [int(episode.group.split(":")[1]) for episode in episodes]
        assert len(set(rows)) == 4 and all(row % 2 for row in rows)
        assert [episode.baseline for episode in episodes] == [1 + row % 7 for row in rows]


def test_prompts_completions_and_rewards_belong_together_when_others_are_left_out(tmp_path, model):
    """In the recorded rollouts, and in the rewards that the curriculum gets of all prompts that the step has used."""

    def reply(prompt: str, number: int, sampling: Sampling) -> str:
        index = int(prompt[1:])
        return "abcdefghijkl"[index] * (1 + number * (index % 2))

    with source_of(tmp_path, model, reply) as source:
        cfg = source.cfg
        cfg.trainer.train_batch_size, cfg.logger.save_rollouts = 4, True
        cfg.algorithm.dynamic_sampling, cfg.algorithm.options["max_gen_batches"] = True, 3
        cfg.data.curriculum = "tests.support.curriculum:hardest_first"
        source.ledger = prompt_ledger(cfg, source.prompts)
        order = [draw.index for draw in source.ledger.peek(12)]
        episodes = source.next(1)
        rows = list(dict.fromkeys(int(episode.group.split(":")[1]) for episode in episodes))
        assert rows == [row for row in order if row % 2][:4]
        source.commit(1)
        TranscriptLog(cfg, lambda: None).add_step(1, episodes)
        used = order[: order.index(rows[-1]) + 1]
        assert used != rows
        rewards = [1.0 + row % 2 / 2 if row in used else None for row in range(12)]
        assert source.state_dict()["curriculum"]["rewards"] == rewards
    lines = rollouts_of(tmp_path / "run", 1)
    assert [(line["prompt"][-1]["content"], line["completion"][0]["content"]) for line in lines] == [
        (f"p{row}", "abcdefghijkl"[row] * (1 + number)) for row in rows for number in range(2)
    ]


@pytest.fixture(scope="module")
def shared_source(tmp_path_factory, model) -> Iterator[tuple[SamplingSource, set[str]]]:
    """A source, and the prompts of which all completions are equal."""
    dull: set[str] = set()
    root = tmp_path_factory.mktemp("shared")
    with source_of(root, model, lambda prompt, number, _: "a" if prompt in dull or number == 0 else "bb") as source:
        yield source, dull


@settings(max_examples=20, deadline=None)
@given(
    size=st.integers(1, 12),
    wanted=st.integers(1, 5),
    batches=st.integers(1, 4),
    steps=st.integers(1, 6),
    dull=st.sets(st.integers(0, 11)),
    kills=st.sets(st.integers(1, 12), max_size=4),
    is_dynamic=st.booleans(),
)
def test_steps_that_draw_several_batches_skip_and_repeat_nothing_whatever_is_killed(
    shared_source, size, wanted, batches, steps, dull, kills, is_dynamic
):
    """The ledger counts what committed steps used up, and a step that is repeated has the same episodes."""
    source, dull_prompts = shared_source
    dull_prompts.clear()
    dull_prompts.update(f"p{i}" for i in dull)
    algorithm = source.cfg.algorithm
    source.cfg.trainer.train_batch_size = wanted
    algorithm.dynamic_sampling, algorithm.options["max_gen_batches"] = is_dynamic, batches

    def begin() -> dict[str, Any]:
        source.ledger = prompt_ledger(source.cfg, source.prompts[:size])
        return source.state_dict()

    def run(kills: set[int]) -> list[list[tuple[str, float, int]]]:
        committed: list[list[tuple[str, float, int]]] = []
        saved, saved_steps, moment = begin(), 0, 0
        before = source.ledger.peek(200)
        while len(committed) < steps:
            moment += 1
            source.rollouts.engines.seeds.clear()
            episodes = source.next(len(committed) + 1)
            if moment in kills:  # dies before the commit; comes back from the last checkpoint
                begin()
                source.load_state_dict(json.loads(json.dumps(saved)))
                del committed[saved_steps:]
                before = source.ledger.peek(200)
                continue
            assert source.ledger.peek(200) == before, "drawing has moved the ledger"
            source.commit(len(committed) + 1)
            after = source.ledger.peek(200)
            used = before[: next(n for n in range(len(before)) if before[n:] == after[: len(before) - n])]
            check_step(source, used, episodes, dull, wanted, batches if is_dynamic else 1, is_dynamic)
            before = after
            sampled = sorted(source.rollouts.engines.seeds)
            committed.append([(e.uid, e.reward, seed) for e, seed in zip(episodes, sampled, strict=False)])
            if len(committed) % 2 == 0:
                saved, saved_steps = source.state_dict(), len(committed)
        return committed

    assert run(kills) == run(set())


def check_step(
    source: SamplingSource,
    used: list[SampleIndex],
    episodes: Sequence[Any],
    dull: set[int],
    wanted: int,
    batches: int,
    is_dynamic: bool,
) -> None:
    """The step trains on the first used prompts with different rewards, if there are enough."""
    trained = list(dict.fromkeys(episode.group for episode in episodes))
    names = [f"{draw.epoch}:{draw.index}" for draw in used]
    assert len(trained) == wanted and [name for name in names if name in set(trained)] == trained
    telling = [name for name, draw in zip(names, used, strict=True) if draw.index not in dull or not is_dynamic]
    if len(telling) >= wanted:
        assert trained == telling[:wanted] and names[-1] == trained[-1], "no more is used up than was needed"
    else:
        assert set(telling) <= set(trained) and len(used) == wanted * batches


def test_every_step_prompt_and_completion_has_a_seed_of_its_own(tmp_path, model):
    """A resumed run draws the same numbers, and no step those of another."""
    with source_of(tmp_path, model, lambda *_: "ab") as source:
        source.cfg.trainer.train_batch_size = 3
        draws = source.ledger.peek(3)
        for step in (4, 5):  # the same prompts again: nothing was committed
            source.next(step)
            source.load_state_dict(source.state_dict())
        assert source.rollouts.engines.seeds == [
            request_seed(source.cfg.trainer.seed, step, f"{draw.epoch}:{draw.index}", number)
            for step in (4, 5)
            for draw in draws
            for number in range(2)
        ]
        assert len(set(source.rollouts.engines.seeds)) == 12
