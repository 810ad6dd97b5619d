"""Tensor parallelism: the ranks of the axis `tp` split each matrix of a model, following its Hugging Face plan.

Every parameter becomes a DTensor over the axis, so that FSDP, the optimizer and checkpoints know its placement. Linear
layers compute with torch's parallel styles. All other modules compute with the local tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from trainer.models.checks import COLWISE, PARTIAL, ROWWISE, refuse_axis
from trainer.parallel.collectives import AxisGroup


def apply_tp(module: nn.Module, backbone: str, mesh: DeviceMesh) -> None:
    """Split the parameters of `module` over the axis `tp`, in place, by the plan of its submodule `backbone`."""
    base = module.get_submodule(backbone)
    plan = base.config.get_text_config().base_model_tp_plan
    # torch warns that it gathers tensors along one axis after the other.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    head = module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None
    tied = head is not None and head.weight is base.get_input_embeddings().weight
    for name, child in list(module.named_modules()):
        if not child._parameters:
            continue
        if any(True for _ in child.children()):
            refuse_axis("tp", mesh.size(), f"{name} has submodules and cannot be split")
        style: ParallelStyle
        if child is base.get_input_embeddings():
            style = _Vocabulary()
        elif child is head:
            style = _Stored(Shard(0))
        else:
            style = _style(name.removeprefix(f"{backbone}."), child, plan, mesh.size())
        if not (child is head and tied):
            parallelize_module(child, mesh, style, src_data_rank=None)
    if tied:
        head.weight = base.get_input_embeddings().weight


def _style(name: str, child: nn.Module, plan: dict[str, str], size: int) -> ParallelStyle:
    """Return how a module of the backbone is split. The plan does not contain modules that are not split."""
    layer, _, adapter = name.partition(".lora_")
    named = next((style for key, style in plan.items() if fnmatchcase(layer.removesuffix(".base_layer"), key)), None)
    if named is None or named in PARTIAL:
        return _Replicated(Partial() if named in PARTIAL else Replicate())
    if not isinstance(child, nn.Linear):
        refuse_axis("tp", size, f"{name} is not a linear layer and cannot be split")
    # W x + B (A x): in a layer split by rows, all ranks have the full A; in one split by columns, the full B.
    if adapter[:1] == ("A" if named in COLWISE else "B"):
        return _Replicated(Replicate())
    divided, axis = (child.out_features, "outputs") if named in COLWISE else (child.in_features, "inputs")
    if divided % size:
        refuse_axis("tp", size, f"must divide the {divided} {axis} of {name}")
    layout = Replicate() if COLWISE.get(named) or ROWWISE.get(named) else None
    return ColwiseParallel(output_layouts=layout) if named in COLWISE else RowwiseParallel(input_layouts=layout)


class _Stored(ParallelStyle):
    def __init__(self, placement: Placement):
        super().__init__()
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            split = distribute_tensor(parameter, device_mesh, [self.placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
        return module


class _Replicated(_Stored):
    """All ranks have the full parameters. Their results are equal, or (`gradients` is `Partial`) parts of a sum."""

    def __init__(self, gradients: Placement):
        super().__init__(Replicate())
        self.gradients = gradients

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        forward = module.forward

        def forward_locally(*args: Any, **kwargs: Any) -> Any:
            with _local_parameters(module, self.gradients):
                return forward(*args, **kwargs)

        module.forward = forward_locally
        return module


class _Vocabulary(_Stored):
    def __init__(self) -> None:
        super().__init__(Shard(0))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis, forward = AxisGroup.along(device_mesh), module.forward
        size = module.weight.shape[0] // axis.size
        first = axis.rank * size
        super()._apply(module, device_mesh)
        if module.padding_idx is not None:  # the row without gradients
            inside = first <= module.padding_idx < first + size
            module.padding_idx = module.padding_idx - first if inside else None

        def forward_locally(ids: Tensor) -> Tensor:
            indices = ids - first
            absent = (indices < 0) | (indices >= size)
            with _local_parameters(module, self.placement):
                rows = forward(indices.masked_fill(absent, 0))
            return axis.all_reduce(rows.masked_fill(absent[..., None], 0))

        module.forward = forward_locally
        return module


@contextmanager
def _local_parameters(module: nn.Module, gradients: Placement) -> Iterator[None]:
    """Replace the module's parameters by their local tensors, whose gradients have this placement, in the block."""
    split = dict(module._parameters)
    try:
        for name, parameter in split.items():
            if parameter is not None:
                module._parameters[name] = parameter.to_local(grad_placements=[gradients])  # type: ignore[assignment]
        yield
    finally:
        module._parameters.update(split)
