"""The parameters of a role's model, and which part of each a rank has: from its config, on the meta device."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from trainer.config import LM, Config, RoleSpec
from trainer.config.axes import AXES
from trainer.errors import UserError
from trainer.files.hf_hub import first_line, why_missing, with_retries
from trainer.models.attention import can_pack, is_stateful
from trainer.models.files import check_sizes, load_trained_config
from trainer.models.loading import empty_causal_lm, empty_value_model
from trainer.models.parallel_checks import COLWISE, ROWWISE, check_model_axes
from trainer.models.tiny import tiny_config
from trainer.parallel.shard import param_dtype, transformer_blocks
from trainer.plan.known import known_file, known_models

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names that configs of transformers give to the number of experts of a block."""
_NEEDED = ("vocab_size", "num_hidden_layers")
"""What a plan computes with, besides what `load_config` checks."""
_FAKE_TENSORS = logging.getLogger("torch._subclasses.fake_tensor")


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

    @cached_property
    def expert_share(self) -> float:
        """Share of the experts of a block that a token passes through. 1: there are none."""
        text = self.config.get_text_config()
        counts = (getattr(text, name, None) for name in _EXPERT_COUNTS)
        count, chosen = next((count for count in counts if count), None), getattr(text, "num_experts_per_tok", None)
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
        if ranks not in self._sums:  # the search for changes asks many times
            self._sums[ranks] = self._sums_of(ranks)
        return self._sums[ranks][block, trained]

    @cached_property
    def largest_parameter(self) -> int:
        """Numbers of the largest parameter, on a rank before FSDP2 shards it."""
        return max(parameter.numel for parameter in self.parameters)

    @cached_property
    def largest_block(self) -> dict[bool, int]:
        """Numbers of the largest block, on a rank before FSDP2 shards it: of all parameters, and of trained ones."""
        return {trained: max(self.numel(block, trained) for block in range(self.blocks)) for trained in (False, True)}

    @cached_property
    def _sums(self) -> dict[int, Counter[tuple[int | None, bool]]]:
        return {}

    def _sums_of(self, ranks: int) -> Counter[tuple[int | None, bool]]:
        """Return the numbers that a rank has of each block and of all blocks, of all parameters and of trained ones."""
        sums: Counter[tuple[int | None, bool]] = Counter()
        for parameter in self.parameters:
            size = parameter.shard(ranks)
            for block in (parameter.block, None):
                sums[block, False] += size
                sums[block, True] += size * parameter.trained
        return sums


def find_config(cfg: Config, role: RoleSpec) -> PretrainedConfig:
    """Return the architecture of the model of a role.

    It is that of a directory, else one of those that come with this project, else that of the Hub's cache, else that of
    the Hub.

    Raises:
        UserError: there is none.
    """
    path = role.path or cfg.model.path
    if path is None:
        return tiny_config(cfg.model.tiny)
    if os.path.isdir(path):
        return load_trained_config(cfg.model, path, role.key)
    if (file := known_file(path)) is not None:
        with open(file) as stream:
            values = json.load(stream)
        return AutoConfig.for_model(values.pop("model_type"), **values)
    if (cached := _cached_directory(path)) is not None:
        return load_trained_config(cfg.model, cached, role.key)
    try:
        # Queried first, because transformers would retry for a minute without a network, and print each attempt.
        with_retries(lambda: HfApi().model_info(path, timeout=10))
    except Exception as error:  # each of the libraries below has its own error classes
        raise UserError(
            f"{role.key}={path}: {why_missing(error)}; name a directory with a config.json, or a model that needs no "
            f"network: {', '.join(known_models())}"
        ) from error
    return load_trained_config(cfg.model, path, role.key)


def _cached_directory(path: str) -> str | None:
    """Return the directory of a model in the Hub's cache; None: it is not there."""
    try:
        file = try_to_load_from_cache(path, "config.json")
    except HFValidationError:  # no id of the Hub
        return None
    return os.path.dirname(file) if isinstance(file, str) else None


_shapes: dict[tuple[str, ...], ModelShape] = {}


