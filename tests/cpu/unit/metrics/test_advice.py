"""Advisories: quiet about healthy runs, one line about each kind of sick run."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.registry import needs_different_completions
from trainer.config import Config
from trainer.config.fields import walk_keys
from trainer.errors import UserError
from trainer.metrics import advice as advisories
from trainer.metrics.advice import COMPARE_NOTHING, RULES, Advice, Advisor, current_advice, with_reference
from trainer.metrics.names import is_metric
from trainer.metrics.tracker import MetricsLines, as_lines, read_metrics

ROOT = Path(__file__).parents[4]
KEYS = {key for key, *_ in walk_keys(Config())}
HEALTHY = sorted((Path(__file__).parent / "healthy").glob("*.jsonl"))

START = {
    "reward/mean": 0.5,
    "reward/std": 0.3,
    "reward/zero_std_frac": 0.3,
    "policy/entropy": 1.0,
    "policy/clip_frac": 0.05,
    "policy/kl": 0.1,
    "policy/grad_norm": 1.0,
    "response_length/mean": 100.0,
    "response_length/clip_ratio": 0.1,
    "rollout/k3_kl": 1e-3,
    "rollout/ess": 0.99,
    "critic/explained_variance": 0.4,
    "episode/turns/mean": 2.0,
    "environment/failures": 0,
    "reward/failures": 0,
    "perf/samples_per_s": 8.0,
    "time/step": 8.0,
    "time/rollout": 4.0,
    "time/wait_weights": 2.0,
}
"""The metrics of a step of a healthy run: 64 completions in 8 seconds."""
STALE = {"rollout/staleness_mean": 1.0}
# What a step of a sick run has in place of the healthy values.
SICK: dict[str, dict[str, float]] = {
    "no_signal": {"reward/zero_std_frac": 0.85},
    "entropy_collapse": {"policy/entropy": 0.09},
    "clipped_updates": {"policy/clip_frac": 0.5},
    "long_responses": {"response_length/mean": 301.0, "reward/mean": 0.4},
    "truncated": {"response_length/clip_ratio": 0.6},
    "mismatch": {"rollout/k3_kl": 0.02},
    "stale_rollouts": {"rollout/ess": 0.4} | STALE,
    "falling_accuracy": {"val/accuracy": 0.25},
    "no_success": {"val/accuracy": 0.0},
    "no_gain": {"val/accuracy": 0.5},
    "kl_explosion": {"policy/kl": 2.1},
    "useless_critic": {"critic/explained_variance": 0.0},
    "silent_agents": {"episode/turns/mean": 0.0},
    "failed_environments": {"environment/failures": 10},
    "failed_rewards": {"reward/failures": 10},
    "ranks_wait": {"time/rollout": 6.5},
    "engines_wait": {"time/wait_weights": 6.5},
}
# What a step before it has beside the healthy values.
BEFORE: dict[str, dict[str, float]] = {"stale_rollouts": STALE, "falling_accuracy": {"val/accuracy": 0.55}}


def history(*parts: tuple[int, dict[str, float]], start: float | None = 0.5) -> list[dict]:
    """Return the lines of a run: for each part that many steps, with these values in place of the healthy ones.

    Before them is the validation of the initial weights, `start`.
    """
    rows = [
        {} if start is None else {"val/accuracy": start},
        *(START | values for count, values in parts for _ in range(count)),
    ]
    return [{"step": step} | row for step, row in enumerate(rows)]


def named(rows: list[dict], config: dict | None = None) -> list[tuple[str, tuple[int, int]]]:
    return [(advice.name, advice.steps) for advice in Advisor(config, history=rows).found]


@pytest.mark.parametrize("file", HEALTHY, ids=lambda file: file.stem)
@pytest.mark.parametrize("config", [None, {"reward": {"success_threshold": 1.0}}], ids=["unknown", "known"])
def test_a_healthy_run_gets_no_advice(file, config):
    """Runs that learn a task: with and without rollouts ahead, with losses that clip tokens or sequences."""
    rows = read_metrics(str(file))
    assert len(rows) > 10 and rows[-1]["reward/mean"] > rows[1]["reward/mean"]
    assert named(rows, config) == []


@pytest.mark.parametrize("rule", RULES, ids=[f"{rule.name}-{rule.steps}" for rule in RULES])
def test_a_sick_run_gets_the_advice_once_with_a_key_that_exists(rule):
    sick, healthy = SICK[rule.name], BEFORE.get(rule.name, {})
    start = None if rule.name == "no_success" else 0.5
    rows = history((30, healthy), (rule.steps, sick), (5, sick), start=start)
    assert named(rows[: 1 + 30 + rule.steps - 1]) == [], "the first steps may be chance"
    (advice,) = Advisor(history=rows).found
    assert (advice.name, advice.steps) == (rule.name, (31, 30 + rule.steps + 5)) and advice.key == rule.key
    assert advice.key in KEYS and advice.key.rpartition(".")[2] in advice.text, "the text names the key"
    assert str(advice).startswith(f"since step {advice.steps[0]}, ") and "\n" not in advice.text
    assert any(name in advice.text for name in rule.metrics), "the text names the metric"


def test_every_rule_has_a_sick_run_and_reads_metrics_that_are_logged():
    assert {rule.name for rule in RULES} == set(SICK)
    assert all(is_metric(name) for rule in RULES for name in rule.metrics)
    text = " ".join(rule.advise((1, 1)).text for rule in RULES)
    mentioned = set(re.findall(r"\b(?:algorithm|rollout|trainer|reward|environment)(?:\.[a-z_]+)+", text))
    assert mentioned <= KEYS, "keys in the texts exist"


# Left out: what is measured seldom, for half a second each time or over many prompts, and a count that no chance
# makes 0.
@pytest.mark.parametrize("name", sorted(SICK.keys() - {"slow_rank", "falling_accuracy", "silent_agents"}))
def test_a_single_bad_step_is_no_reason(name):
    sick = SICK[name]
    healthy = BEFORE.get(name, {})
    start = None if name == "no_success" else 0.5
    assert named(history((30, healthy), (1, sick), (30, healthy), start=start)) == []


@pytest.mark.parametrize(
    "solved", [{"reward/mean": 0.96}, {"val/accuracy": 0.96}], ids=["by its rewards", "by its validation"]
)
@pytest.mark.parametrize("name", ["no_signal", "entropy_collapse"])
def test_a_solved_task_explains_equal_rewards_and_a_low_entropy(name, solved):
    rows = history((30, {}), (30, SICK[name] | solved))
    assert named(rows, {"reward": {"success_threshold": 1.0}}) == []
    rows = history((30, {}), (30, {"reward/zero_std_frac": 1.0} | solved))
    assert named(rows, {"reward": {"success_threshold": 1.0}}) == [("no_signal", (31, 60))], "nothing is left to learn"


def test_agents_whose_episodes_failed_may_have_had_no_time_to_ask():
    silent = SICK["silent_agents"] | {"environment/failures": 1}
    assert named(history((5, silent))) == []


def test_a_validation_counts_until_the_next_one():
    measured = history((30, {}), (1, {"val/accuracy": 0.97}), (20, SICK["entropy_collapse"]))
    assert named(measured) == []
    measured[41]["val/accuracy"] = 0.5
    assert named(measured) == [("entropy_collapse", (41, 51))]


def test_accuracy_is_compared_with_the_highest_one_and_steps_without_a_validation_do_not_count():
    fallen = history(
        (5, {"val/accuracy": 0.6}), (1, {"val/accuracy": 0.8}), (4, {}), (1, {"val/accuracy": 0.39}), (4, {})
    )
    assert named(fallen) == [("falling_accuracy", (11, 11))]
    assert named(history((5, {"val/accuracy": 0.8}), (5, {"val/accuracy": 0.41}))) == [], "more than half is left"
    by_chance = history((5, {"val/accuracy": 0.2}), (5, {"val/accuracy": 0.0}))[1:]
    assert named(by_chance) == [], "of few prompts"


def test_responses_may_grow_while_rewards_rise():
    assert named(history((10, {}), (20, {"response_length/mean": 900.0, "reward/mean": 0.7}))) == []


def test_old_weights_explain_a_mismatch():
    assert named(history((10, STALE), (20, STALE | {"rollout/k3_kl": 0.2}))) == []


def test_groups_of_equal_rewards_teach_estimators_that_compare_nothing():
    rows = history((20, {"reward/zero_std_frac": 1.0}))
    assert named(rows, {"algorithm": {"advantage_estimator": "grpo"}}) == named(rows) == [("no_signal", (1, 20))]
    assert named(rows, {"algorithm": {"advantage_estimator": "reinforce_plus_plus"}}) == []
    assert named(rows, {"algorithm.advantage_estimator": "reinforce_plus_plus"}) == []
    assert Advisor({"algorithm": {"advantage_estimator": "grpo"}}, compares_completions=False, history=rows).found == []


def test_the_estimators_that_compare_nothing_are_those_of_the_algorithms():
    assert set(COMPARE_NOTHING) == {name for name, f in ADVANTAGES.items() if not needs_different_completions(f)}


@pytest.mark.parametrize("name", ["truncated", "useless_critic"])
def test_an_advice_comes_again_only_after_it_did_not_hold(name):
    (rule,) = (rule for rule in RULES if rule.name == name)
    bad, good, steps = SICK[name], {}, rule.steps
    rows = history((steps, bad), (1, good), (steps, bad), (1, good), (steps, bad))
    assert named(rows) == [(name, (1, 3 * steps + 2))], "one good step is not the end of it"
    rows = history((steps, bad), (steps, good), (steps, bad))
    assert named(rows) == [(name, (1, steps)), (name, (2 * steps + 1, 3 * steps))]


def test_steps_without_a_metric_do_not_count():
    rows = [{"step": 1, "response_length/clip_ratio": 0.6}, {"step": 2, "val/accuracy": 1.0}, {"step": 3}]
    rows += [{"step": step, "response_length/clip_ratio": 0.6} for step in (4, 5)]
    assert named(rows) == [("truncated", (1, 5))]


@pytest.mark.parametrize("kept", range(0, 91, 6))
def test_a_resumed_run_advises_like_the_uninterrupted_one(kept):
    rows = history((30, {}), (30, SICK["truncated"] | SICK["useless_critic"] | SICK["kl_explosion"]), (30, {}))
    rows[35]["critic/explained_variance"] = float("-inf")
    whole = Advisor()
    expected = [(row["step"], str(advice)) for row in rows for advice in whole.update(row["step"], row)]
    assert len(expected) == 3
    logged = json.loads(json.dumps(rows[:kept]).replace("-Infinity", "null"))  # as the tracker writes it
    resumed = Advisor(history=logged)
    later = [(row["step"], str(advice)) for row in rows[kept:] for advice in resumed.update(row["step"], row)]
    assert later == [advice for advice in expected if advice[0] > kept]
    assert [advice.name for advice in resumed.current] == [] and resumed.found == whole.found


parts = st.tuples(
    st.integers(1, 60), st.sampled_from([*SICK, "", "unlogged"]), st.sampled_from([*START, "val/accuracy"])
)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(parts, min_size=1, max_size=6), null=st.integers(0, 100))
def test_the_last_lines_of_a_long_run_give_the_advice_that_all_lines_give(tmp_path_factory, parts, null):
    rows = history(*((count, SICK.get(name, {})) for count, name, _ in parts))
    done = 1
    for count, name, missing in parts:
        for row in rows[done : done + count] if name == "unlogged" else []:
            row.pop(missing, None)
        for row in rows[done : done + count]:
            row |= {"val/accuracy": 0.0 if name in ("no_success", "") else 0.5} if row["step"] % 3 == 0 else {}
        done += count
    rows[null % len(rows)]["policy/entropy"] = None
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_text(as_lines(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advisories, "_LAST_LINES", 40)
        assert current_advice(MetricsLines(str(path))) == Advisor(history=rows).current


def test_the_last_lines_are_compared_with_the_first_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(advisories, "_LAST_LINES", 40)
    rows = history((5, {}), (75, {"policy/entropy": 0.5}), (20, SICK["entropy_collapse"]))
    (tmp_path / "metrics.jsonl").write_text(as_lines(rows))
    (advice,) = current_advice(MetricsLines(str(tmp_path / "metrics.jsonl")))
    assert (advice.name, advice.steps) == ("entropy_collapse", (81, 100))


@pytest.mark.parametrize("name", ["no_success", "truncated"])
def test_only_what_has_held_for_longer_than_the_last_lines_needs_the_others(tmp_path, monkeypatch, name):
    monkeypatch.setattr(advisories, "_LAST_LINES", 40)
    lines = as_lines(history((100, SICK[name]), start=0.0)).splitlines(keepends=True)
    lines[50] = '{"step": 50, damaged}\n'
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    read = MetricsLines(str(tmp_path / "metrics.jsonl"))
    if name == "truncated":
        with pytest.raises(UserError, match=r"metrics.jsonl:51 has no JSON object"):
            current_advice(read)
    else:
        assert [(one.name, one.steps) for one in current_advice(read)] == [("no_success", (0, 100))]


names = st.sampled_from(sorted({name for rule in RULES for name in rule.metrics} | {"val/accuracy", "step", *START}))
values = (
    st.floats() | st.integers() | st.none() | st.booleans() | st.text(max_size=2) | st.just(10**400)
    | st.sampled_from([0.0, -0.0, 1e308, -1e308, 5e-324, 1.0])
)  # fmt: skip
configs = st.none() | st.dictionaries(
    st.sampled_from(["reward", "algorithm"]),
    st.none() | st.dictionaries(st.sampled_from(["success_threshold", "advantage_estimator"]), values),
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.dictionaries(names, values, max_size=25), max_size=45), config=configs)
def test_advice_never_raises(rows, config):
    assert all(isinstance(advice, Advice) and str(advice) for advice in Advisor(config, history=rows).found)


def test_a_whole_config_is_read():
    assert named(history((5, {"reward/zero_std_frac": 0.9})), dataclasses.asdict(Config())) == [("no_signal", (1, 5))]


def test_the_docs_are_fresh():
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == with_reference(page), "run `make docs`"
    assert all(f"\n| `{rule.name}` | {rule.condition} | " in page for rule in RULES)
