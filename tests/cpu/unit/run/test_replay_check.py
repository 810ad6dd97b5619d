"""Replayed steps are compared with what was logged."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from tests.support.runs import configured, opened, save_steps
from trainer.checkpoint.manifest import Checkpoint
from trainer.errors import UserError
from trainer.run.replay_check import ReplayAudit, first_difference


def logged(tmp_path, rows: list[dict]) -> str:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path)


def audit_of(run_dir: str, step: int, **settings: bool) -> ReplayAudit:
    return ReplayAudit(run_dir, Checkpoint(f"/c/global_step_{step}", step, {}), **{"stops": True, **settings})


def problem(audit: ReplayAudit, *step: Any) -> str | None:
    """What stops the run."""
    try:
        audit.check(*step)
    except UserError as error:
        return str(error)
    return None


def test_replayed_steps_are_verified_and_survive_another_kill(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [{"step": n, "reward/mean": n / 3, "time/step": n} for n in (1, 2, 3, 4)]
    run_dir = logged(tmp_path, rows)
    audit_of(run_dir, 2)
    logged(tmp_path, rows[:2])  # the tracker has rewound the file, and the run was killed again
    audit = audit_of(run_dir, 2)
    assert problem(audit, 3, {"reward/mean": 1.0, "time/step": 9.0}) is None and not caplog.messages
    assert problem(audit, 4, {"reward/mean": 4 / 3}) is None
    assert caplog.messages == ["resume verified: 2 replayed steps identical"]
    assert not os.path.exists(tmp_path / "metrics.replay.jsonl")


def test_logged_lines_that_differ_stay_for_the_next_start_until_they_are_given_up(tmp_path, caplog):
    rows = [{"step": n, "reward/mean": n / 3} for n in (1, 2, 3)]
    run_dir = logged(tmp_path, rows)
    for _ in range(3):  # trainer.on_resume_mismatch=stop
        audit = audit_of(run_dir, 1)
        logged(tmp_path, rows[:1])
        assert problem(audit, 2, {"reward/mean": 2 / 3}) is None
        assert "reward/mean is 7.0 and was 1.0" in problem(audit, 3, {"reward/mean": 7.0})
        assert problem(audit, 4, {"reward/mean": 7.0}) is None
    audit = audit_of(run_dir, 1, stops=False)
    assert [problem(audit, step, {"reward/mean": 7.0}) for step in (2, 3)] == [None, None]
    assert "resumed from /c/global_step_1, but step 2 was not replayed" in caplog.messages[-1]
    assert problem(audit_of(run_dir, 1), 3, {"reward/mean": 7.0}) is None


def test_the_first_metric_that_differs_is_named(tmp_path):
    run_dir = logged(tmp_path, [{"step": 1, "policy/kl": 0.5, "policy/loss": None, "reward/mean": 1.0}])
    audit = audit_of(run_dir, 0)
    now = {"policy/kl": 0.5, "policy/loss": float("nan"), "reward/mean": 1.0000001}
    assert "step 1 was not replayed as it had been logged: reward/mean is 1.0000001 and was 1.0" in problem(
        audit, 1, now
    )
    assert first_difference({"x": 1.0}, {"x": 1.0000001}, 1e-6) is None
    assert first_difference({"x": 1.0}, {"x": float("nan")}, 1e-6) == "x is nan and was 1.0"


def test_the_newest_line_of_a_step_counts(tmp_path):
    """A replay that was accepted although it differed, and was then killed, has logged the step again."""
    run_dir = logged(tmp_path, [{"step": 1, "reward/mean": 0.0}, {"step": 2, "reward/mean": 2.0}])
    (tmp_path / "metrics.replay.jsonl").write_text("".join(
        json.dumps({"step": step, "reward/mean": 1.0}) + "\n" for step in (1, 2, 3)
    ))  # fmt: skip
    audit = audit_of(run_dir, 1)
    assert problem(audit, 2, {"reward/mean": 2.0}) is None
    assert "reward/mean is 2.0 and was 1.0" in problem(audit, 3, {"reward/mean": 2.0})


def test_a_first_step_that_was_not_logged_is_not_compared_with_a_later_one(tmp_path):
    run_dir = logged(tmp_path, [{"step": 1, "reward/mean": 1.0}, {"step": 3, "reward/mean": 3.0}])
    audit = audit_of(run_dir, 1, same_layout=False)
    assert [problem(audit, step, {"reward/mean": 7.0}) for step in (2, 3)] == [None, None]


def test_on_other_ranks_the_first_step_is_compared_to_rounding(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [{"step": n, "policy/loss": 1.0} for n in (1, 2, 3)]
    audit = audit_of(logged(tmp_path, rows), 1, same_layout=False)
    assert problem(audit, 2, {"policy/loss": 1.0001}) is None
    (message,) = caplog.messages
    assert "1 replayed step equal to 0.001" in message and "first step alone" in message
    assert problem(audit, 3, {"policy/loss": 7.0}) is None


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"trainer.num_workers": 2}, None),
        ({"rollout.n": 4, "rollout.top_k": 3}, "are not compared .* because rollout.n, rollout.top_k changed"),
        ({"rollout.val_n": 4}, "are not compared .*, because rollout.val_n changed"),
    ],
)
def test_one_sentence_says_what_is_not_compared(tmp_path, caplog, change, sentence):
    save_steps(configured(tmp_path), 1)
    caplog.set_level("INFO")
    with opened(configured(tmp_path, change, resume_mode="latest", allow_config_change=list(change))):
        pass
    said = [line for line in caplog.messages if "compared" in line]
    assert len(said) == (sentence is not None)
    assert sentence is None or re.search(sentence, said[0])


def test_what_is_compared_depends_on_kernels_and_on_the_journal(tmp_path, caplog):
    """On GPUs that do not repeat themselves, the first step is compared, if the journal has its episodes."""
    caplog.set_level("INFO")
    row = {"reward/mean": 0.51, "policy/lr": 1e-6, "policy/kl": 0.1}

    def audited(exact: bool, *steps: tuple[dict[str, float], bool], altered: bool = False) -> list[bool]:
        run_dir = logged(tmp_path, [{"step": step, **row} for step in (11, 12, 13)])
        audit = audit_of(run_dir, 10, exact=exact, altered=altered, same_episodes=False)
        found = [problem(audit, 11 + i, row | change, kept) is not None for i, (change, kept) in enumerate(steps)]
        (tmp_path / "metrics.replay.jsonl").unlink(missing_ok=True)
        return found

    last_bit, other = {"policy/kl": 0.1000001}, {"reward/mean": 0.6}
    for exact in (True, False):
        assert audited(exact, (last_bit, True)) == [exact] and audited(exact, (last_bit, False)) == [False]
        assert audited(exact, (other, True)) == [True] and audited(exact, (other, True), altered=True) == [False]
        assert audited(exact, ({}, True), (last_bit, True), ({}, True)) == [False, exact, False]
        caplog.clear()
        assert audited(exact, ({}, True), (last_bit, False), ({"reward/mean": 9.0}, True)) == [False] * 3
        assert "resume verified: 1 replayed step" in caplog.text
        assert "(the first step alone can be compared" in caplog.text
