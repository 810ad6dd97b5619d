"""Tasks of reasoning-gym: the same examples in every process, and the scores of their answers."""

from __future__ import annotations

import inspect
import json
import random
import re
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.rewards import reward_pool
from tests.support.rewards import score as score_in
from trainer.config import DataConfig
from trainer.data import reasoning_tasks
from trainer.data.datasets import check_files, load_rows
from trainer.data.generators import _select, generate
from trainer.data.reasoning_tasks import _EVALUATES, NAME, check_task, known_tasks, make_example, score
from trainer.data.row_files import digest_rows
from trainer.errors import UserError

SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def select(size: int, split: str, **options: int) -> list[dict[str, Any]]:
    return _select(partial(make_example, "chain_sum", {**SUM, **options}), NAME, size, split)


def test_splits_do_not_overlap_and_grow_at_their_end():
    train, val = select(80, "train"), select(20, "val")
    prompts = [example["prompt"] for example in train]
    assert len({*prompts}) == 80 and {*prompts}.isdisjoint(example["prompt"] for example in val)
    assert select(85, "train")[:80] == train
    assert select(80, "train", seed=2) != train


def test_a_row_scores_the_answers_of_completions():
    """Also after its way to another process."""
    row = json.loads(json.dumps(make_example("chain_sum", SUM, 3)))
    answer = row["answer"]
    assert score(answer, row) == score(f"<answer>7</answer> no: <answer> {answer} </answer>.", row) == 1.0
    assert score(f"It may be 3.</think>{answer}\n", row) == 1.0
    assert score("none", row) < 0.1 and score(f"<answer>none</answer> {answer}", row) < 0.1


def test_a_task_whose_score_takes_every_answer_is_refused():
    with pytest.raises(UserError, match=r"full reward for `I do not know`"):
        check_task("game_of_life_halting", {})
    check_task("prime_factorization", {})  # raises for this answer


def test_composites_mix_tasks():
    options = {"datasets": [{"name": "chain_sum", "config": SUM}, {"name": "spell_backward", "weight": 2}]}
    rows = [make_example("composite", options, number) for number in range(20)]
    assert 0 < sum("Spell" in row["prompt"] for row in rows) < 20
    assert all(score(row["answer"], row) == 1.0 for row in rows)


def test_other_tasks_evaluate_no_answers():
    """If a new version of the package has more of them, look at what they evaluate."""
    own = {"basic_arithmetic", "bitwise_arithmetic", "codeio", "gsm_symbolic", "number_sorting", "propositional_logic"}
    evaluates = re.compile(r"\b(eval|exec|parse_expr|sympify|parse_latex|os\.system|subprocess\.\w+)\(")
    found = set()
    for task, (kind, _) in known_tasks().items():
        modules = {cls.__module__ for cls in kind.__mro__ if cls.__module__.startswith("reasoning_gym.")}
        if any(evaluates.search(inspect.getsource(sys.modules[module])) for module in modules):
            found.add(task)
    assert found - own == _EVALUATES


def test_generators_of_the_process_are_left_as_they_were():
    states = random.getstate(), np.random.get_state()[1].tolist()
    make_example("pool_matrix", {}, 0)
    make_example("list_functions", {}, 0)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


@pytest.mark.processes
@pytest.mark.release
def test_examples_do_not_depend_on_the_order_of_sets():
    """In the process that makes them, and in that of the reward. This process has a seed of its own for hashes."""
    tasks = ["isomorphic_strings", "knights_knaves", "list_functions", "pool_matrix", "ransom_note", "word_ladder"]
    options = {"task": "composite", "datasets": [{"name": task} for task in tasks]}
    data = DataConfig(synthetic=NAME, synthetic_args=options, train_size=20)
    rows = [dict(prompt.row) for prompt in load_rows(data, "train").prompts]
    assert {row[NAME]["task"] for row in rows} == {"composite"}
    answers = [row["answer"] for row in rows]
    with reward_pool(NAME) as pool:
        rewards, failures = score_in(pool, answers, answers, rows)
    assert rewards == [1.0] * len(answers), failures


@pytest.mark.processes
def test_a_task_with_too_few_examples_is_refused():
    options = {"min_terms": 1, "max_terms": 1, "max_digits": 1}
    with pytest.raises(UserError, match="^data.val_size=30: data.synthetic=reasoning_gym .* only . different .* val$"):
        generate(NAME, options, 30, "val", "chain_sum")


def test_tasks_that_cannot_be_made_are_refused_in_one_sentence():
    for task, options, message in (
        (
            "chain_sums",
            {},
            "task=chain_sums: reasoning-gym .* has no such task; did you mean chain_sum",
        ),
        ("chain_sum", {"terms": 3}, "the task chain_sum takes no terms; .*min_terms"),
        ("chain_sum", {"size": 3}, "takes no size"),
        (
            "chain_sum",
            {"min_terms": 0},
            "reasoning-gym refuses them for the task chain_sum .AssertionError",
        ),
        ("composite", {}, "reasoning-gym refuses them for the task composite"),
        ("composite", {"datasets": [{"name": "no"}]}, "reasoning-gym refuses them .*no"),
        ("n_queens", {}, "the score of reasoning-gym's task n_queens evaluates what the policy has written"),
        (
            "composite",
            {"datasets": [{"name": "countdown"}]},
            "task=composite: .* task countdown evaluates",
        ),
    ):
        with pytest.raises(UserError, match=message) as error:
            check_task(task, options)
        assert "\n" not in str(error.value)


def test_a_task_is_checked_with_the_files():
    data = DataConfig(synthetic=NAME, synthetic_args={"task": "chain_sums"}, train_size=4, val_size=4)
    with pytest.raises(UserError, match="did you mean chain_sum"):
        check_files(data)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(UserError, match="install the extra `environments`"):
        check_task("chain_sum", {})


def test_rows_of_other_data_and_of_other_versions_have_no_score(monkeypatch):
    with pytest.raises(ValueError, match="choose data=reasoning_gym"):
        score("7", {"prompt": "3+4", "answer": "7"})
    row = make_example("chain_sum", {}, 0)
    with pytest.raises(ValueError, match="makes another example of the row, which is of version"):
        score("7", {**row, "prompt": "3+4"})
    monkeypatch.setattr(reasoning_tasks, "_version", lambda: "9.9")
    assert digest_rows([make_example("chain_sum", {}, 0)]) != digest_rows([row])
