"""What each rank of the tensor axis holds, and that together they compute what one does. `test_layouts.py` trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.architectures import ARCHITECTURES, VOCABULARY, random_model
from tests.support.ranks import run_ranks
from tests.support.tables import table
from trainer.config import Config
from trainer.errors import UserError
from trainer.models.tensor_parallel import apply_tp
from trainer.workers.rank import Rank

IDS = torch.randint(2, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))


def config() -> Config:
    cfg = Config()
    cfg.trainer.tensor_parallel_size = 2
    return cfg


def split(rank: Rank, tied: bool) -> dict[str, Any]:
    """Logits and gradients of a model that two ranks hold, and the placement of each parameter."""
    architecture = type(ARCHITECTURES["qwen3"])(**ARCHITECTURES["qwen3"].to_dict() | {"tie_word_embeddings": tied})
    model, plain = random_model(architecture, "eager"), random_model(architecture, "eager")
    apply_tp(model, model.base_model_prefix, rank.layout.tp_mesh)
    found = {name: p.placements[0] for name, p in model.named_parameters() if isinstance(p, DTensor)}
    missing = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    hidden, expected = (m.base_model(IDS).last_hidden_state for m in (model, plain))
    for states in (hidden, expected):
        (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
    worst = max(
        float((p.grad.full_tensor() - q.grad).abs().max() / (1 + q.grad.abs().max()))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        if q.grad is not None
    )
    return {
        "placements": {name: getattr(placement, "dim", None) for name, placement in found.items()},
        "missing": missing,
        "hidden": float((hidden - expected).abs().max()),
        "gradients": worst,
        "tied": model.lm_head.weight is model.get_input_embeddings().weight,
        "rows": model.get_input_embeddings().weight.to_local().shape[0],
    }


def refuse(rank: Rank) -> list[str]:
    """Sentences about modules that cannot be split."""
    sentences = []
    for change in ("parameter beside submodules", "no linear layer", "an odd size"):
        model = random_model(ARCHITECTURES["qwen3"], "eager")
        layer = model.base_model.layers[0]
        if change == "parameter beside submodules":
            layer.extra = nn.Parameter(torch.zeros(2))
        elif change == "no linear layer":
            layer.mlp.gate_proj = nn.Embedding(4, 4)
        else:
            layer.mlp.gate_proj = nn.Linear(32, 65)
        try:
            apply_tp(model, model.base_model_prefix, rank.layout.tp_mesh)
        except UserError as error:
            sentences.append(str(error))
    return sentences


@table("tied", [False, True])
def test_two_ranks_hold_halves_and_compute_what_one_does(tied):
    for result in run_ranks(2, split, tied, cfg=config()):
        assert result["missing"] == [] and result["tied"] == tied and result["rows"] == VOCABULARY // 2
        axis = result["placements"]
        assert axis["model.embed_tokens.weight"] == 0 and axis["model.norm.weight"] is None
        for layer in (0, 1):
            block = f"model.layers.{layer}"
            assert [axis[f"{block}.self_attn.{name}_proj.weight"] for name in "qkvo"] == [0, 0, 0, 1]
            assert [axis[f"{block}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")] == [0, 0, 1]
            assert axis[f"{block}.input_layernorm.weight"] is None, "replicated"
        assert tied or axis["lm_head.weight"] == 0
        assert result["hidden"] < 1e-5 and result["gradients"] < 1e-5


def test_what_cannot_be_split_is_refused_with_its_name():
    first, second, third = run_ranks(2, refuse, cfg=config())[0]
    assert first.startswith("trainer.tensor_parallel_size=2: model.layers.0 has submodules and cannot be split")
    assert second.startswith("trainer.tensor_parallel_size=2: layers.0.mlp.gate_proj is not a linear layer")
    assert third == "trainer.tensor_parallel_size=2: must divide the 65 outputs of layers.0.mlp.gate_proj"
