"""What was found of a model is kept by all that it depends on."""

from __future__ import annotations

import dataclasses
import os

import pytest

from trainer.config import Config, FSDPConfig, ModelConfig, critic_role, policy_role
from trainer.models import verdicts
from trainer.models.verdicts import Verdict, keep_verdict, read_verdict, verdict_file

SIZES = {"dp_shard": 2, "tp": 1}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12")
    return tmp_path


def file_of(directory, **changes) -> str:
    values = {"model": ModelConfig(cache_dir="/cache"), "path": str(directory), "device": "cpu", "sizes": SIZES}
    return verdict_file(**values | {"spec": policy_role(Config()), "pack": True, "longest": 64} | changes)


def test_a_verdict_is_read_as_it_was_kept(tmp_path):
    file = str(tmp_path / "model_checks" / "one.json")
    assert read_verdict(file) is None
    keep_verdict(file, Verdict("another window", ["layer 7"], 0.5, 0.1, 2, 1.5))
    assert read_verdict(file) == Verdict("another window", ["layer 7"], 0.5, 0.1, 2, 1.5)
    os.truncate(file, 3)
    assert read_verdict(file) is None


def test_what_a_verdict_depends_on_names_its_file(directory, monkeypatch):
    half = dataclasses.replace(policy_role(Config()), sharding=FSDPConfig(param_dtype="bfloat16"))
    others = {
        file_of(directory, **one)
        for one in (
            {"model": ModelConfig(cache_dir="/cache", attn_implementation="eager")},
            {"device": "cuda"},
            {"sizes": SIZES | {"tp": 2}},
            {"pack": False},
            {"longest": 65},
            {"spec": critic_role(Config())},
            {"spec": half},
        )
    }
    first = file_of(directory)
    assert len(others | {first}) == 8 and first.startswith("/cache/model_checks/")
    assert file_of(directory, sizes=SIZES | {"dp_shard": 4}) == first, "the number of ranks"
    for name in ("config.json", "model.safetensors"):
        os.utime(directory / name, ns=(1, 1))
        assert file_of(directory) not in {first, *others}
        others.add(file_of(directory))
    monkeypatch.setattr(verdicts, "_code", lambda: "another version")
    assert file_of(directory) not in others