def shape_of(cfg: Config, role: RoleSpec, sizes: Mapping[str, int]) -> ModelShape:
    """Return the parameters of the model of a role.

    Args:
        sizes: sizes of the layout's axes.

    Raises:
        UserError: the model cannot be split so, or has an architecture that cannot be planned.
    """
    # How many ranks have slices of tokens changes nothing, only that some have.
    key = key_of(cfg, role, {**sizes, "cp": min(sizes["cp"], 2)})
    if key not in _shapes:  # the search for changes asks many times
        _shapes[key] = _shape_of(cfg, role, sizes)
    check_model_axes(cfg, _shapes[key].config.get_text_config(), _name_of(role))
    return _shapes[key]


def _name_of(role: RoleSpec) -> str:
    """Return what messages call the model of a role."""
    return "the model" if role.path is None else f"the {role.name}"


def key_of(cfg: Config, role: RoleSpec, sizes: Mapping[str, int], *others: object) -> tuple[str, ...]:
    """Return a text for everything that decides the shapes of a role's model, and for `others`."""
    inside = [(name, size) for name, size in sorted(sizes.items()) if AXES[name].joins_blocks]
    values = (cfg.model, cfg.trainer.pack, role.path, role.head, role.trained, role.lora, inside, *others)
    return tuple(map(repr, values))


def _shape_of(cfg: Config, role: RoleSpec, sizes: Mapping[str, int]) -> ModelShape:
    config = find_config(cfg, role)
    check_model_axes(cfg, config.get_text_config(), _name_of(role))
    with refusing(cfg, role, config):
        check_sizes(config.get_text_config(), _NEEDED, f"{role.key}={role.path or cfg.model.path}")
        module, backbone = empty_module(cfg, role, config, sizes)
        return ModelShape(
            config,
            tuple(_parameters(module, backbone, sizes["tp"])),
            _head_rows(module, sizes["tp"]),
            sum(parameter.numel() for parameter in module.parameters()),
            sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad),
            can_pack(module),
            is_stateful(module),
        )


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
            f"{role.key}={role.path or cfg.model.path}: models of the type {config.model_type} cannot be planned with "
            f"model.attn_implementation={cfg.model.attn_implementation} ({first_line(error).partition('. ')[0]})"
        ) from error
    finally:
        _FAKE_TENSORS.disabled = False


def empty_module(
    cfg: Config, role: RoleSpec, config: PretrainedConfig, sizes: Mapping[str, int]
) -> tuple[nn.Module, str]:
    """Return the model of a role on the meta device, as ranks build it before it is split; and its backbone's name."""
    build = empty_causal_lm if role.head == LM else empty_value_model
    with no_init_weights():  # there are none, and going through all modules takes most of the time
        return build(cfg.model, config, sizes, role, cfg.trainer.pack)


def forward_dtype(role: RoleSpec, device: str) -> torch.dtype:
    """Return the precision in which the model of a role computes. `device` is `cpu` or `cuda`."""
    return param_dtype(role.sharding.param_dtype, device)


def _parameters(module: nn.Module, backbone: str, tp: int) -> list[ParameterShape]:
    plan = getattr(module.get_submodule(backbone).config.get_text_config(), "base_model_tp_plan", None) or {}
    blocks = {id(p): i for i, block in enumerate(transformer_blocks(module)) for p in block.parameters()}
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    if isinstance(module, PreTrainedModel):
        embeddings.add(id(module.get_output_embeddings().weight))
    found = []
    for name, parameter in module.named_parameters():
        dimension = 0 if id(parameter) in embeddings else _split_dimension(name.removeprefix(f"{backbone}."), plan)
        shape = list(parameter.shape)
        if tp > 1 and dimension is not None and dimension < len(shape):
            shape[dimension] //= tp
        block = blocks.get(id(parameter), -1)
        found.append(ParameterShape(tuple(shape), parameter.requires_grad, block, ".experts." in name))
    return found


def _split_dimension(name: str, plan: Mapping[str, Any]) -> int | None:
    """Return the dimension of a parameter that tensor parallelism splits; None: each rank has all of it."""
    layer, _, adapter = name.rpartition(".")[0].partition(".lora_")
    style = next((style for key, style in plan.items() if fnmatchcase(layer.removesuffix(".base_layer"), key)), None)
    if style in COLWISE:
        return None if adapter[:1] == "A" else 0
    if style in ROWWISE:
        return None if adapter[:1] == "B" or name.endswith(".bias") else 1
    return None


def _head_rows(module: nn.Module, tp: int) -> int:
    return len(module.get_output_embeddings().weight) // tp if isinstance(module, PreTrainedModel) else 0
