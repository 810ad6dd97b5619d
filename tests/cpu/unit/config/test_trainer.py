"""Keys of `trainer.*` that contradict others, and names of runs and of keys."""

from __future__ import annotations

import contextlib
import copy
import re

import pytest

from tests.cpu.unit.config.contradictions import (  # noqa: F401
    test_contradictions_are_refused_in_one_sentence,
    test_what_is_at_a_bound_is_accepted,
)
from tests.support.config import config_of, refusal_of_value
from trainer.config import validate
from trainer.errors import UserError

BASE = config_of([])

CONTRADICTIONS = [
    (["trainer.mini_batch_size=7"], "trainer.train_batch_size=64.*trainer.mini_batch_size=7"),
    (["trainer.num_workers=3", "trainer.dp_replicate=2"], "trainer.num_workers=3.*trainer.dp_replicate=2"),
    (
        ["trainer.num_workers=4", "trainer.dp_replicate=2", "trainer.context_parallel_size=4"],
        "trainer.num_workers=4: must be a multiple of trainer.dp_replicate=2 x trainer.context_parallel_size=4",
    ),
    (
        ["trainer.num_workers=2", "trainer.context_parallel_size=2", "model.attn_implementation=eager"],
        "trainer.context_parallel_size=2: needs model.attn_implementation=sdpa",
    ),
    (["trainer.resume_path=x/global_step_1"], "trainer.resume_path.*trainer.resume_mode=from_path"),
    (
        ["trainer.num_workers=2", "trainer.tensor_parallel_size=2", "trainer.policy.fsdp.compile=true"],
        "trainer.policy.fsdp.compile=True: cannot be combined with trainer.tensor_parallel_size: torch 2.13 fails",
    ),
    (
        ["trainer.deterministic=true", "trainer.policy.fsdp.compile=true"],
        "trainer.policy.fsdp.compile=True: cannot be combined with trainer.deterministic=True: what a kernel is",
    ),
    (
        ["trainer.num_workers=4", "trainer.min_world_size=5"],
        "min_world_size=5: must be from 1 to .*num_workers=4",
    ),
    (
        ["trainer.num_workers=4", "trainer.dp_replicate=2", "trainer.min_world_size=1"],
        "trainer.min_world_size=1: must be from 2 to trainer.num_workers=4",
    ),
    (
        ["trainer.copy_steps=true", "trainer.ray_address=auto"],
        "trainer.copy_steps=True: needs all ranks on the machine of the driver",
    ),
    (["trainer.offload=all"], "trainer.offload=all: .*set rollout.colocate=true too"),
    (["trainer.resume_mode=from_path"], "trainer.resume_mode.*trainer.resume_path"),
    (["trainer.load_components=[weights]"], "trainer.load_components.*needs trainer.resume_mode=from_path"),
    (["trainer.ckpt_interval=often"], "trainer.ckpt_interval=often: must be a number of steps, -1 or auto"),
    (["trainer.keep_best=1"], "trainer.keep_best=1: .*set trainer.max_ckpts_to_keep too"),
    (["trainer.keep_best=4"], "trainer.keep_best=4: .*set trainer.max_ckpts_to_keep too"),
    (
        ["trainer.keep_best=1", "trainer.max_ckpts_to_keep=1", "trainer.val_interval=-1"],
        "trainer.keep_best=1: trainer.best_metric=val/accuracy is never measured",
    ),
    (["trainer.run_dir='~/runs'"], "trainer.run_dir=~/runs: begins with ~"),
    (["trainer.ckpt_path=ftp://host/x"], "trainer.ckpt_path: must be a directory that all ranks see, or begin with s3"),
    (["trainer.ckpt_path=s3://key:secret@bucket/x"], "^trainer.ckpt_path: must not contain credentials: [^@]*$"),
    (["trainer.ckpt_path=s3://bucket//x"], "trainer.ckpt_path: must not contain . or .. or an empty name"),
    (
        ["trainer.export_path=x/ckpts", "trainer.ckpt_path=x/ckpts"],
        "trainer.ckpt_path=x/ckpts: is trainer.export_path=x/ckpts, or lies inside it; choose a directory beside it",
    ),
    (["trainer.export_path=x/ckpts/exports/", "trainer.ckpt_path=x/ckpts"], "trainer.export_path=.*lies inside it"),
    (["trainer.export_path=outputs/default"], "trainer.ckpt_path=outputs/default/checkpoints: .*lies inside it"),
    (["trainer.export_path=s3://b/x", "trainer.ckpt_path=s3://b/x/y"], "trainer.ckpt_path=s3://b/x/y: is trainer.exp"),
    (["trainer.export_path=s3://b/x/y", "trainer.ckpt_path=s3://b/x/"], "trainer.export_path=s3://b/x/y: is trainer."),
    (
        ["trainer.export_path=/x/e", "trainer.ckpt_path=s3://b/x", "trainer.ckpt_cache_dir=/x"],
        "trainer.export_path=/x/e: is trainer.ckpt_cache_dir=/x, or lies inside it",
    ),
    (["trainer.run_dir=x/ckpts/one", "trainer.ckpt_path=x/ckpts"], "trainer.run_dir=x/ckpts/one: is trainer.ckpt_path"),
    (
        ["trainer.resume_mode=from_path", "trainer.resume_path=x/c/global_step_2", "trainer.export_path=x/c"],
        "trainer.export_path=x/c: is trainer.resume_path=x/c, or lies inside it",
    ),
    (["model.path=conf/model", "trainer.export_path=conf"], "model.path=conf/model: is trainer.export_path=conf"),
    (["trainer.deadline=0001-01-01"], "trainer.deadline=0001-01-01: must be a time"),
]
AT_THE_BOUND = [
    ["trainer.num_workers=4", "trainer.min_world_size=4"],
    ["trainer.num_workers=4", "trainer.dp_replicate=2", "trainer.min_world_size=2"],
    ["trainer.run_dir=x", "trainer.ckpt_path=x"],
    ["trainer.ckpt_path=x/c", "trainer.export_path=x/ce"],
    ["trainer.resume_mode=from_path", "trainer.resume_path=x/c/global_step_2", "trainer.ckpt_path=x/c"],
    ["model.path=conf/model", "trainer.export_path=confs"],
    ['trainer.task="trainer.evaluate.subject:EVALUATION"', "model.path=conf/model", "trainer.export_path=conf"],
]


