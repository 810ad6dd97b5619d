"""Which checkpoints are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.retention import Retention


@given(
    steps=st.sets(st.integers(1, 60), min_size=1, max_size=20),
    newest=st.integers(-1, 5),
    every=st.sampled_from([-1, 1, 7, 10]),
    best=st.integers(0, 4),
    mode=st.sampled_from(["max", "min"]),
    data=st.data(),
)
def test_retention_keeps_the_steps_of_its_rules(steps, newest, every, best, mode, data):
    scores = {step: data.draw(st.none() | st.integers(0, 5)) for step in steps}
    protected = data.draw(st.sets(st.sampled_from(sorted(steps)), max_size=2))
    gone = Retention(newest, every, best, mode).disposable(scores, protected)
    kept = sorted(steps - set(gone))
    assert max(steps) in kept and protected <= set(kept)
    if newest < 0:
        assert gone == []
    else:
        assert set(sorted(steps)[-max(1, newest) :]) <= set(kept)
    assert not [step for step in gone if every > 0 and step % every == 0]
    measured = {step: score for step, score in scores.items() if score is not None}
    if best and measured and newest >= 0:
        extreme = (max if mode == "max" else min)(measured.values())
        assert extreme in [measured.get(step) for step in kept]
        ranked = sorted(measured.values(), reverse=mode == "max")[:best]
        assert sorted((measured[s] for s in kept if s in measured), reverse=mode == "max")[: len(ranked)] == ranked
    needed = len(protected) + max(1, newest) + best + sum(step % every == 0 for step in steps if every > 0)
    assert newest < 0 or len(kept) <= needed


def test_of_two_equal_scores_the_earlier_is_kept():
    scores = {1: 0.1, 2: 0.5, 3: 0.5, 4: 0.3}
    assert Retention(newest=1, best=1).disposable(scores) == [1, 3]
    assert Retention(newest=1, best=1, best_mode="min").disposable({1: 0.5, 2: 0.1, 3: 0.1, 4: 0.3}) == [1, 3]
