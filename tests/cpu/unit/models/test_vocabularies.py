"""A model of the run that lacks tokens of the policy is refused before it is loaded."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from tests.support.architectures import SHAPE
from tests.support.runs import configured
from trainer.config import LM, SCORE, TASKS, RoleSpec, policy_role
from trainer.errors import UserError
from trainer.models.checks import check_tokenizer, check_vocabularies
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer
from trainer.tasks import build_task
from trainer.tasks.base import make_trainer, tokenizer_of

TASK = replace(
    TASKS["rl"],
    roles=lambda cfg: (
        policy_role(cfg),
        RoleSpec("teacher", str(Path(cfg.model.path).with_name("teacher")), LM, path_key="teacher"),
        RoleSpec("judge", str(Path(cfg.model.path).with_name("judge")), SCORE, path_key="judge"),
    ),
)


def write_configs(directory: Path, **tokens: int) -> str:
    for name, count in tokens.items():
        Qwen3Config(**SHAPE | {"vocab_size": count}).save_pretrained(directory / name)
    return str(directory / "policy")


@pytest.mark.parametrize(
    ("tokens", "refused"), [((100, 100, 120), None), ((100, 99, 100), "teacher"), ((100, 200, 64), "judge")]
)
def test_a_frozen_model_with_fewer_tokens_than_the_policy_is_refused(tmp_path, tokens, refused):
    path = write_configs(tmp_path, **dict(zip(("policy", "teacher", "judge"), tokens, strict=True)))
    cfg = configured(tmp_path / "run", {"model.path": path}, task=f"{__name__}:TASK")
    if refused is None:
        return check_vocabularies(cfg, path)
    known = tokens[1 if refused == "teacher" else 2]
    sentence = (
        f"{refused}={tmp_path}/{refused}: the vocabulary of the {refused} has {known} tokens, and that of the policy, "
        f"{path}, has 100; "
    )
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}.* resize its embeddings to 100 tokens$"):
        check_vocabularies(cfg, path)


def test_a_critic_with_weights_of_its_own_is_checked_by_its_key(tmp_path):
    path = write_configs(tmp_path, policy=100, critic=64)
    cfg = configured(tmp_path / "run", {"model.path": path, "algorithm.advantage_estimator": "gae"})
    check_vocabularies(cfg, path)
    cfg.trainer.critic.path = str(tmp_path / "critic")
    with pytest.raises(UserError, match="^trainer.critic.path=.*critic: the vocabulary of the critic has 64 tokens"):
        check_vocabularies(cfg, path)


def test_ranks_are_not_started_for_such_a_run(tmp_path):
    path = write_configs(tmp_path, policy=100, critic=64)
    critic = {"trainer.critic.path": str(tmp_path / "critic"), "algorithm.advantage_estimator": "gae"}
    cfg = configured(tmp_path / "run", {"model.path": path, **critic})
    nothing: Any = None
    with pytest.raises(UserError, match="^trainer.critic.path="):
        make_trainer(build_task(cfg), nothing, nothing, path, nothing)


def test_a_teacher_reads_the_tokens_of_the_policy_as_the_policy_does(tmp_path):
    """It may have further ones, but another number of columns cannot be split over ranks."""
    for name in ("policy", "teacher"):
        build_tiny(TinyShape(hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16), tmp_path / name)
    keys = {"model.path": str(tmp_path / "policy"), "algorithm.teacher.path": str(tmp_path / "teacher")}
    keys |= {"algorithm.opd_kl_coef": 1.0, "algorithm.teacher.divergence": "jsd"}
    cfg = configured(tmp_path / "run", keys)
    file, config = tmp_path / "teacher/tokenizer.json", tmp_path / "teacher/config.json"
    tokenizer = load_tokenizer(str(tmp_path / "teacher"))
    tokenizer.add_tokens(["<further>"])
    tokenizer.save_pretrained(tmp_path / "teacher")
    check_vocabularies(cfg, str(tmp_path / "policy"))
    cfg.trainer.num_workers = cfg.trainer.tensor_parallel_size = 2
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 400}))
    with pytest.raises(UserError, match="^trainer.tensor_parallel_size=2: splits the .* and the 400 of the teacher"):
        check_vocabularies(cfg, str(tmp_path / "policy"))
    cfg.trainer.num_workers = cfg.trainer.tensor_parallel_size = 1
    saved = json.loads(file.read_text())
    a, b = list(saved["model"]["vocab"])[5:7]
    saved["model"]["vocab"] |= {a: saved["model"]["vocab"][b], b: saved["model"]["vocab"][a]}
    file.write_text(json.dumps(saved))
    with pytest.raises(UserError, match="^algorithm.teacher.path=.*: 2 tokens of the policy, such as .* are others in"):
        check_vocabularies(cfg, str(tmp_path / "policy"))
    for one in (tmp_path / "teacher").glob("*token*"):
        one.unlink()
    with pytest.raises(UserError, match="^algorithm.teacher.path=.*: has no tokenizer"):
        check_vocabularies(cfg, str(tmp_path / "policy"))


def test_nothing_is_read_for_a_run_of_one_model(tmp_path):
    check_vocabularies(configured(tmp_path), str(tmp_path / "missing"))


@pytest.mark.parametrize("shorter", [0, 1, 3])
def test_a_tokenizer_with_tokens_that_have_no_embedding_is_refused(tmp_path, shorter):
    build_tiny(TinyShape(hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16), str(tmp_path))
    tokenizer = load_tokenizer(str(tmp_path))
    config = Qwen3Config.from_pretrained(tmp_path)
    assert len(tokenizer) < config.vocab_size, "a padded embedding is fine"
    tokenizer.add_tokens([f"<{n}>" for n in range(config.vocab_size - len(tokenizer))])
    tokenizer.add_tokens(["<a>", "<b>", "<c>"][:shorter], special_tokens=True)
    cfg = configured(tmp_path / "run", {"model.path": str(tmp_path)})
    if shorter == 0:
        return check_tokenizer(cfg, str(tmp_path), tokenizer)
    rows = config.vocab_size
    sentence = f"the model has {rows} embeddings, and {shorter} tokens of its tokenizer none, such as '<a>' ({rows}); "
    with pytest.raises(UserError, match=f"^model.path={tmp_path}: {re.escape(sentence)}"):
        check_tokenizer(cfg, str(tmp_path), tokenizer)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{shorter} tokens of its tokenizer none"):
        tokenizer_of(cfg, str(tmp_path))


def test_a_token_for_images_needs_no_embedding(tmp_path):
    """Gemma 3 with text alone has one such token more than embeddings."""
    build_tiny(TinyShape(hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16), str(tmp_path))
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.add_tokens([f"<{n}>" for n in range(Qwen3Config.from_pretrained(tmp_path).vocab_size - len(tokenizer))])
    tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    cfg = configured(tmp_path / "run", {"model.path": str(tmp_path)})
    with pytest.raises(UserError, match="<image_soft_token>"):
        tokenizer_of(cfg, str(tmp_path))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_token": "<image_soft_token>"}))
    tokenizer_of(cfg, str(tmp_path))
