"""Values that no run can use are refused by key, before anything starts."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.jobs import run_job
from trainer.config import OPEN_SECTIONS, Config, compose, conf_dir
from trainer.errors import UserError
from trainer.validation import AT_MOST, LARGEST_INTEGER, validate


def typed_keys(section: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Every key of the schema with its type."""
    found = []
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            found += typed_keys(value, f"{prefix}{f.name}.")
        else:
            found.append((f"{prefix}{f.name}", str(f.type)))
    return found


KEYS = typed_keys(Config())
BASE = compose([])


def refusal(key: str, value: Any) -> str:
    """What is said to the default config with this value."""
    cfg = copy.deepcopy(BASE)
    *sections, name = key.split(".")
    node: Any = cfg
    for section in sections:
        node = getattr(node, section)
    setattr(node, name, value)
    with pytest.raises(UserError) as error:
        validate(cfg)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{key}=") or key in str(error.value)
    return str(error.value)


def keys_of_type(kind: str) -> list[str]:
    return [key for key, declared in KEYS if re.search(rf"\b{kind}\b", declared) and key not in OPEN_SECTIONS]


@pytest.mark.parametrize("key", keys_of_type("float"))
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_number_is_infinite_or_nan(key, value):
    as_list = key.endswith((".betas", ".weights"))
    assert re.fullmatch(
        rf"{key}=\[?{value}(, 0.5\])?: must be a finite number", refusal(key, [value, 0.5] if as_list else value)
    )


def test_the_floats_of_open_sections_are_finite_too():
    said = refusal("algorithm.options", {"x": [math.nan]})
    assert said == "algorithm.options={'x': [nan]}: must be a finite number"


@pytest.mark.parametrize("key", keys_of_type("int"))
@pytest.mark.parametrize("value", [10**30, -(10**30)])
def test_no_whole_number_is_beyond_what_libraries_take(key, value):
    assert re.match(rf"{key}={value}: must be at (most|least)", refusal(key, value))


@pytest.mark.parametrize("key", keys_of_type("str"))
@pytest.mark.parametrize("value, problem", [("", "is empty"), (" ", "is empty"), ("a\0b", "a character that no file")])
def test_no_text_is_empty_or_unusable(key, value, problem):
    kind = dict(KEYS)[key]
    assert problem in refusal(key, [value] if kind.startswith("list") else value)


def test_half_of_a_surrogate_pair_is_shown_in_ascii():
    assert refusal("data.system_prompt", "\ud800").startswith(r"data.system_prompt='\ud800': holds a character")


@pytest.mark.parametrize("key", ["trainer.seed", "model.tiny.seed"])
def test_seeds_have_32_bits(key):
    assert "must be at most 4294967295" in refusal(key, 2**32)
    assert compose([f"{key}={2**32 - 1}"])


@pytest.mark.parametrize(
    "name", ["../../x", "a/b", "/tmp/x", ".", "..", " x", "x ", "a\nb", "a\tb", "x" * 201, "é" * 101]
)
def test_the_name_of_a_run_is_a_plain_name(name):
    assert "must be a plain name" in refusal("trainer.run_name", name)


@pytest.mark.parametrize("name", ["x", "my run", "lr=1e-4,seed=2", "run.2", "..x", "-x", "x" * 200, "λ", "C:\\x"])
def test_other_names_of_runs_pass(name):
    cfg = copy.deepcopy(BASE)
    cfg.trainer.run_name = name
    validate(cfg)


@pytest.mark.parametrize(
    "names, problem",
    [
        (["rolout.n"], "no key or section rolout.n; valid are trainer, algorithm"),
        (["rollout.m"], "no key or section rollout.m; valid are rollout.engine, .*rollout.n"),
        (["rollout.n", "nothing"], "no key or section nothing"),
        (["rollout.n.x"], "no key or section rollout.n.x"),
        (["trainer."], "no key or section trainer."),
        (["*"], r"no key or section \*"),
        (["algorithm.options.sharpness"], "no key or section .*sharpness; name algorithm.options as a whole"),
        (["rollout.engine_args.dtype"], "name rollout.engine_args as a whole"),
    ],
)
def test_names_of_allowed_changes_exist(names, problem):
    assert re.search(problem, refusal("trainer.allow_config_change", names))


