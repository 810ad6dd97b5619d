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
from trainer.run import compatibility
from trainer.run.replay import ReplayAudit, audit_of, first_difference, jumps


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


def test_a_jump_is_one_from_the_last_steps_alone(tmp_path, caplog):
    values = [100.0] * 20 + [1.0, 1.1] * 10
    rows = [{"step": step, "policy/loss": value} for step, value in enumerate(values, start=1)]
    audit = ReplayAudit(logged(tmp_path, rows), 40, 0.0, same_layout=True, exact=False)
    assert audit.check(41, {"policy/loss": 100.0}) is None
    assert "over the 20 steps before it was 1.05" in caplog.text
    caplog.clear()
    audit.check(45, {"policy/loss": 100.0})
    assert not caplog.messages, "three steps are watched"


def test_on_other_ranks_the_first_step_is_compared_to_rounding(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [{"step": n, "policy/loss": 1.0} for n in (1, 2, 3)]
    audit = ReplayAudit(logged(tmp_path, rows), 1, 0.0, same_layout=False)
    assert audit.check(2, {"policy/loss": 1.0001}) is None
    (message,) = caplog.messages
    assert "1 replayed step equal to 0.001" in message and "first step alone" in message
    assert audit.check(3, {"policy/loss": 7.0}) is None


def test_without_replayed_steps_a_jump_is_reported(tmp_path, caplog):
    rows = [{"step": n, "policy/loss": 0.1 + n / 100, "policy/kl": 0.2} for n in range(1, 11)]
    assert jumps({"policy/loss": 0.2, "policy/kl": 0.21}, rows) == []
    audit = ReplayAudit(logged(tmp_path, rows), 10, 0.0, same_layout=False)
    assert audit.check(11, {"policy/loss": 5.0, "policy/kl": 0.2}) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "policy/loss jumped to 5" in record.getMessage()
    assert "trainer checkpoint rollback" in record.getMessage()
    assert jumps({"policy/loss": float("nan")}, rows)


@pytest.mark.parametrize("is_replayed", [True, False])
def test_a_step_that_gives_the_same_bits_jumps_where_the_undisturbed_run_does(tmp_path, caplog, is_replayed):
    """Of a run with more steps, or one of whose steps is verified."""
    rows = [{"step": n, "policy/loss": 0.1} for n in range(1, 12)]
    run_dir = logged(tmp_path, rows if is_replayed else rows[:10])
    audit = ReplayAudit(run_dir, 10, 0.0, same_layout=not is_replayed)
    assert audit.check(11, {"policy/loss": 0.1 if is_replayed else 5.0}) is None
    assert audit.check(12, {"policy/loss": 5.0}) is None
    assert caplog.messages == []


def test_a_policy_that_begins_to_move_is_no_jump():
    rows = [{"step": n, "policy/kl": 0.0} for n in range(1, 11)]
    assert jumps({"policy/kl": 7e-4}, rows) == [] and jumps({"policy/kl": 7e-2}, rows)


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


def test_a_permitted_change_is_no_jump(tmp_path, caplog):
    rows = [{"step": n, "policy/kl": 0.2 + n / 1000} for n in range(1, 11)]
    audit = ReplayAudit(logged(tmp_path, rows), 10, 0.0, True, altered=compatibility.OF_UPDATE)
    assert audit.check(11, {"policy/kl": 5.0}) is None
    assert caplog.messages == []


HISTORY = [
    {"step": n, "reward/mean": 0.5 + 0.01 * (n % 3), "policy/grad_norm": 1 + n % 2, "policy/lr": 1e-6, "policy/kl": 0.1}
    for n in range(1, 11)
]
REPLAYED = {"step": 11, "reward/mean": 0.51, "policy/grad_norm": 9.0, "policy/lr": 1e-6, "policy/kl": 0.1}


def audited_on(tmp_path, device: str, *steps: dict[str, float], **trainer: Any) -> str | None:
    """Return the messages of the audit of a run that resumed from step 10, given the differences of the next steps."""
    run_dir = logged(tmp_path, [*HISTORY, REPLAYED, {**REPLAYED, "step": 12}])
    config = dataclasses.replace(compose([]).trainer, run_dir=run_dir, **trainer)
    audit = audit_of(config, device, 10, True, (), same_episodes=device == "cpu" or config.deterministic)
    found = [audit.check(step, REPLAYED | change) for step, change in enumerate(steps, start=11)]
    (tmp_path / "metrics.replay.jsonl").unlink(missing_ok=True)
    return next((problem for problem in found if problem), None)


GOOD_ON_GPUS = [
    {"reward/mean": 0.53, "policy/kl": 0.103, "policy/grad_norm": 2.0},
    {"reward/mean": 0.51000001, "rollout/logprob_diff_mean": 7.0, "val/accuracy": 0.9},
]


@pytest.mark.parametrize("change", GOOD_ON_GPUS)
def test_a_gpu_that_samples_some_tokens_differently_is_no_mismatch(tmp_path, change):
    """The last bits of one kernel change a token, and with it the rest of a completion."""
    assert audited_on(tmp_path, "cuda", change, {"reward/mean": 0.9, "policy/lr": 1.0}) is None
    assert audited_on(tmp_path, "cpu", change) is not None
    assert audited_on(tmp_path, "cuda", change, deterministic=True) is not None


@pytest.mark.parametrize("change", [{"reward/mean": 0.1}, {"policy/lr": 2e-6}, {"policy/kl": 0.5}])
def test_a_wrong_state_is_a_mismatch_on_a_gpu_too(tmp_path, change):
    (name, value), *_ = change.items()
    assert f"{name} is {value} and was" in audited_on(tmp_path, "cuda", change)


def test_on_a_gpu_a_tolerance_of_the_user_counts_for_the_first_step(tmp_path):
    assert audited_on(tmp_path, "cuda", {"reward/mean": 0.52}, resume_tolerance=0.01)
    assert audited_on(tmp_path, "cuda", {"reward/mean": 0.52}, {"reward/mean": 9.0}, resume_tolerance=0.05) is None
    assert audited_on(tmp_path, "cpu", {"reward/mean": 0.52}, resume_tolerance=0.05) is None


def test_supervised_training_samples_nothing(tmp_path):
    rows = [{"step": n, "sft/loss": 1 / n} for n in range(1, 13)]
    config = dataclasses.replace(compose([]).trainer, run_dir=logged(tmp_path, rows))
    for device, change in (("cuda", 1.0005), ("cpu", 1.0)):
        assert audit_of(config, device, 10, True, (), True).check(11, {"sft/loss": change / 11}) is None
        assert audit_of(config, device, 10, True, (), True).check(11, {"sft/loss": 1.05 / 11})


def test_a_source_whose_episodes_do_not_repeat_is_compared_as_far_as_chance_allows(tmp_path):
    """On CPU, too. A source that repeats is compared exactly whatever metrics it has."""
    for change, differs in ((GOOD_ON_GPUS[0], False), ({"reward/mean": 0.1}, True)):
        run_dir = logged(tmp_path, [*HISTORY, REPLAYED, {**REPLAYED, "step": 12}])
        config = dataclasses.replace(compose([]).trainer, run_dir=run_dir)
        found = [audit_of(config, "cpu", 10, True, (), same).check(11, REPLAYED | change) for same in (False, True)]
        assert [one is not None for one in found] == [differs, True]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_from_the_journal_are_compared_exactly_whatever_the_engine(tmp_path, device, caplog):
    """On GPUs that do not repeat themselves, what the episodes alone decide is."""
    caplog.set_level("INFO")
    rows = [{**REPLAYED, "step": step} for step in (11, 12, 13)]

    def audited(*steps: tuple[dict[str, float], bool]) -> list[bool]:
        run_dir = logged(tmp_path, [*HISTORY, *rows])
        config = dataclasses.replace(compose([]).trainer, run_dir=run_dir)
        audit = audit_of(config, device, 10, True, (), same_episodes=False)
        found = [audit.check(11 + i, REPLAYED | change, kept) is not None for i, (change, kept) in enumerate(steps)]
        (tmp_path / "metrics.replay.jsonl").unlink(missing_ok=True)
        return found

    last_bit, rounding = {"reward/mean": 0.51000001}, {"policy/kl": 0.1000001}
    assert audited((last_bit, True)) == [True] and audited((last_bit, False)) == [False]
    assert audited((rounding, True)) == [device == "cpu"]
    later = [({}, True), (last_bit, True), ({}, True)]
    assert audited(*later) == [False, device == "cpu", False]
    caplog.clear()
    assert audited(({}, True), (last_bit, False), ({"reward/mean": 9.0}, True)) == [False] * 3
    what = (
        "2 replayed steps identical (these steps"
        if device == "cpu"
        else "1 replayed step equal to 0.01 (the first step"
    )
    assert f"resume verified: {what} alone can be compared" in caplog.text
