"""The parameters of a role's model, and which part of each a rank has: from its config, on the meta device."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from trainer.config import Config, RoleSpec
from trainer.errors import UserError
from trainer.files.hf_hub import first_line
from trainer.models import loading
from trainer.models.attention import can_pack, is_stateful
from trainer.models.checks import COLWISE, ROWWISE, check_model_axes
from trainer.models.files import check_sizes, load_trained_config, resolve_model_path
from trainer.models.tiny import TinyShape, tiny_config
from trainer.parallel.axes import AXES
from trainer.parallel.shard import param_dtype, transformer_blocks
from trainer.plan.workload import Sizes

_SHAPES = os.path.join(os.path.dirname(__file__), "shapes")
"""Configs of models, so that a plan of them needs no network."""
_ENDINGS = ("-instruct", "-base", "-chat", "-it")
_SAME_SHAPES = {
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.3-70b",
    "llama-3.1-70b": "llama-3.3-70b",
}
"""Models with the matrices of another one."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names that configs of transformers give to the number of experts of a block."""
_FAKE_TENSORS = logging.getLogger("torch._subclasses.fake_tensor")


def shipped_models() -> list[str]:
    """Return the names of the models whose shapes come with this project."""
    return sorted(name.removesuffix(".json") for name in os.listdir(_SHAPES) if name.endswith(".json"))


def shipped_file(path: str) -> str | None:
    """Return the `config.json` that comes with this project for an id, such as `Qwen/Qwen3-8B`; None: there is none."""
    name = path.rstrip("/").rpartition("/")[2].casefold()
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    name = name.removeprefix("meta-")
    name = _SAME_SHAPES.get(name, name)
    return os.path.join(_SHAPES, f"{name}.json") if name in shipped_models() else None


@dataclass(frozen=True)
class ParameterShape:
    """One parameter."""

    shape: tuple[int, ...]
    """On a rank along `tp`, before FSDP2 shards it."""
    trained: bool
    block: int
    """Number of the block that it belongs to. -1: the rest of the model, which is one FSDP unit."""
    of_experts: bool = False
    """It belongs to the experts of a block, of which each token passes through a few."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shard(self, ranks: int) -> int:
        """Return the numbers that rank 0 of `ranks` has: FSDP2 shards the first dimension and rounds up."""
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:]) if self.shape else 1


@dataclass(frozen=True)
class ModelShape:
    """The parameters of the model of a role."""

    config: PretrainedConfig
    """Of the language model."""
    parameters: tuple[ParameterShape, ...]
    head_rows: int
    """Rows of the output layer on a rank. 0: the model has a value head."""
    total: int
    """Numbers of the complete model."""
    trained: int
    """Those of them that are trained."""
    packs: bool = True
    """A micro-batch can have several sequences."""
    is_stateful: bool = False
    """Some layers carry a state along a sequence."""

    @property
    def text(self) -> Any:
        """The config of the language model in a model of several kinds of data."""
        return self.config.get_text_config()

    @cached_property
    def expert_share(self) -> float:
        """Share of the experts of a block that a token passes through. 1: there are none."""
        counts = (getattr(self.text, name, None) for name in _EXPERT_COUNTS)
        count, chosen = next((count for count in counts if count), None), getattr(self.text, "num_experts_per_tok", 0)
        return min(1.0, chosen / count) if count and chosen else 1.0

    @cached_property
    def of_experts(self) -> int:
        """Numbers of all experts, on a rank before FSDP2 shards them."""
        return sum(parameter.numel for parameter in self.parameters if parameter.of_experts)

    def idle(self, tokens: float = 1.0) -> float:
        """Return the numbers, on a rank before FSDP2 shards them, that no token of `tokens` passes through.

        Each token takes its experts at random, like those of trained routers, which balance them.
        """
        return self.of_experts * (1 - self.expert_share) ** tokens

    @cached_property
    def blocks(self) -> int:
        """Number of blocks."""
        return 1 + max(parameter.block for parameter in self.parameters)

    def numel(self, block: int | None = None, trained: bool = False) -> int:
        """Return the numbers of a block, of the rest (-1), or of all (None); on a rank before FSDP2 shards them."""
        return self.shard(1, block, trained)

    def shard(self, ranks: int, block: int | None = None, trained: bool = False) -> int:
        """Return the numbers that a rank has of them after FSDP2 has sharded them over `ranks`."""
        return sum(p.shard(ranks) for p in self.parameters if block in (None, p.block) and (p.trained or not trained))

    @cached_property
    def largest_block(self) -> dict[bool, int]:
        """Numbers of the largest block, on a rank before FSDP2 shards it: of all parameters, and of trained ones."""
        return {trained: max(self.numel(block, trained) for block in range(self.blocks)) for trained in (False, True)}


def find_config(cfg: Config, role: RoleSpec) -> PretrainedConfig:
    """Return the architecture of the model of a role: that of a directory, else one that comes with this project, else
    that of the Hub or its cache.

    Raises:
        UserError: there is none.
    """
    path = role.path or cfg.model.path
    if path is None:
        return tiny_config(TinyShape.of(cfg.model.tiny))
    if os.path.isdir(path):
        return load_trained_config(cfg.model, path, role.path_key)
    if (file := shipped_file(path)) is not None:
        with open(file) as stream:
            values = json.load(stream)
        return AutoConfig.for_model(values.pop("model_type"), **values)
    return load_trained_config(
        cfg.model, resolve_model_path(path, role.path_key, ("config.json", "*.py")), role.path_key
    )


_built: dict[tuple[str, ...], ModelShape] = {}


def shape_key(cfg: Config, role: RoleSpec, sizes: Sizes) -> tuple[str, ...]:
    """Return a text for everything that decides the shapes of a role's model."""
    inside = [(name, size) for name, size in sorted(sizes.items()) if AXES[name].joins_blocks]
    return tuple(map(repr, (cfg.model, cfg.trainer.pack, role.path, role.head, role.trained, role.lora, inside)))


