"""The order of rows: every one once an epoch, whatever happens to the run."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import DataConfig, SFTConfig
from trainer.data.datasets import load_prompts
from trainer.data.examples import load_train
from trainer.data.ledger import Ledger, SampleIndex, find_curriculum
from trainer.data.rollout_io import write_rollouts
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer
from trainer.sources.supervised import SupervisedSource


def ledger(count: int, seed: int = 1, curriculum=None, name: str = "", content: str = "rows") -> Ledger:
    return Ledger(
        range(count), seed, "prompts", lambda: f"{content} {count}", curriculum=curriculum, curriculum_name=name
    )


def train(source: Ledger, batch: int) -> list[SampleIndex]:
    drawn = source.peek(batch)
    source.commit(drawn)
    return drawn


@settings(deadline=None)  # the machine may be busy
@given(
    size=st.integers(1, 30),
    seed=st.integers(0, 5),
    steps=st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 3)), min_size=1, max_size=12),
)
def test_none_is_skipped_and_none_repeated_over_kills(size, seed, steps):
    source = ledger(size, seed)
    seen: list[SampleIndex] = []
    for batch, killed, ahead in steps:
        saved = json.dumps(source.state_dict())
        source.peek(batch * ahead)  # looking ahead changes nothing
        if killed:  # during the step: what was taken is not trained on, and comes again
            in_flight = source.peek(batch)
            source = ledger(size, seed)
            source.load_state_dict(json.loads(saved))
            assert source.peek(batch) == in_flight
        seen += train(source, batch)
    uninterrupted = ledger(size, seed)
    assert seen == uninterrupted.peek(len(seen))
    assert len(set(seen)) == len(seen)
    for epoch in range(len(seen) // size):
        draws = seen[epoch * size : (epoch + 1) * size]
        assert {draw.epoch for draw in draws} == {epoch} and sorted(draw.index for draw in draws) == list(range(size))
    assert source.epoch == pytest.approx(len(seen) / size)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(d.index for d in ledger(20, seed).peek(60)[at : at + 20]) for seed in (0, 1) for at in (0, 20, 40)}
    assert len(orders) == 6


def test_the_order_does_not_change():
    """Checkpoints stand on it: a run resumed with another version would skip and repeat prompts."""
    assert [d.index for d in ledger(8, 1).peek(10)] == [2, 0, 7, 5, 6, 4, 3, 1, 4, 6]


def test_no_row_can_be_committed_twice():
    source = ledger(5, 1)
    rows = source.peek(4)
    source.commit([rows[0], rows[2]])
    for trained in (rows[0], rows[2]):
        with pytest.raises(AssertionError, match="trained twice"):
            source.commit([trained])
    source = ledger(1, 1)
    source.commit(source.peek(2))
    with pytest.raises(AssertionError, match="trained twice"):
        source.commit([SampleIndex(0, 0, 0)])


def test_a_state_has_the_rows_behind_a_gap():
    source = ledger(5, 1)
    first, second, third = source.peek(3)
    source.commit([second])
    assert source.state_dict()["trained_ahead"] == [{"epoch": 0, "index": second.index}]
    assert source.peek(2) == [first, third] and source.epoch == pytest.approx(1 / 5)
    source.commit([first])
    in_order = ledger(5, 1)
    in_order.commit([first, second])
    assert source.state_dict() == in_order.state_dict()
    assert source.state_dict() == {
        "format": 1,
        "seed": 1,
        "rows": 5,
        "fingerprint": "rows 5",
        "epoch": 0,
        "position": 2,
        "trained_ahead": [],
    }


class AsyncRun:
    """Steps that are begun in order and finish in any order. A crash goes back to the last saved state."""

    def __init__(self, make: Callable[[], Ledger]):
        self._make = make
        self.ledger = make()
        self.steps: list[list[SampleIndex]] = []
        self.trained: list[SampleIndex] = []
        self._saved, self._trained_then = json.dumps(self.ledger.state_dict()), 0

    def begin(self, size: int) -> None:
        in_flight = [index for step in self.steps for index in step]
        self.steps.append(self.ledger.peek(size, in_flight))

    def finish(self, which: int) -> None:
        if self.steps:
            step = self.steps.pop(which % len(self.steps))
            self.ledger.commit(step, [reward_of(index) for index in step])
            self.trained += step

    def save(self) -> None:
        self._saved, self._trained_then = json.dumps(self.ledger.state_dict()), len(self.trained)

    def crash(self) -> None:
        self.ledger = self._make()
        self.ledger.load_state_dict(json.loads(self._saved))
        self.steps.clear()
        del self.trained[self._trained_then :]


def reward_of(index: SampleIndex) -> float:
    return (index.index * 31 + index.epoch * 17) % 8 / 8


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(1, 9)),  # elastic: every step has a size of its own
        st.tuples(st.just("finish"), st.integers(0, 5)),
        st.tuples(st.just("save"), st.just(0)),
        st.tuples(st.just("crash"), st.just(0)),
    ),
    max_size=30,
)


def play(run: AsyncRun, actions: list[tuple[str, int]]) -> None:
    for action, number in actions:
        getattr(run, action)(*([number] if action in ("begin", "finish") else []))
        assert len(set(run.trained)) == len(run.trained), "trained twice"
        in_flight = [index for step in run.steps for index in step]
        assert not set(in_flight) & set(run.trained), "sampled again"
    while run.steps:
        run.finish(-1)


@settings(deadline=None)
@given(size=st.integers(1, 9), kind=st.sampled_from(["prompts", "examples"]), actions=ACTIONS)
def test_steps_may_finish_in_any_order_and_crash_anywhere(size, kind, actions):
    """The rows that are trained, and those that come next, are together those of an uninterrupted run."""

    def make() -> Ledger:
        return Ledger(range(size), 1, kind, lambda: "rows")

    run = AsyncRun(make)
    play(run, actions)
    following = run.ledger.peek(12)
    uninterrupted = make().peek(len(run.trained) + 12)
    assert set(run.trained) | set(following) == set(uninterrupted)
    assert following == [index for index in uninterrupted if index not in set(run.trained)]
    assert run.ledger.epoch == pytest.approx(len(run.trained) / size)
    again = make()
    again.load_state_dict(json.loads(json.dumps(run.ledger.state_dict())))
    assert again.state_dict() == run.ledger.state_dict() and again.peek(12) == following


@settings(deadline=None)
@given(size=st.integers(1, 9), actions=ACTIONS)
def test_a_curriculum_trains_no_row_of_an_epoch_twice_whatever_the_order_of_steps(size, actions):
    """It may order an epoch again while steps that have sampled from it are under way."""
    run = AsyncRun(lambda: ledger(size, 1, worst_first))
    play(run, actions)
    first = [index.index for index in (*run.trained, *run.ledger.peek(size)) if index.epoch == 0]
    assert set(first) >= set(worst_first(range(size), 0, {})), "the first epoch has one order"
    again = ledger(size, 1, worst_first)
    again.load_state_dict(json.loads(json.dumps(run.ledger.state_dict())))
    assert again.peek(12) == run.ledger.peek(12)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ledger(5, 2), "trainer.seed: .*seed 2 instead of 1"),
        (ledger(6, 1), r"data: the number of prompts .*6 instead of 5"),
        (ledger(5, content="other"), "data: the prompts' content"),
    ],
)
def test_other_data_or_seed_is_refused(other, message):
    source = ledger(5, 1)
    train(source, 3)
    with pytest.raises(UserError, match=message):
        other.load_state_dict(source.state_dict())
    assert other.epoch == 0


def test_a_long_fingerprint_is_saved_and_shown_as_a_digest():
    long = "a row of the data, " * 1000
    source = Ledger(range(3), 1, "pairs", lambda: long)
    saved = source.state_dict()
    assert len(saved["fingerprint"]) == 32
    source.load_state_dict(saved)
    with pytest.raises(UserError, match="^data: the pairs' content is not that of the checkpoint") as refused:
        source.load_state_dict({**saved, "fingerprint": "another"})
    assert len(str(refused.value)) < 500


def test_another_format_is_refused():
    source = ledger(5, 1)
    with pytest.raises(UserError, match="data: .* has format 5, this version reads 1"):
        source.load_state_dict({**source.state_dict(), "format": 5})


def worst_first(prompts, epoch: int, rewards) -> list[int]:
    """Prompts that went well are left out, the others come in the order of their rewards."""
    indices = [index for index in range(len(prompts)) if rewards.get(index, 0.0) < 0.75]
    return sorted(indices, key=lambda index: (rewards.get(index, 0.0), (index * 7 + epoch) % 5)) or [0]


@settings(deadline=None)
@given(
    size=st.integers(1, 20),
    batch=st.integers(1, 15),
    steps=st.integers(1, 12),
    kills=st.sets(st.integers(0, 11)),
    every=st.integers(1, 3),
    ahead=st.integers(0, 3),
)
def test_a_curriculum_that_goes_by_rewards_is_the_same_over_kills(size, batch, steps, kills, every, ahead):
    """Also if a step looks further ahead than it commits, as dynamic sampling does."""

    def reward(draw: SampleIndex) -> float:
        return (draw.index * 31 + draw.epoch * 17) % 8 / 8

    def run(kills: set[int]) -> list[list[SampleIndex]]:
        source = ledger(size, 1, worst_first)
        saved, committed, done = json.dumps(source.state_dict()), [], 0
        while len(committed) < steps:
            drawn = source.peek(batch)
            source.peek(batch * (1 + ahead))
            if len(committed) in kills:
                kills = kills - {len(committed)}
                source = ledger(size, 1, worst_first)
                source.load_state_dict(json.loads(saved))
                del committed[done:]
                continue
            source.commit(drawn, [reward(draw) for draw in drawn])
            committed.append(drawn)
            if len(committed) % every == 0:
                saved, done = json.dumps(source.state_dict()), len(committed)
        return committed

    whole = run(set())
    assert run(kills) == whole
    draws = [draw for step in whole for draw in step]
    assert len(set(draws)) == len(draws)
    first = [draw.index for draw in draws if draw.epoch == 0]
    assert first == worst_first(range(size), 0, {})[: len(first)]


def test_a_place_that_is_loaded_takes_nothing_of_what_was_drawn_before():
    """A run that goes back after its ranks have died uses the same ledger; its curriculum has other rewards now."""
    trained = ledger(4, 1, worst_first)
    for _ in range(4):
        draws = trained.peek(1)
        trained.commit(draws, [draws[0].index / 8])
    state = trained.state_dict()
    used, fresh = ledger(4, 1, worst_first), ledger(4, 1, worst_first)
    used.peek(12)
    for source in (used, fresh):
        source.load_state_dict(state)
    assert used.peek(8) == fresh.peek(8) != ledger(4, 1, worst_first).peek(12)[4:]


def with_order(choose):
    """Decorate a curriculum: it gets an order first."""
    return functools.wraps(choose)(lambda *arguments: choose(sorted, *arguments))


@with_order
def ordered(order, prompts, epoch, rewards):
    return order(range(len(prompts)))


def test_a_decorator_may_pass_a_curriculum_more_than_it_gets():
    assert find_curriculum(f"{__name__}:ordered", "data.curriculum") is ordered


def test_a_curriculum_has_an_effect_and_bounds():
    source = ledger(4, 1, lambda prompts, epoch, rewards: [3, 1] if not rewards else [max(rewards)])
    assert source.peek(2) == [SampleIndex(0, 0, 3), SampleIndex(0, 0, 1)]
    source.commit(source.peek(2), [0.5, 1.0])
    assert source.epoch == 1
    assert source.peek(2) == [SampleIndex(0, 1, 3), SampleIndex(0, 2, 3)]
    for wrong in ([], [4], [-1], [1, 1]):
        with pytest.raises(UserError, match=r"data.curriculum: for epoch 0 it returned \d indices.*from 0 to 3"):
            ledger(4, 1, lambda *_, wrong=wrong: wrong).peek(1)
    with pytest.raises(UserError, match="data.curriculum=mine: failed for epoch 0 .ZeroDivisionError"):
        ledger(4, 1, lambda *_: [1 // 0], "mine").peek(1)


@pytest.mark.parametrize("before, now", [(None, "a:f"), ("a:f", None), ("a:f", "a:g")])
def test_a_run_goes_on_with_its_own_curriculum_alone(before, now):
    sources = [ledger(4, 1, worst_first if name else None, name or "") for name in (before, now)]
    with pytest.raises(UserError, match=f"data.curriculum={now}: the run was saved with {before}"):
        sources[1].load_state_dict(sources[0].state_dict())


def test_a_place_in_the_data_that_cannot_be_is_refused():
    for change in [
        {"epoch": "1"},
        {"position": -1},
        {"position": 10**9},
        {"position": None},
        {"epoch": 2**70},
        {"curriculum": 3},
        {"trained_ahead": 3},
        {"trained_ahead": [{"epoch": 0}]},
        {"trained_ahead": [{"epoch": 0, "index": 4}]},
        {"trained_ahead": [{"epoch": 0, "index": 1}] * 2},
        {"trained_ahead": [{"epoch": 0, "index": 1}], "epoch": 1},
    ]:
        ledger = Ledger(range(4), 1, "prompts", lambda: "content")
        state = ledger.state_dict()
        changed = {**state, **change}
        with pytest.raises(UserError, match="position in the data is corrupt|data.curriculum"):
            ledger.load_state_dict(changed)


# ----------------------------------------------------------------------------------------------------------
# Changes of what is drawn


Settings = dict[str, Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """A model's directory, another chat template, examples and rollouts."""
    root = tmp_path_factory.mktemp("files")
    build_tiny(TinyShape(hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1), str(root / "model"))
    (root / "other.jinja").write_text("{% for m in messages %}<|user|>Q: {{ m['content'] }}{% endfor %}<|assistant|>")
    polite = "{% for m in messages %}<|user|>{{ greeting }}{{ m['content'] }}{% endfor %}<|assistant|>"
    (root / "polite.jinja").write_text(polite)
    for name, words in (("a", ("one", "three")), ("b", ("seven", "eleven"))):
        lines = [json.dumps({"prompt": word * (i + 1), "answer": word[::-1]}) for i, word in enumerate(words)]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
    tokenizer = load_tokenizer(str(root / "model"), None, False)
    episodes = []
    for number, (tokens, reward) in enumerate((([65, 66], 1.0), ([67], 0.0))):
        ids = np.asarray([1, 2, *tokens])
        sample = Sample(ids, (np.arange(len(ids)) > 1).astype(np.float32), -np.arange(len(ids), dtype=np.float32))
        reply = {"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)}
        messages = [{"role": "user", "content": "p"}, reply]
        episodes.append(Episode(f"0:0:{number}", "0:0", [sample], reward, messages=messages))
    write_rollouts(str(root), 1, episodes)
    rollouts = str(root / "rollouts/step_1.arrow")
    return {
        "model": str(root / "model"),
        "template": str(root / "other.jinja"),
        "polite": str(root / "polite.jinja"),
        "a": str(root / "a.jsonl"),
        "b": str(root / "b.jsonl"),
        "rollouts": rollouts,
    }


ROLLOUTS = {"source": "rollouts", "files": ("rollouts", "rollouts"), "max_length": 8}
LEDGER_CHANGES: list[tuple[str, Any, Settings, bool]] = [
    ("model.chat_template", "template", {}, False),
    ("model.chat_template_kwargs", {"greeting": "hello "}, {"template": "polite"}, False),
    ("rollout.max_prompt_tokens", 8, {}, False),
    ("sft.batch_size", 2, {}, True),
    ("sft.max_length", 64, {}, True),
    ("sft.max_length", 12, {}, False),
    ("sft.source", "rollouts", {}, False),
    ("sft.min_reward", 0.5, ROLLOUTS, False),
]
"""Key, new value, what supervised training has set, and whether the change is accepted; else the ledger refuses it."""
PROVEN_KEYS = {key for key, *_ in LEDGER_CHANGES}
"""Keys that a resume changes with permission, and whose changes the tests of this file prove."""


def source_of(files: dict[str, str], before: Settings, key: str, value: Any = None) -> Ledger | SupervisedSource:
    """The source that `key` belongs to, with its new value if one is given."""
    settings = {"batch_size": 1, "max_length": 40, **before}
    names = settings.pop("files", ("a", "b"))
    section, _, name = key.partition(".")
    changed = {} if value is None else {name: value}
    if changed.get("source") == "rollouts":
        names = ("rollouts", "rollouts")
    data = DataConfig(train_files=[files[file] for file in names])
    template = settings.pop("template", changed.get("chat_template"))
    variables = changed.get("chat_template_kwargs", {})
    tokenizer = load_tokenizer(files["model"], template and files[template], False, variables)
    if section != "sft":
        prompts = load_prompts(data, "train", tokenizer, changed.get("max_prompt_tokens", 512)).prompts
        return Ledger(prompts, 1, "prompts", lambda: repr(prompts))
    sft = SFTConfig(**{**settings, **changed})
    return SupervisedSource(sft, [load_train(data, sft, tokenizer, [tokenizer.eos_token_id])], 1)


def test_a_change_of_what_is_drawn_acts_or_is_refused_by_the_ledger(files):
    for key, value, before, accepted in LEDGER_CHANGES:
        old, new = source_of(files, before, key), source_of(files, before, key, value)
        if isinstance(old, SupervisedSource):
            old.next(1)
            old.commit(1)
        else:
            old.commit(old.peek(1))
        state = json.loads(json.dumps(old.state_dict()))
        if not accepted:
            with pytest.raises(UserError, match="data: the .* is not that of the checkpoint"):
                new.load_state_dict(state)
            continue
        new.load_state_dict(state)
        assert isinstance(old, SupervisedSource) and isinstance(new, SupervisedSource)
        before_change, after_change = old.next(2), new.next(2)
        assert [e.uid for e in before_change] != [e.uid for e in after_change]
