"""Which groups of completions a step trains on, and how they get their rewards."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.replies import sampling_source, source_of
from tests.support.runs import configured
from trainer.config import DataConfig, RewardConfig, TinyConfig
from trainer.data.ledger import SampleIndex
from trainer.generation.engine import Completion, Request, Sampling
from trainer.models.tiny import build_tiny
from trainer.models.tokenizer import load_tokenizer
from trainer.seeding import request_seed
from trainer.sources.dynamic_sampling import choose_groups
from trainer.sources.sampling import SamplingSource, prompt_ledger
from trainer.sources.transcripts import TranscriptLog


def test_the_first_groups_that_teach_something_are_chosen():
    same, mixed = [1.0, 1.0], [0.0, 1.0]
    assert choose_groups(np.array([mixed, same, mixed, mixed]), 2, complete=False) == ([0, 2], 3)
    assert choose_groups(np.array([mixed, same, same]), 2, complete=False) is None
    assert choose_groups(np.array([same, same, mixed]), 2, complete=True) == ([0, 2], 3)
    assert choose_groups(np.array([same, same, same]), 2, complete=True) == ([0, 1], 3)


REWARD = """
from pathlib import Path

def plain(completion, row, **given):
    return float(completion)

def group(completions, row):
    Path({seen!r}, completions[0]).touch()
    return [float(text) + len(completions) / 100 for text in completions]
"""


class Engines:
    """Completions of two digits, the place of the request, one after another; the last one after some rewards.

    Args:
        order: of the places.
        seen: the reward leaves a file here for each group.
        before_last: the groups whose rewards are there before the last completion.
    """

    def __init__(self, tokenizer: Any, order: Sequence[int], seen: Path, before_last: int = 0):
        self._tokenizer, self._order, self._seen, self._before_last = tokenizer, order, seen, before_last
        self.awake = contextlib.nullcontext

    def stream(self, requests: Sequence[Request], sampling: Any) -> Iterator[dict[int, Completion]]:
        for number, place in enumerate(self._order, start=1):
            while number == len(self._order) and len(list(self._seen.iterdir())) < self._before_last:
                threading.Event().wait(0.01)
            tokens = self._tokenizer.encode(f"{place:02}", add_special_tokens=False)
            yield {place: Completion(tokens, [-1.0] * len(tokens), "stop", 1)}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyConfig(hidden_size=64, intermediate_size=128), path)
    return path


def rewards(tmp_path: Path, model: str, order: Sequence[int], before_last: int = 0) -> list[tuple[str, float]]:
    """The rewards of three groups of two completions, which are complete in this order."""
    seen = tmp_path / "seen"
    seen.mkdir()
    (tmp_path / "streamed_rewards.py").write_text(REWARD.format(seen=str(seen)))
    cfg = configured(tmp_path / "run", train_batch_size=3, mini_batch_size=3, val_interval=-1)
    cfg.rollout.n = 2
    cfg.data = DataConfig(synthetic="arithmetic", synthetic_args={"max_value": 9}, train_size=3, val_size=1)
    cfg.reward = RewardConfig(name=["streamed_rewards:group", "streamed_rewards:plain"], num_processes=2)
    engines = Engines(load_tokenizer(model), order, seen, before_last)
    with sampling_source(cfg, engines, model) as source:
        episodes = source.next(1)
        engines.shutdown = lambda: None
    assert sorted(path.name for path in seen.iterdir()) == ["00", "02", "04"], "a group is judged once, as a whole"
    return [(episode.uid, episode.reward) for episode in episodes]


def test_rewards_are_computed_while_completions_are_generated(tmp_path, model, monkeypatch):
    """The engine gives its last completion after the rewards of all groups that are complete without it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    found = rewards(tmp_path, model, order=[0, 2, 3, 4, 1, 5], before_last=2)
    assert [reward for _, reward in found] == pytest.approx([2 * place + 0.02 for place in range(6)])


def test_rewards_do_not_depend_on_the_order_of_completions(tmp_path, model, monkeypatch):
    results = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0]):
        root = tmp_path / str(order[0])
        root.mkdir()
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(root))
            results.append(rewards(root, model, order))
    assert results[0] == results[1]


