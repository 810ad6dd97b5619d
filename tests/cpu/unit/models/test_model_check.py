"""A model is compared with its own class before the first step, and each fault is refused by what differs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, SeedOssConfig

from tests.support.architectures import ALL, CONVERTED, SHAPE, VOCABULARY, WINDOW, random_model
from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.tables import table
from tests.support.training import GROUPS, config, make_batch
from tests.support.whole_batches import update_batch
from trainer.config import Config, FSDPConfig, ModelConfig, RoleSpec, critic_role, policy_role
from trainer.errors import LogprobMismatchError, UserError
from trainer.models import attention, loading, model_check
from trainer.models.loading import load_model
from trainer.models.logprobs import Head
from trainer.models.model_check import Verdict, check_model
from trainer.parallel.packing import Packing
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
    for name, of_model in MODELS.items():
        model = random_model(of_model, "eager")
        for buffer in model.state_dict().values():
            if "correction" in name:
                buffer.normal_()
        model.save_pretrained(root / name)
    return str(root)


def without_windows(*args: Any) -> Any:
    *before, scores = args
    return ATTEND_ROW(*before, scores._replace(window=None))


ATTEND_ROW, SET_ATTENTION = attention._attend_row, loading.set_attention


def pack_anyway(lm: nn.Module, *args: Any) -> None:
    SET_ATTENTION(lm, *args)
    for module in lm.modules():
        module.packs_rows = True


def change_a_buffer(module: nn.Module) -> None:
    dict(module.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"].zero_()


def randomise_a_weight(module: nn.Module) -> None:
    with torch.no_grad():
        module.get_parameter("model.layers.1.self_attn.o_proj.weight").to_local().normal_()


def fail(*_: Any) -> None:
    raise RuntimeError("no such kernel")


def see_each_other_without_gradients(query: torch.Tensor, *args: Any) -> Any:
    packing = args[2]
    if not torch.is_grad_enabled() and len(packing.lengths) > 1:
        args = (*args[:2], Packing([packing.tokens], packing.device), *args[3:])
    return ATTEND_ROW(query, *args)


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
    "rows that see each other without gradients": (
        *("gemma3", "sdpa", [patch.object(attention, "_attend_row", see_each_other_without_gradients)], None),
        "the sequences of a packed row see each other where no gradients are computed",
    ),
    "code that fails": (
        *("gemma3", "sdpa", [patch.object(model_check, "_judge", fail)], None),
        "it cannot be compared with its own class, because that fails: RuntimeError: no such kernel",
    ),
    "head": (
        *("gemma3", "sdpa", [patch("trainer.models.logprobs.find_head", lambda _: Head(scale=0.5))], None),
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
    cfg = replace(rank.cfg, model=model)
    module = load_model(cfg, path, rank.layout, spec)
    if change is not None:
        change(module)
    try:
        return check_model(cfg, module, path, rank.layout, spec)
    except UserError as error:
        return str(error)


def find_faults(rank: Rank, models: str, cache: str) -> dict[str, Any]:
    """What is said of models with faults."""
    found = {}
    for name, (model, attn, patches, change, _) in FAULTS.items():
        with ExitStack() as patched:
            for one in patches:
                patched.enter_context(one)
            path, cache_dir = os.path.join(models, model), os.path.join(cache, name)
            found[name] = checked(rank, path, attn, change, cache_dir=cache_dir)
    return found


def test_each_fault_is_refused_by_what_differs(models, tmp_path):
    (found,) = run_ranks(1, find_faults, models, str(tmp_path), cfg=Config())
    for name, sentence in found.items():
        model, *_, problem = FAULTS[name]
        assert isinstance(sentence, str), (name, sentence)
        assert sentence.startswith(f"model.path={models}/{model}: {problem}"), (name, sentence)
        assert sentence.endswith("; model.check=accept trains it nevertheless")
    for name in ("swallowed window", "rows that see each other"):
        assert "; set trainer.pack=false; model.check" in found[name]


STOPPED = {
    "rows that see each other": ("sinks", "eager", [patch.object(loading, "set_attention", pack_anyway)]),
    "experts of the engine": ("window", "sdpa", []),
}
"""Faults that jobs had: what differs between the ranks and the engine."""


def engine_logprobs(path: str, ids: np.ndarray, lengths: np.ndarray, has_fault: bool) -> np.ndarray:
    """The log-probs of rows `(B, T)` as an engine computes them: each alone, by the model's own class."""
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    found = np.zeros(ids.shape, np.float32)
    with torch.no_grad():
        if has_fault:
            for name, parameter in lm.named_parameters():
                if ".experts." in name:
                    parameter.copy_(parameter.roll(1, 0))
        for row, length in enumerate(lengths):
            tokens = torch.from_numpy(ids[row, :length])[None]
            logp = lm(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)[:-1]
            found[row, 1:length] = logp.gather(-1, tokens[0, 1:, None])[:, 0]
    return found