def test_links_are_resolved_before_places_are_compared(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").symlink_to(tmp_path / "one")
    config = copy.deepcopy(BASE)
    config.trainer.ckpt_path = f"{tmp_path}/one/checkpoints"
    for exports, is_refused in (("checkpoints", True), ("checkpoints/x", True), ("exports", False)):
        config.trainer.export_path = f"{tmp_path}/two/{exports}"
        with pytest.raises(UserError, match="or lies inside it") if is_refused else contextlib.nullcontext():
            validate(config)


@pytest.mark.parametrize(
    "name", ["../../x", "a/b", "/tmp/x", ".", "..", " x", "x ", "a\nb", "a\tb", "x" * 201, "é" * 101]
)
def test_names_of_runs_that_are_not_plain_are_refused(name):
    assert "must be a plain name" in refusal_of_value(BASE, "trainer.run_name", name)


@pytest.mark.parametrize("name", ["x", "my run", "lr=1e-4,seed=2", "run.2", "..x", "-x", "x" * 200, "λ", "C:\\x"])
def test_other_names_of_runs_are_accepted(name):
    config = copy.deepcopy(BASE)
    config.trainer.run_name = name
    validate(config)


@pytest.mark.parametrize(
    "names, problem",
    [
        (["rolout.n"], "rolout.n: no such key; did you mean rollout.n, or"),
        (["rollout.m"], "rollout.m: no such key; docs/config.md lists the keys of rollout"),
        (["rollout.n", "nothing"], ": nothing: no such key"),
        (["rollout.n.x"], ": rollout.n.x: no such key"),
        (["trainer."], ": trainer.: no such key"),
        (["*"], r": \*: no such key"),
        (["algorithm.options.sharpness"], ": algorithm.options.sharpness: no such key"),
    ],
)
def test_allowed_changes_must_name_keys_or_sections(names, problem):
    assert re.search(problem, refusal_of_value(BASE, "trainer.allow_config_change", names))


def test_keys_sections_and_open_sections_may_be_allowed():
    names = ["trainer", "rollout.n", "trainer.policy.optimizer", "algorithm.options", "model.path"]
    assert config_of([f"trainer.allow_config_change=[{','.join(names)}]"]).trainer.allow_config_change == names


@pytest.mark.parametrize(("axes", "size"), [((1, 1, 1), 1), ((2, 3, 1), 6), ((2, 3, 4), 24)])
def test_the_ranks_of_one_layout_are_the_product_of_its_axes(axes, size):
    trainer = copy.deepcopy(BASE.trainer)
    trainer.dp_replicate, trainer.context_parallel_size, trainer.tensor_parallel_size = axes
    assert trainer.layout_size == size
