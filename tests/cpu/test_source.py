"""The order of prompts: every one once an epoch, whatever happens to the run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.datasets import Prompt
from trainer.data.source import PromptSource
from trainer.errors import UserError
from trainer.experience import choose_groups
from trainer.keyed import request_seed


def prompts(count: int, answer: str = "") -> list[Prompt]:
    # Indices with gaps, as over-long prompts leave them.
    return [Prompt(3 * i, (i, i + 1), str(i), answer) for i in range(count)]


def train(source: PromptSource, batch: int) -> list[str]:
    drawn = source.take(batch)
    source.commit(drawn)
    return [d.uid for d in drawn]


@settings(deadline=None)  # the machine may be busy
@given(
    size=st.integers(1, 30),
    seed=st.integers(0, 5),
    steps=st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 3)), min_size=1, max_size=12),
)
def test_none_is_skipped_and_none_repeated_over_kills(size, seed, steps):
    source = PromptSource(prompts(size), seed)
    seen: list[str] = []
    for batch, killed, ahead in steps:
        saved = json.dumps(source.state_dict())
        source.take(batch * ahead)  # looking ahead changes nothing
        if killed:  # during the step: what was taken is not trained on, and comes again
            in_flight = [d.uid for d in source.take(batch)]
            source = PromptSource(prompts(size), seed)
            source.load_state_dict(json.loads(saved))
            assert [d.uid for d in source.take(batch)] == in_flight
        seen += train(source, batch)
    uninterrupted = PromptSource(prompts(size), seed)
    assert seen == [d.uid for d in uninterrupted.take(len(seen))]
    assert len(set(seen)) == len(seen)
    for epoch in range(len(seen) // size):
        indices = seen[epoch * size : (epoch + 1) * size]
        assert sorted(indices) == sorted(f"{epoch}:{3 * i}" for i in range(size))
    assert source.epoch == pytest.approx(len(seen) / size)


def test_a_drawn_prompt_is_the_one_its_name_says():
    for drawn in PromptSource(prompts(7), 1).take(20):
        assert drawn.uid.split(":")[1] == str(drawn.prompt.index)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(d.prompt.index for d in PromptSource(prompts(20), seed).take(60)[at : at + 20])
              for seed in (0, 1) for at in (0, 20, 40)}  # fmt: skip
    assert len(orders) == 6


def test_the_order_does_not_change():
    """Checkpoints stand on it: a run resumed with another version would skip and repeat prompts."""
    assert [d.prompt.index // 3 for d in PromptSource(prompts(8), 1).take(10)] == [2, 0, 7, 5, 6, 4, 3, 1, 4, 6]


def test_every_completion_has_a_seed_of_its_own_and_keeps_it():
    names = [
        (seed, step, uid, i) for seed in (1, 2) for step in (1, 2) for uid in ("0:3", "1:3", "0:4") for i in (0, 1)
    ]
    assert len({request_seed(*name) for name in names}) == len(names)
    assert request_seed(1, 2, "0:3", 4) == 4388807139637722315, "a resumed run would sample something else"


def test_only_what_was_taken_can_be_committed():
    source = PromptSource(prompts(5), 1)
    with pytest.raises(AssertionError):
        source.commit(source.take(3)[1:])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (PromptSource(prompts(5), 2), "trainer.seed: .*seed 2 instead of 1"),
        (PromptSource(prompts(6), 1), "data: the number of prompts .*6 instead of 5"),
        (PromptSource(prompts(5, "other answer"), 1), "data: the prompts' content"),
        (PromptSource(prompts(5)[::-1], 1), "data: the prompts' content"),
    ],
)
def test_other_data_or_seed_is_refused(other, message):
    source = PromptSource(prompts(5), 1)
    train(source, 3)
    with pytest.raises(UserError, match=message):
        other.load_state_dict(source.state_dict())
    assert other.epoch == 0


def test_another_format_is_refused():
    source = PromptSource(prompts(5), 1)
    with pytest.raises(UserError, match="data: .* has format 2, this version reads 1"):
        source.load_state_dict({**source.state_dict(), "format": 2})


def worst_first(prompts, epoch: int, rewards) -> list[int]:
    """Prompts that went well are left out, the others come in the order of their rewards."""
    places = [place for place in range(len(prompts)) if rewards.get(place, 0.0) < 0.75]
    return sorted(places, key=lambda place: (rewards.get(place, 0.0), (place * 7 + epoch) % 5)) or [0]


@settings(deadline=None)
@given(
    size=st.integers(1, 20),
    batch=st.integers(1, 15),
    steps=st.integers(1, 12),
    kills=st.sets(st.integers(0, 11)),
    every=st.integers(1, 3),
)
def test_a_curriculum_that_goes_by_rewards_is_the_same_over_kills(size, batch, steps, kills, every):
    def reward(uid: str) -> float:
        epoch, index = map(int, uid.split(":"))
        return (index * 31 + epoch * 17) % 8 / 8

    def run(kills: set[int]) -> list[list[str]]:
        source = PromptSource(prompts(size), 1, worst_first)
        saved, committed, done = json.dumps(source.state_dict()), [], 0
        while len(committed) < steps:
            drawn = source.take(batch)
            if len(committed) in kills:
                kills = kills - {len(committed)}
                source = PromptSource(prompts(size), 1, worst_first)
                source.load_state_dict(json.loads(saved))
                del committed[done:]
                continue
            source.commit(drawn, [reward(d.uid) for d in drawn])
            committed.append([d.uid for d in drawn])
            if len(committed) % every == 0:
                saved, done = json.dumps(source.state_dict()), len(committed)
        return committed

    whole = run(set())
    assert run(kills) == whole
    names = [uid for step in whole for uid in step]
    assert len(set(names)) == len(names)
    first = [uid for uid in names if uid.startswith("0:")]
    assert first == [f"0:{3 * i}" for i in worst_first(range(size), 0, {})][: len(first)]


def test_a_curriculum_has_an_effect_and_bounds():
    source = PromptSource(prompts(4), 1, lambda prompts, epoch, rewards: [3, 1] if not rewards else [max(rewards)])
    assert [d.uid for d in source.take(2)] == ["0:9", "0:3"]
    source.commit(source.take(2), [0.5, 1.0])
    assert source.epoch == 1
    assert [d.uid for d in source.take(2)] == ["1:9", "2:9"]
    for wrong in ([], [4], [-1], [1, 1]):
        with pytest.raises(UserError, match=r"data.curriculum: for epoch 0 it gave \d places.*from 0 to 3"):
            PromptSource(prompts(4), 1, lambda *_, wrong=wrong: wrong).take(1)
    with pytest.raises(UserError, match="data.curriculum=mine: failed for epoch 0 .ZeroDivisionError"):
        PromptSource(prompts(4), 1, lambda *_: [1 // 0], "mine").take(1)


@pytest.mark.parametrize("before, now", [(None, "a:f"), ("a:f", None), ("a:f", "a:g")])
def test_a_run_goes_on_with_its_own_curriculum_alone(before, now):
    sources = [PromptSource(prompts(4), 1, worst_first if name else None, name or "") for name in (before, now)]
    with pytest.raises(UserError, match=f"data.curriculum={now}: the run was saved with {before}"):
        sources[1].load_state_dict(sources[0].state_dict())


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 12),
    wanted=st.integers(1, 5),
    batches=st.integers(1, 4),
    steps=st.integers(1, 8),
    dull=st.sets(st.integers(0, 11)),
    kills=st.lists(st.integers(0, 30), max_size=6),
)
def test_steps_that_draw_several_batches_skip_and_repeat_nothing_whatever_is_killed(
    size, wanted, batches, steps, dull, kills
):
    """Dynamic sampling: the ledger counts what committed steps used, kills in between change nothing."""

    def run(kills: list[int]) -> list[list[str]]:
        committed: list[list[str]] = []
        saved = PromptSource(prompts(size), 1).state_dict()
        saved_steps, moment = 0, 0
        source = PromptSource(prompts(size), 1)
        while len(committed) < steps:
            drawn: list = []
            for batch in range(1, batches + 1):
                moment += 1
                drawn += source.take(wanted, skip=len(drawn))
                rewards = np.array([[0.0, float(d.prompt.index // 3 not in dull)] for d in drawn])
                chosen = choose_groups(rewards, wanted, complete=batch == batches)
                if chosen is not None:
                    break
            if moment in kills:  # dies before the commit; comes back from the last checkpoint
                kills = [k for k in kills if k != moment]
                source = PromptSource(prompts(size), 1)
                source.load_state_dict(saved)
                del committed[saved_steps:]
                continue
            groups, count = chosen
            assert len(groups) == wanted and groups == sorted(set(groups)) and groups[-1] < count <= len(drawn)
            source.commit(drawn[:count])
            committed.append([d.uid for d in drawn[:count]])
            if len(committed) % 2 == 0:
                saved, saved_steps = json.loads(json.dumps(source.state_dict())), len(committed)
        used = [uid for step in committed for uid in step]
        assert used == [d.uid for d in PromptSource(prompts(size), 1).take(len(used))], (
            "a prompt was skipped or came twice"
        )
        return committed

    assert run(kills) == run([])
