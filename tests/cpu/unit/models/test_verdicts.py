"""What was found of a model is kept by all that it depends on."""

from __future__ import annotations

import os

import pytest

from trainer.config import Config, ModelConfig, RolloutConfig, TrainerConfig, critic_role, policy_role
from trainer.models import model_check
from trainer.models.model_check import Verdict, keep_verdict, read_verdict, verdict_file

SIZES = {"dp_shard": 2, "tp": 1}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12")
    return tmp_path


def file_of(directory, **changes) -> str:
    values = {"cfg": config(), "path": str(directory), "sizes": SIZES, "spec": policy_role(Config())}
    return verdict_file(**values | changes)


def config(pack: bool = True, longest: int = 64, **model) -> Config:
    rollout = RolloutConfig(max_prompt_tokens=longest - 32, max_response_tokens=32)
    return Config(model=ModelConfig(cache_dir="/cache", **model), trainer=TrainerConfig(pack=pack), rollout=rollout)


def test_a_verdict_is_read_as_it_was_kept(tmp_path):
    file = str(tmp_path / "model_checks" / "one.json")
    assert read_verdict(file) is None
    keep_verdict(file, Verdict("another window", ["layer 7"]))
    assert read_verdict(file) == Verdict("another window", ["layer 7"])
    os.truncate(file, 3)
    assert read_verdict(file) is None


def test_what_a_verdict_depends_on_names_its_file(directory, monkeypatch):
    others = {
        file_of(directory, **one)
        for one in (
            {"cfg": config(attn_implementation="eager")},
            {"sizes": SIZES | {"tp": 2}},
            {"cfg": config(pack=False)},
            {"cfg": config(longest=65)},
            {"spec": critic_role(Config())},
        )
    }
    first = file_of(directory)
    assert len(others | {first}) == 6 and first.startswith("/cache/model_checks/")
    assert file_of(directory, sizes=SIZES | {"dp_shard": 4}) == first, "the number of ranks"
    for name in ("config.json", "model.safetensors"):
        os.utime(directory / name, ns=(1, 1))
        assert file_of(directory) not in {first, *others}
        others.add(file_of(directory))
    monkeypatch.setattr(model_check, "_code", lambda: "another version")
    assert file_of(directory) not in others