def test_the_baseline_of_remax_is_the_shaped_reward_of_a_greedy_episode(tmp_path, model):
    """It is compared with shaped rewards. The penalty of 8 tokens of at most 8 is the whole factor."""

    def reply(prompt: str, number: int, sampling: Sampling) -> str:
        if sampling.temperature == 0.0:
            return "a" * {"p0": 8, "p1": 7}.get(prompt, 2)
        return "ab"

    with source_of(tmp_path, model, reply, needs_baselines=True) as source:
        source.cfg.trainer.train_batch_size = 12
        a = source.cfg.algorithm
        a.overlong_buffer, a.overlong_factor = 2, 3.0
        episodes = source.next(1)
        assert len(set(source.runner.engines.seeds)) == 3 * 12, "the greedy episodes have seeds of their own"
        assert {episode.reward for episode in episodes} == {2.0}
        row = {episode.group: source.prompts[int(episode.group.split(":")[1])].text for episode in episodes}
        baselines = {row[episode.group]: episode.baseline for episode in episodes}
        assert baselines == {f"p{i}": {0: 8 - 3.0, 1: 7 - 1.5}.get(i, 2.0) for i in range(12)}
    with source_of(tmp_path, model, reply) as source:
        assert {episode.baseline for episode in source.next(1)} == {None}


def test_each_prompt_has_its_own_baseline_when_others_are_left_out(tmp_path, model):
    """Every second prompt teaches nothing, so that draws and episodes count differently."""

    def reply(prompt: str, number: int, sampling: Sampling) -> str:
        place = int(prompt[1:])
        return "a" * (1 + place % 7 if sampling.temperature == 0.0 else 1 + number * (place % 2))

    with source_of(tmp_path, model, reply, needs_baselines=True) as source:
        source.cfg.trainer.train_batch_size = 4
        a = source.cfg.algorithm
        a.dynamic_sampling, a.max_gen_batches = True, 3
        episodes = source.next(1)
        rows = [int(episode.group.split(":")[1]) for episode in episodes]
        assert len(set(rows)) == 4 and all(row % 2 for row in rows)
        assert [episode.baseline for episode in episodes] == [1 + row % 7 for row in rows]


def test_prompts_completions_and_rewards_belong_together_when_others_are_left_out(tmp_path, model):
    """In the recorded rollouts, and in what the curriculum is told of all prompts that the step has used up."""

    def reply(prompt: str, number: int, sampling: Sampling) -> str:
        place = int(prompt[1:])
        return "abcdefghijkl"[place] * (1 + number * (place % 2))

    with source_of(tmp_path, model, reply) as source:
        cfg = source.cfg
        cfg.trainer.train_batch_size, cfg.logger.save_rollouts = 4, True
        cfg.algorithm.dynamic_sampling, cfg.algorithm.max_gen_batches = True, 3
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
        told = [1.0 + row % 2 / 2 if row in used else None for row in range(12)]
        assert source.state_dict()["curriculum"]["rewards"] == told
    lines = [json.loads(line) for line in (tmp_path / "run/rollouts/step_1.jsonl").read_text().splitlines()]
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
    algorithm.dynamic_sampling, algorithm.max_gen_batches = is_dynamic, batches

    def begin() -> dict[str, Any]:
        source.ledger = prompt_ledger(source.cfg, source.prompts[:size])
        return source.state_dict()

    def run(kills: set[int]) -> list[list[tuple[str, float, int]]]:
        committed: list[list[tuple[str, float, int]]] = []
        saved, saved_steps, moment = begin(), 0, 0
        before = source.ledger.peek(200)
        while len(committed) < steps:
            moment += 1
            source.runner.engines.seeds.clear()
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
            sampled = sorted(source.runner.engines.seeds)
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
    """The step trains on the first prompts of those it has used up that teach something, as far as there are enough."""
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
        assert source.runner.engines.seeds == [
            request_seed(source.cfg.trainer.seed, step, f"{draw.epoch}:{draw.index}", number)
            for step in (4, 5)
            for draw in draws
            for number in range(2)
        ]
        assert len(set(source.runner.engines.seeds)) == 12
