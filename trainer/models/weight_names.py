"""The tensors of a model's files. In memory, transformers 5 names and stacks some weights otherwise, such as experts.

Files and engines get what `save_pretrained` writes: the names and tensors that transformers 4, vLLM and the published
files have.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    PrefixChange,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)

_ATTRIBUTE = "_trainer_file_format"


class _FileFormat(NamedTuple):
    conversions: list[WeightTransform]
    float32: re.Pattern[str] | None  # matches names of weights that no file holds in 16 bits
    not_float16: re.Pattern[str] | None  # matches names of weights that no file holds as float16


@dataclass(frozen=True, eq=False)
class FileUnit:
    """Weights of a module that become tensors of its files together. Most units are one weight with one name."""

    names: dict[str, str]
    """The weights: for each name in the module, the pattern of the converter that it matches."""
    first: str
    """Name of the first tensor in the files. With a converter, it may have a `*` in place of a number."""
    converter: WeightConverter | None
    """Makes the tensors of the files from the weights. None: a weight that at most has another name."""
    config: Any
    float32_for: tuple[torch.dtype, ...] = ()
    """Files of these dtypes hold the unit as float32, as `from_pretrained` loads it: biases that select experts."""

    def stored_dtype(self, weight: Tensor, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of `weight` in files whose floating-point tensors are `dtype`."""
        if not weight.is_floating_point():
            return weight.dtype
        return torch.float32 if dtype in self.float32_for else dtype

    @property
    def is_by_rows(self) -> bool:
        """Whether each row of the weight, such as an expert, becomes tensors of its own (see `rows_to_files`)."""
        if self.converter is None:
            return False
        *others, last = self.converter.operations
        is_split = isinstance(last, SplitModulelist) and last.dim == 0
        return is_split and all(isinstance(other, Chunk) and other.dim > 0 for other in others)

    def to_files(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the files, by name, from the complete `weights`, by `names`."""
        if self.converter is None:
            (name,) = self.names
            return {self.first: weights[name]}
        for name, pattern in self.names.items():
            self.converter.add_tensor(self.first, name, pattern, weights[name])
        return _tensors(self.converter.convert(self.first, config=self.config))

    def rows_to_files(self, rows: Tensor, first_row: int, shape: Iterable[int]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the files of the rows from `first_row` on of a unit `is_by_rows`, whose complete weight
        has this shape. One row at a time is copied."""
        (name,) = self.names
        file_names, count = list(self.to_files({name: torch.empty(tuple(shape), device="meta")})), tuple(shape)[0]
        for number, row in enumerate(rows.split(1), first_row):
            tensors = self.to_files({name: row}).values()
            yield from zip(file_names[number::count], tensors, strict=True)

    def to_module(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights by `names`, from all the tensors that `to_files` returns."""
        if self.converter is None:
            (name,) = self.names
            return {name: tensors[self.first]}
        converter = self.converter.reverse_transform()
        first = next(iter(self.names))
        for name in sorted(tensors, key=dot_natural_key):
            _, pattern = converter.rename_source_key(name)
            converter.add_tensor(first, name, pattern, tensors[name])
        return _tensors(converter.convert(first, config=self.config))


def _tensors(converted: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def keep_file_format(module: nn.Module, model: nn.Module) -> None:
    """Let `file_units` of `module` know how the files of `model` differ from it. Sharding changes the class's name."""
    setattr(module, _ATTRIBUTE, _file_format(model))


def _file_format(model: nn.Module) -> _FileFormat:
    """Return the conversions that `save_pretrained` reverts if a model was built from a config. A prefix of names is
    not among them: whether the files have it depends on the files."""
    found = get_model_conversion_mapping(model, add_legacy=False)  # type: ignore[arg-type]
    names = (getattr(model, f"_keep_in_fp32_modules{suffix}", None) for suffix in ("_strict", ""))
    patterns = [build_glob_alternation(sorted(one))[0] if one else None for one in names]
    return _FileFormat([one for one in found if not isinstance(one, PrefixChange)], *patterns)


def empty_model(config: dict[str, Any]) -> nn.Module:
    """Return the causal LM of a config.json, on the meta device; an empty module if transformers has none."""
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return nn.Module()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[kind].from_dict(config), attn_implementation="eager", trust_remote_code=False
        )


def float32_weights(module: nn.Module) -> set[str]:
    """Return the names of the parameters that the class of `module` keeps in float32 where others have 16 bits."""
    pattern = getattr(module, _ATTRIBUTE).float32
    return {name for name, _ in module.named_parameters() if pattern is not None and pattern.search(name)}


def file_units(module: nn.Module, names: Iterable[str]) -> list[FileUnit]:
    """Return the units of these weights of `module`, one of transformers or of `keep_file_format`, in their order."""
    form = getattr(module, _ATTRIBUTE, None) or _file_format(module)
    reverse = [conversion.reverse_transform() for conversion in reversed(form.conversions)]
    renamings = [one for one in reverse if isinstance(one, WeightRenaming)]
    converters = [one for one in reverse if isinstance(one, WeightConverter)]
    converter_of = {pattern: one for one in converters for pattern in one.source_patterns}
    names, units = list(names), {}
    for name in sorted(names, key=dot_natural_key):
        first, pattern = rename_source_key(name, renamings, converters, reverse=True)
        if first not in units:
            converter = None if pattern is None else converter_of[pattern]
            narrow = [torch.float16] if form.not_float16 and form.not_float16.search(name) else []
            if form.float32 and form.float32.search(name):
                narrow = [torch.float16, torch.bfloat16]
            units[first] = FileUnit({}, first, converter, getattr(module, "config", None), tuple(narrow))
        units[first].names[name] = pattern or ""
    unit_of = {name: unit for unit in units.values() for name in unit.names}
    return list(dict.fromkeys(unit_of[name] for name in names))


def file_tensors(units: Iterable[FileUnit], weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of files of this dtype, without content, from shapes and dtypes of weights or shards."""
    tensors: dict[str, Tensor] = {}
    for unit in units:
        empty = {}
        for name in unit.names:
            stored = unit.stored_dtype(weights[name], dtype)
            empty[name] = torch.empty(weights[name].shape, dtype=stored, device="meta")
        tensors |= unit.to_files(empty)
    return tensors


def whole_units(
    names_of: Mapping[FileUnit, Iterable[str]], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[FileUnit, dict[str, Tensor]]]:
    """Yield each unit with its tensors, by their names, as soon as all of them have come. Raises ValueError: no unit
    has such a tensor."""
    missing = {unit: set(names) for unit, names in names_of.items()}
    unit_of = {name: unit for unit, names in missing.items() for name in names}
    waiting: defaultdict[FileUnit, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors:
        if (unit := unit_of.get(name)) is None:
            raise ValueError(f"the engine's model has no weight {name}")
        waiting[unit][name] = tensor
        if waiting[unit].keys() == missing[unit]:
            yield unit, waiting.pop(unit)


def module_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of `model` by their names in it, from pairs of a name and a tensor of the model's files. Raises
    ValueError: the model has no such weight."""
    weights = model.state_dict()
    names_of = {unit: list(file_tensors([unit], weights, torch.float32)) for unit in file_units(model, weights)}
    for unit, whole in whole_units(names_of, tensors):
        yield from unit.to_module(whole).items()
