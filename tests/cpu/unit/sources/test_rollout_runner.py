"""How completions get their rewards while others are generated."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.replies import sampling_source
from tests.support.runs import configured
from trainer.config import DataConfig, RewardConfig
from trainer.data.records import keys_in
from trainer.generation.engine import Completion, Request
from trainer.generation.pauses import Pauses
from trainer.journal.history import Identity
from trainer.journal.journal import Journal
from trainer.models.tokenizer import load_tokenizer

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
        self._tokenizer, self._order = tokenizer, order
        self.awake, self.pauses = contextlib.nullcontext, Pauses()
        self.repeats, self.needs_company = True, False
        self.is_last_ready = lambda: len(list(seen.iterdir())) >= before_last

    def stream(self, requests: Sequence[Request], idle_s: float = math.inf) -> Iterator[dict[int, Completion]]:
        for number, place in enumerate(self._order, start=1):
            waited_from = time.monotonic()
            while number == len(self._order) and not self.is_last_ready():
                threading.Event().wait(0.01)
                if time.monotonic() - waited_from > idle_s:
                    yield {}
                    waited_from = time.monotonic()
            tokens = self._tokenizer.encode(f"{place:02}", add_special_tokens=False)
            yield {place: Completion(tokens, [-1.0] * len(tokens), "stop", 1)}


def rewards(
    tmp_path: Path, model: str, order: Sequence[int], before_last: int = 0, recorded: int = 0
) -> list[tuple[str, float]]:
    """The rewards of three groups of two completions, which are complete in this order.

    Args:
        recorded: groups that the journal has before the last completion.
    """
    seen = tmp_path / "seen"
    seen.mkdir()
    (tmp_path / "streamed_rewards.py").write_text(REWARD.format(seen=str(seen)))
    cfg = configured(tmp_path / "run", train_batch_size=3, mini_batch_size=3, val_interval=-1)
    cfg.rollout.n = 2
    cfg.data = DataConfig(synthetic="arithmetic", synthetic_args={"max_value": 9}, train_size=3, val_size=1)
    cfg.reward = RewardConfig(name=["streamed_rewards:group", "streamed_rewards:plain"], num_processes=2)
    engines = Engines(load_tokenizer(model), order, seen, before_last)
    if recorded:
        engines.is_last_ready = lambda: count_groups(tmp_path / "run") == recorded
    journal = Journal(cfg.trainer.run_dir, Identity("", ""), lambda: None, is_on=recorded > 0)
    with sampling_source(cfg, engines, model, journal=journal) as source:
        episodes = source.next(1)
        journal.close()
        engines.shutdown = lambda: None
    assert sorted(path.name for path in seen.iterdir()) == ["00", "02", "04"], "a group is judged once, as a whole"
    return [(episode.uid, episode.reward) for episode in episodes]


def test_rewards_are_computed_while_completions_are_generated(tmp_path, model, monkeypatch):
    """The engine gives its last completion after the rewards of all groups that are complete without it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    found = rewards(tmp_path, model, order=[0, 2, 3, 4, 1, 5], before_last=2)
    assert [reward for _, reward in found] == pytest.approx([2 * place + 0.02 for place in range(6)])


def count_groups(run: Path) -> int:
    """The groups in the journal of a run."""
    return sum(len(keys_in(file.read_bytes())[0]) for file in run.rglob("step_1-*.arrow"))


def test_groups_are_recorded_while_nothing_is_completed(tmp_path, model, monkeypatch):
    """The engine gives its last completion after the journal has the groups that are complete without it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    found = rewards(tmp_path, model, order=[0, 1, 2, 3, 4, 5], recorded=2)
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