def test_keys_sections_and_open_sections_may_be_allowed():
    names = ["trainer", "rollout.n", "trainer.policy.optimizer", "algorithm.options", "model.path"]
    assert compose([f"trainer.allow_config_change=[{','.join(names)}]"]).trainer.allow_config_change == names


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (["rollout.temperature=0.005"], r"rollout.temperature=0.005: must be at least 0.01 \(or 0\)"),
        (["rollout.temperature=1e9"], "rollout.temperature=1000000000.0: must be at most 100"),
        (["rollout.gpu_memory_utilization=0"], "rollout.gpu_memory_utilization=0.0: must be above 0"),
        (["reward.timeout_s=-1"], "reward.timeout_s=-1.0: must be at least 0.001"),
        (["reward.timeout_s=1e12"], "reward.timeout_s=.*: must be at most 1000000"),
        (["trainer.worker_timeout_s=1e15"], "trainer.worker_timeout_s=.*: must be at most 1000000"),
        (["trainer.lock_timeout_s=1e15"], "trainer.lock_timeout_s=.*: must be at most 1000000"),
        (["trainer.resume_tolerance=2"], "trainer.resume_tolerance=2.0: must be at most 1"),
        (["sft.optimizer.min_lr_ratio=5"], "sft.optimizer.min_lr_ratio=5.0: must be at most 1"),
        (["model.tiny.head_dim=3"], "model.tiny.head_dim=3: must be even"),
        (["model.tiny.max_position_embeddings=0"], "model.tiny.max_position_embeddings=0: must be at least 1"),
        (["trainer.best_metric=accuracy"], "trainer.best_metric=accuracy: no such metric; docs/metrics.md"),
        (
            ["trainer.keep_best=1", "trainer.max_ckpts_to_keep=1", "trainer.val_interval=-1"],
            "trainer.keep_best=1: trainer.best_metric=val/accuracy is never measured",
        ),
        (["trainer.run_dir='~/runs'"], "trainer.run_dir=~/runs: begins with ~"),
        (["trainer.stop_at=0001-01-01"], "trainer.stop_at=0001-01-01: must be a time"),
    ],
)
def test_values_that_make_no_sense_are_refused(overrides, sentence):
    with pytest.raises(UserError, match=sentence):
        compose(overrides)


def test_the_tables_name_real_keys():
    assert {key for keys in AT_MOST.values() for key in keys} <= {key for key, _ in KEYS}
    assert compose([f"trainer.total_steps={LARGEST_INTEGER}"])


@pytest.mark.parametrize("group", ["model", "data", "rollout", "logger", "experiment"])
def test_every_choice_of_the_groups_passes(group):
    for path in Path(conf_dir(), group).glob("*.yaml"):
        files = ["data.train_files=[a.jsonl]", "data.val_files=[b.jsonl]"] if path.stem == "files" else []
        compose([f"{group}={path.stem}", *files])


@pytest.mark.parametrize(
    "override, sentence",
    [
        ("trainer.run_name=../../x", "error: trainer.run_name=../../x: must be a plain name"),
        ("trainer.allow_config_change=[nothing]", "error: trainer.allow_config_change=.*no key or section nothing"),
    ],
)
def test_the_command_line_refuses_with_status_2(override, sentence, tmp_path):
    (tmp_path / "deep").mkdir()
    done = run_job(override, cwd=tmp_path / "deep", small=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(sentence, done.stderr.strip().splitlines()[-1])
    assert [path.name for path in tmp_path.rglob("*")] == ["deep"], "nothing was made"
