"""A model is compared with its own class before the first step, and each fault is refused by what differs."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import SeedOssConfig

from tests.support.architectures import ALL, CONVERTED, SHAPE, WINDOW, random_model
from tests.support.ranks import run_ranks
from trainer.config import Config, FSDPConfig, ModelConfig, RoleSpec, critic_role, policy_role
from trainer.errors import UserError
from trainer.models import attention, loading, model_check
from trainer.models.chunked_logprobs import Head
from trainer.models.loading import load_model
from trainer.models.model_check import check_model
from trainer.models.verdicts import Verdict
from trainer.workers.rank import Rank

MODELS = {
    "gemma3": ALL["gemma3"],
    "sinks": ALL["sinks"],
    "window": ALL["a window in the mask alone"],
    "deepseek": CONVERTED["deepseek_v3"],
    "noise": SeedOssConfig(**SHAPE, residual_dropout=0.3, attention_dropout=0.0),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> str:
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        model = random_model(config, "eager")
        for buffer in model.state_dict().values():
            if "correction" in name:
                buffer.normal_()
        model.save_pretrained(root / name)
    return str(root)


def without_windows(*args: Any) -> Any:
    *before, _, softcap, has_sinks = args
    return ATTEND_ROW(*before, None, softcap, has_sinks)


ATTEND_ROW, SET_ATTENTION = attention._attend_row, loading.set_attention


def pack_anyway(lm: nn.Module, *args: Any) -> None:
    SET_ATTENTION(lm, *args)
    for module in lm.modules():
        module.packs_rows = True


def change_a_buffer(module: nn.Module) -> None:
    dict(module.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"].add_(1.0)


def randomise_a_weight(module: nn.Module) -> None:
    with torch.no_grad():
        module.get_parameter("model.layers.1.self_attn.o_proj.weight").to_local().normal_()


def units_but_one(*args: Any) -> list:
    return FILE_UNITS(*args)[:-1]


FILE_UNITS = model_check.file_units
NOISE = [
    patch.object(loading, "without_noise", lambda config: config),
    patch.object(loading, "_leave_training_mode", lambda lm: lm.train()),
]
FAULTS: dict[str, tuple[str, str, list[Any], Callable[[nn.Module], None] | None, str]] = {
    "swallowed window": (
        *("gemma3", "sdpa", [patch.object(attention, "_attend_row", without_windows)], None),
        f"a window of {WINDOW} tokens is another one than in its own class (log-probs by up to",
    ),
    "dropout in a function": ("noise", "sdpa", NOISE, None, "two passes of the same weights differ"),
    "rows that see each other": (
        *("sinks", "eager", [patch.object(loading, "set_attention", pack_anyway)], None),
        "the sequences of a packed row see each other",
    ),
    "lost buffer": (
        "deepseek",
        "sdpa",
        [],
        change_a_buffer,
        "its buffer model.layers.1.mlp.gate.e_score_correction_bias",
    ),
    "random weight": (
        "gemma3",
        "sdpa",
        [],
        randomise_a_weight,
        "its weight model.layers.1.self_attn.o_proj.weight is not",
    ),
    "head": (
        *("gemma3", "sdpa", [patch("trainer.models.chunked_logprobs.find_head", lambda _: Head(scale=0.5))], None),
        "its output layer (head) computes something else",
    ),
    "export": (
        *("gemma3", "sdpa", [patch.object(model_check, "file_units", units_but_one)], None),
        "its weight lm_head.weight does not come back from an export",
    ),
}


def checked(rank: Rank, path: str, attn: str = "sdpa", change: Any = None, spec: RoleSpec | None = None, **keys: Any):
    """The verdict on a model, or the refusal."""
    model, spec = ModelConfig(path=path, attn_implementation=attn, **keys), spec or policy_role(rank.cfg)
    module = load_model(model, path, rank.layout, spec)
    if change is not None:
        change(module)
    try:
        return check_model(model, module, path, rank.layout, spec)
    except UserError as error:
        return str(error)


def find_faults(rank: Rank, models: str, cache: str) -> dict[str, Any]:
    """What is said of models with faults, whole ones and parts; and without."""
    found = {}
    for name, (model, attn, patches, change, _) in FAULTS.items():
        for part in (False, True)[: 1 if name == "export" else 2]:
            with ExitStack() as patched:
                for one in (patch.multiple(model_check, _WHOLE=0 if part else 10**9), *patches):
                    patched.enter_context(one)
                path, cache_dir = os.path.join(models, model), os.path.join(cache, name, str(part))
                found[name, part] = checked(rank, path, attn, change, cache_dir=cache_dir)
    return found


def test_each_fault_is_refused_by_what_differs(models, tmp_path):
    (found,) = run_ranks(1, find_faults, models, str(tmp_path), cfg=Config())
    for (name, part), sentence in found.items():
        model, *_, problem = FAULTS[name]
        assert isinstance(sentence, str), (name, part, sentence)
        assert sentence.startswith(f"model.path={models}/{model}: {problem}"), (name, part, sentence)
        assert sentence.endswith("; model.check=accept trains it nevertheless")
    for name in ("swallowed window", "rows that see each other"):
        assert "; set trainer.pack=false; model.check" in found[name, False]


def check_right_models(rank: Rank, models: str, cache: str) -> dict[str, Any]:
    cfg, found = rank.cfg, {}
    before = torch.get_rng_state()
    half = RoleSpec("policy", sharding=FSDPConfig(param_dtype="bfloat16"))
    for name in MODELS if rank.world_size == 1 else ("sinks",):
        path = os.path.join(models, name)
        found[name, "policy"] = checked(rank, path, cache_dir=os.path.join(cache, "policy"))
        with patch.multiple(model_check, _WHOLE=0):
            found[name, "part"] = checked(rank, path, cache_dir=os.path.join(cache, "part"))
    for kind, spec in (("critic", critic_role(cfg)), ("half", half)):
        found["sinks", kind] = checked(rank, os.path.join(models, "sinks"), spec=spec, cache_dir=cache)
    with patch.multiple(model_check, _WHOLE=0, _LARGEST=1):
        found["too large"] = checked(rank, path, cache_dir=os.path.join(cache, "large"))
    found["same random state"] = torch.equal(before, torch.get_rng_state())
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_right_models_are_accepted(models, tmp_path, ranks):
    found = run_ranks(ranks, check_right_models, models, str(tmp_path), cfg=Config())[-1]
    assert found.pop("same random state")
    assert found.pop("too large").not_compared == ["the model, because its layers are too large"]
    for name, verdict in found.items():
        assert isinstance(verdict, Verdict), (name, verdict)
        assert verdict.problem is None and verdict.not_compared == [], (name, verdict)
        assert verdict.difference <= verdict.limit
        assert (verdict.limit > 0.01) == (name[1] == "half"), "rounding explains more in bfloat16"


def check_twice(rank: Rank, models: str, cache: str) -> list[Any]:
    path = os.path.join(models, "gemma3")
    said = [checked(rank, path, change=randomise_a_weight, cache_dir=cache)]
    with patch.object(model_check, "_compare", lambda *_: pytest.fail("the verdict is kept")):
        said += [checked(rank, path, cache_dir=cache), checked(rank, path, cache_dir=cache, check="accept")]
    os.utime(os.path.join(path, "model.safetensors"))
    return [*said, checked(rank, path, cache_dir=cache)]


def test_a_verdict_is_kept_until_a_file_changes_and_can_be_accepted(models, tmp_path):
    ((first, again, accepted, changed),) = run_ranks(1, check_twice, models, str(tmp_path), cfg=Config())
    assert first == again and isinstance(first, str)
    assert accepted.problem in first
    assert changed.problem is None
    assert len(list(Path(tmp_path, "model_checks").iterdir())) == 2
