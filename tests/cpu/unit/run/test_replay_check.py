"""Replayed steps are compared with what was logged."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from typing import Any

import pytest

from tests.support.runs import configured, opened, save_steps
from trainer.config import compose
from trainer.run.replay_check import ReplayAudit, audit_of, first_difference


def logged(tmp_path, rows: list[dict]) -> str:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path)


def test_replayed_steps_are_verified_and_survive_another_kill(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [{"step": n, "reward/mean": n / 3, "time/step": n} for n in (1, 2, 3, 4)]
    run_dir = logged(tmp_path, rows)
    ReplayAudit(run_dir, 2, 0.0, same_layout=True)
    logged(tmp_path, rows[:2])  # the tracker has rewound the file, and the run was killed again
    audit = ReplayAudit(run_dir, 2, 0.0, same_layout=True)
    assert audit.check(3, {"reward/mean": 1.0, "time/step": 9.0}) is None and not caplog.messages
    assert audit.check(4, {"reward/mean": 4 / 3}) is None
    assert caplog.messages == ["resume verified: 2 replayed steps identical"]
    assert not os.path.exists(tmp_path / "metrics.replay.jsonl")


def test_logged_lines_that_differ_stay_for_the_next_start_until_they_are_given_up(tmp_path):
    rows = [{"step": n, "reward/mean": n / 3} for n in (1, 2, 3)]
    run_dir = logged(tmp_path, rows)
    for _ in range(3):  # trainer.on_resume_mismatch=stop
        audit = ReplayAudit(run_dir, 1, 0.0, same_layout=True)
        logged(tmp_path, rows[:1])
        assert audit.check(2, {"reward/mean": 2 / 3}) is None
        assert "reward/mean is 7.0 and was 1.0" in audit.check(3, {"reward/mean": 7.0})
        assert audit.check(4, {"reward/mean": 7.0}) is None
    audit.discard()
    assert ReplayAudit(run_dir, 1, 0.0, same_layout=True).check(3, {"reward/mean": 7.0}) is None


def test_the_first_metric_that_differs_is_named(tmp_path):
    run_dir = logged(tmp_path, [{"step": 1, "policy/kl": 0.5, "policy/loss": None, "reward/mean": 1.0}])
    audit = ReplayAudit(run_dir, 0, 0.0, same_layout=True)
    now = {"policy/kl": 0.5, "policy/loss": float("nan"), "reward/mean": 1.0000001}
    assert "step 1 was not replayed as it had been logged: reward/mean is 1.0000001 and was 1.0" in audit.check(1, now)
    assert first_difference({"x": 1.0}, {"x": 1.0000001}, 1e-6) is None
    assert first_difference({"x": 1.0}, {"x": float("nan")}, 1e-6) == "x is nan and was 1.0"


def test_the_newest_line_of_a_step_counts(tmp_path):
    """A replay that was accepted although it differed, and was then killed, has logged the step again."""
    run_dir = logged(tmp_path, [{"step": 1, "reward/mean": 0.0}, {"step": 2, "reward/mean": 2.0}])
    (tmp_path / "metrics.replay.jsonl").write_text("".join(
        json.dumps({"step": step, "reward/mean": 1.0}) + "\n" for step in (1, 2, 3)
    ))  # fmt: skip
    audit = ReplayAudit(run_dir, 1, 0.0, same_layout=True)
    assert audit.check(2, {"reward/mean": 2.0}) is None
    assert "reward/mean is 2.0 and was 1.0" in audit.check(3, {"reward/mean": 2.0})


def test_a_first_step_that_was_not_logged_is_not_compared_with_a_later_one(tmp_path):
    run_dir = logged(tmp_path, [{"step": 1, "reward/mean": 1.0}, {"step": 3, "reward/mean": 3.0}])
    audit = ReplayAudit(run_dir, 1, 0.0, same_layout=False)
    assert [audit.check(step, {"reward/mean": 7.0}) for step in (2, 3)] == [None, None]


def test_on_other_ranks_the_first_step_is_compared_to_rounding(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [{"step": n, "policy/loss": 1.0} for n in (1, 2, 3)]
    audit = ReplayAudit(logged(tmp_path, rows), 1, 0.0, same_layout=False)
    assert audit.check(2, {"policy/loss": 1.0001}) is None
    (message,) = caplog.messages
    assert "1 replayed step equal to 0.001" in message and "first step alone" in message
    assert audit.check(3, {"policy/loss": 7.0}) is None


LOGGED = {"reward/mean": 1.0, "policy/lr": 0.1, "policy/loss": 1.0, "val/accuracy": 0.5}
ALL = tuple(LOGGED)


@pytest.mark.parametrize(
    "change, compared, tolerated, only_first",
    [
        ({}, ALL, False, False),
        ({"logger.samples": 1}, ALL, False, False),
        ({"trainer.total_steps": 9}, ALL, False, False),
        ({"trainer.max_tokens_per_micro_batch": 99}, ALL, True, True),
        ({"rollout.num_engines": 2}, ALL, True, True),
        ({"rollout.val_n": 3}, ("reward/mean", "policy/lr", "policy/loss"), False, False),
        ({"trainer.policy.optimizer.lr": 1e-3}, ("reward/mean",), False, True),
        ({"trainer.policy.optimizer.scheduler": "cosine", "trainer.total_steps": 9}, ("reward/mean",), False, True),
        ({"algorithm.clip_high": 0.5, "rollout.val_n": 3}, ("reward/mean",), False, True),
        ({"algorithm.clip_high": 0.5, "rollout.num_engines": 2}, ("reward/mean",), True, True),
        ({"algorithm.dynamic_sampling": True}, (), False, False),
        ({"rollout.n": 4}, (), False, False),
        ({"rollout.n": 4, "algorithm.clip_high": 0.5}, (), False, False),
    ],
)
def test_a_change_is_held_against_no_metric_that_it_alters(tmp_path, caplog, change, compared, tolerated, only_first):
    save_steps(configured(tmp_path), 1)
    lines = "".join(json.dumps({"step": step, **LOGGED}) + "\n" for step in (1, 2, 3))
    (tmp_path / "metrics.jsonl").write_text(lines)
    caplog.set_level("INFO")
    allowed = [*change, "trainer.policy.optimizer.schedule_steps"]
    with opened(configured(tmp_path, change, resume_mode="latest", allow_config_change=allowed)) as run:
        resume = run.resume

    def audited(*steps: dict[str, float]) -> str | None:
        """Return the messages of the audit about these steps, the first ones after the resume."""
        audit = ReplayAudit(str(tmp_path), 1, 0.0, resume.same_rounding, resume.altered)
        problems = [audit.check(number, LOGGED | step) for number, step in enumerate(steps, start=2)]
        (tmp_path / "metrics.replay.jsonl").unlink(missing_ok=True)
        return next((problem for problem in problems if problem), None)

    for name in LOGGED:
        assert (audited({name: LOGGED[name] * 1.5}) is not None) == (name in compared), name
        assert (audited({name: LOGGED[name] * 1.0001}) is not None) == (name in compared and not tolerated), name
    if compared:
        assert (audited({}, {compared[0]: 7.0}) is not None) != only_first
    caplog.clear()
    assert audited({}, {}) is None
    assert any("resume verified" in line for line in caplog.messages) == bool(compared)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"trainer.num_workers": 2}, None),
        (
            {"trainer.policy.optimizer.lr": 1e-3},
            "first alone is compared.*policy/.*because trainer.policy.o.*lr changed",
        ),
        ({"rollout.n": 4, "rollout.top_k": 3}, "are not compared .* because rollout.n, rollout.top_k changed"),
        ({"rollout.val_n": 4}, "are not compared .* in val/, because rollout.val_n changed"),
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
    """On GPUs that do not repeat themselves, what the episodes alone decide is compared, if the journal has them."""
    caplog.set_level("INFO")
    row = {"reward/mean": 0.51, "policy/lr": 1e-6, "policy/kl": 0.1}

    def audited(device: str, *steps: tuple[dict[str, float], bool], **trainer: Any) -> list[bool]:
        run_dir = logged(tmp_path, [{"step": step, **row} for step in (11, 12, 13)])
        config = dataclasses.replace(compose([]).trainer, run_dir=run_dir, **trainer)
        audit = audit_of(config, device, 10, True, (), same_episodes=bool(trainer))
        found = [audit.check(11 + i, row | change, kept) is not None for i, (change, kept) in enumerate(steps)]
        (tmp_path / "metrics.replay.jsonl").unlink(missing_ok=True)
        return found

    last_bit, rounding, rate = {"reward/mean": 0.51000001}, {"policy/kl": 0.1000001}, {"policy/lr": 2e-6}
    for device in ("cpu", "cuda"):
        assert audited(device, (last_bit, True)) == [True] and audited(device, (last_bit, False)) == [False]
        assert audited(device, (rounding, True)) == [device == "cpu"] and audited(device, (rate, True)) == [True]
        assert audited(device, ({}, True), (last_bit, True), ({}, True)) == [False, device == "cpu", False]
        caplog.clear()
        assert audited(device, ({}, True), (last_bit, False), ({"reward/mean": 9.0}, True)) == [False] * 3
        counted = "1 replayed step identical (the first step alone can be compared"
        assert f"resume verified: {counted}" in caplog.text
    assert audited("cuda", (last_bit, False), deterministic=True) == [True]