def compare_with_engines(rank: Rank, models: str) -> dict[str, list[str | None]]:
    """What the first step says of each fault and of the same model without it."""
    found: dict[str, list[str | None]] = {}
    for name, (model, attn, patches) in STOPPED.items():
        path, found[name] = os.path.join(models, model), []
        rank.cfg.model = ModelConfig(path=path, attn_implementation=attn, check="accept", cache_dir=models)
        for has_fault in (False, True):
            batch = make_batch()
            batch["input_ids"] %= VOCABULARY
            with ExitStack() as patched:
                for one in patches if has_fault else ():
                    patched.enter_context(one)
                rank.build(roles(rank.cfg, ["policy"]), path)
                is_garbage = has_fault and not patches
                arrays = engine_logprobs(path, batch["input_ids"], batch["lengths"], is_garbage) * batch["mask"]
                try:
                    update_batch(rank, "policy", {**batch, "rollout_logprobs": arrays, "old_logprobs": arrays}, 1)
                    found[name].append(None)
                except LogprobMismatchError as error:
                    found[name].append(str(error))
    return found


def test_each_fault_that_jobs_had_stops_the_first_step(models):
    cfg = config(mini_batch_size=GROUPS)
    cfg.rollout.max_logprob_diff = "auto"
    (found,) = run_ranks(1, compare_with_engines, models, cfg=cfg)
    for name, (right, wrong) in found.items():
        assert right is None, (name, right)
        assert wrong is not None and wrong.startswith("rollout.max_logprob_diff: "), (name, wrong)


def check_right_models(rank: Rank, models: str, cache: str) -> dict[str, Any]:
    cfg, found = rank.cfg, {}
    before = torch.get_rng_state()
    half = RoleSpec("policy", sharding=FSDPConfig(param_dtype="bfloat16"))
    for name in MODELS if rank.world_size == 1 else ("sinks",):
        path = os.path.join(models, name)
        found[name, "policy"] = checked(rank, path, cache_dir=os.path.join(cache, "policy"))
        with patch.multiple(model_check, _SMALL=0):
            found[name, "part"] = checked(rank, path, cache_dir=os.path.join(cache, "part"))
    for kind, spec in (("critic", critic_role(cfg)), ("half", half)):
        found["sinks", kind] = checked(rank, os.path.join(models, "sinks"), spec=spec, cache_dir=cache)
    with patch.multiple(model_check, _LARGEST=1):
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


UNREAD = {
    "a bias": ("model.layers.0.self_attn.q_proj.bias", True),
    "a layer": ("model.layers.2.mlp.up_proj.weight", True),
    "another module": ("mtp.layers.0.proj.weight", False),
}


def find_unread(rank: Rank, models: str, cache: str) -> dict[str, Any]:
    found = {}
    for name, (weight, _) in UNREAD.items():
        path = os.path.join(cache, name)
        shutil.copytree(os.path.join(models, "gemma3"), path)
        file = os.path.join(path, "model.safetensors")
        save_file(load_file(file) | {weight: torch.ones(3)}, file, metadata={"format": "pt"})
        found[name] = checked(rank, path, cache_dir=cache)
    return found


def test_weights_that_nothing_reads_are_refused_in_a_module_and_listed_beside_it(models, tmp_path):
    (found,) = run_ranks(1, find_unread, models, str(tmp_path), cfg=Config())
    for name, said in found.items():
        weight, is_refused = UNREAD[name]
        if is_refused:
            assert f": its files hold {weight}, which Gemma3ForCausalLM does not read; model.check=" in said, said
        else:
            assert said.problem is None
            assert said.not_compared == [f"what nothing reads in the files ({weight})"]


def change_the_last_rank(rank: Rank, models: str, cache: str) -> Any:
    change = randomise_a_weight if rank.rank == rank.world_size - 1 else None
    return checked(rank, os.path.join(models, "gemma3"), change=change, cache_dir=cache)


@table("axes", [{}, {"tensor_parallel_size": 2}])
def test_the_weights_of_every_rank_are_compared(models, tmp_path_factory, axes):
    cache = str(tmp_path_factory.mktemp("cache"))
    for said in run_ranks(2, change_the_last_rank, models, cache, cfg=config(**axes)):
        assert "its weight model.layers.1.self_attn.o_proj.weight is not the one that" in said


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