def shape_of(cfg: Config, role: RoleSpec, sizes: Sizes) -> ModelShape:
    """Return the parameters of the model of a role.

    Raises:
        UserError: the model cannot be split so, or has an architecture that cannot be planned.
    """
    if (key := shape_key(cfg, role, sizes)) in _built:  # each layout asks
        return _built[key]
    config = find_config(cfg, role)
    text, setting = config.get_text_config(), f"{role.path_key}={role.path or cfg.model.path}"
    check_model_axes(cfg, text, "the model" if role.path is None else f"the {role.name}")
    with refusing(cfg, role, config):
        check_sizes(text, ("vocab_size", "num_hidden_layers"), setting)
        module, backbone = empty_module(cfg, role, config, sizes)
        head = module.get_output_embeddings().weight if isinstance(module, PreTrainedModel) else ()
        total, trained = (sum(p.numel() for p in module.parameters() if p.requires_grad or of) for of in (True, False))
        parameters, packs = tuple(_parameters(module, backbone, sizes["tp"])), can_pack(module)
        rows = len(head) // sizes["tp"]
        _built[key] = ModelShape(config, parameters, rows, total, trained, packs, is_stateful(module))
    return _built[key]


@contextmanager
def refusing(cfg: Config, role: RoleSpec, config: PretrainedConfig) -> Iterator[None]:
    """Refuse the model of a role if its code fails in the block.

    Raises:
        UserError: it fails.
    """
    _FAKE_TENSORS.disabled = True  # torch logs a traceback of each operator that fails
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the code of each architecture has its own error classes
        raise UserError(
            f"{role.path_key}={role.path or cfg.model.path}: models of the type {config.model_type} cannot be planned "
            f"with model.attn_implementation={cfg.model.attn_implementation} ({first_line(error).partition('. ')[0]})"
        ) from error
    finally:
        _FAKE_TENSORS.disabled = False


def empty_module(cfg: Config, role: RoleSpec, config: PretrainedConfig, sizes: Sizes) -> tuple[nn.Module, str]:
    """Return the model of a role on the meta device, as ranks build it before it is split; and its backbone's name."""
    with no_init_weights():  # there are none, and going through all modules takes most of the time
        return loading.empty_module(cfg, config, sizes, role)


def forward_dtype(role: RoleSpec, device: str) -> torch.dtype:
    """Return the precision in which the model of a role computes. `device` is `cpu` or `cuda`."""
    return param_dtype(role.sharding.param_dtype, device)


def _parameters(module: nn.Module, backbone: str, tp: int) -> Iterator[ParameterShape]:
    plan = getattr(module.get_submodule(backbone).config.get_text_config(), "base_model_tp_plan", None) or {}
    blocks = {id(p): i for i, block in enumerate(transformer_blocks(module)) for p in block.parameters()}
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    if isinstance(module, PreTrainedModel):
        embeddings.add(id(module.get_output_embeddings().weight))
    for name, parameter in module.named_parameters():
        dimension = 0 if id(parameter) in embeddings else _split_dimension(name.removeprefix(f"{backbone}."), plan)
        shape = list(parameter.shape)
        if tp > 1 and dimension is not None and dimension < len(shape):
            shape[dimension] //= tp
        block = blocks.get(id(parameter), -1)
        yield ParameterShape(tuple(shape), parameter.requires_grad, block, ".experts." in name)


def _split_dimension(name: str, plan: Mapping[str, Any]) -> int | None:
    """Return the dimension of a parameter that tensor parallelism splits; None: each rank has all of it."""
    layer, _, adapter = name.rpartition(".")[0].partition(".lora_")
    style = next((style for key, style in plan.items() if fnmatchcase(layer.removesuffix(".base_layer"), key)), None)
    if style in COLWISE:
        return None if adapter[:1] == "A" else 0
    if style in ROWWISE:
        return None if adapter[:1] == "B" or name.endswith(".bias") else 1
    return None
