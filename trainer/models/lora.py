"""Low-rank adapters (Hu et al., LoRA, 2021) with peft.

    W' = W + alpha / r B A

W `(out, in)` is the frozen weight of a linear layer. B `(out, r)`, which starts at 0, and A `(r, in)` are trained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.config import LoraConfig
from trainer.errors import UserError
from trainer.parallel.shard import reshard, transformer_blocks
from trainer.seeding import derive_seed

_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


@dataclass(frozen=True)
class LayerAdapter:
    a: Tensor
    b: Tensor
    scale: float

    def merged_into(self, weight: Tensor) -> Tensor:
        """Return W + scale B A in float32, sharded like `weight`. A collective. B has the same rows as W."""
        a = full_tensor(self.a).float()
        if not isinstance(weight, DTensor):
            return weight.float() + self.scale * (self.b.float() @ a)
        assert isinstance(self.b, DTensor)
        rows, base = self.b.to_local().float(), weight.to_local().float()
        assert len(rows) == len(base), (self.b, weight)
        _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        a = a[:, offset[1] : offset[1] + base.shape[1]]
        return DTensor.from_local(
            base + self.scale * (rows @ a.to(rows.device)),
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the complete tensor, on the device of its mesh. A collective if the tensor is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to(tensor.device_mesh.device_type).full_tensor()  # `.to`, because shards may be offloaded


def add_adapters(module: nn.Module, config: LoraConfig, section: str, heads: tuple[str, ...] = ()) -> None:
    """Freeze `module` (on the meta device), except parameters that begin with `heads`, and add adapters to its linear
    layers. Raises UserError: a name of `config.target_modules` does not belong to a linear layer. It names
    `section`."""
    from peft import inject_adapter_in_model

    layers = (one for block in transformer_blocks(module) for one in block.named_modules())
    linear = {name.rpartition(".")[2] for name, layer in layers if isinstance(layer, nn.Linear)}
    if not linear:
        raise UserError(f"{section}.rank={config.rank}: the model's blocks have no linear layers for adapters")
    unknown = sorted(set(config.target_modules) - linear)
    if unknown:
        raise UserError(
            f"{section}.target_modules: the model has no linear layer {unknown[0]}; it has {', '.join(sorted(linear))}"
        )
    peft_config = _peft_config(config, sorted(set(config.target_modules) or linear))
    # Without the model's config, by which peft would also adapt experts, whose names in the files are those of layers.
    inject_adapter_in_model(peft_config, nn.ModuleList(transformer_blocks(module)), low_cpu_mem_usage=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(_is_adapter(name) or name.startswith(heads))


def initialise_adapters(module: nn.Module, seed: int) -> None:
    """Initialise A uniformly, as in a linear layer, and B with zeros. The values of A depend only on (seed, name), so
    they are the same on any number of ranks."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(_B):
                parameter.zero_()
            elif name.endswith(_A):
                generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
                bound = 1 / math.sqrt(parameter.shape[1])
                values = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
                assert isinstance(parameter, DTensor)
                shape, offset = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                parameter.to_local().copy_(values[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))])


def hugging_face_name(name: str) -> str | None:
    """Return the name of a parameter in the model's files, or None for a parameter of an adapter."""
    return None if _is_adapter(name) else name.replace(".base_layer.", ".")


def adapted_weight(name: str) -> str | None:
    """Return the Hugging Face name of the weight whose adapter has `name` as its A. None: it is no A."""
    return f"{name.removesuffix(_A)}.weight" if name.endswith(_A) else None


def adapter_parameters(weight: str) -> tuple[str, str]:
    """Return the names, in the module, of the parameters A and B of a weight's adapter."""
    layer = weight.removesuffix(".weight")
    return f"{layer}{_A}", f"{layer}{_B}"


def peft_name(parameter: str) -> str:
    return f"base_model.model.{parameter.replace('.default.', '.')}"


def adapters_of(module: nn.Module) -> dict[str, LayerAdapter]:
    """Return the adapters by the Hugging Face name of their weight. Empty without LoRA."""
    reshard(module)
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    adapters = {}
    for name, a in parameters.items():
        weight = adapted_weight(name)
        if weight is not None:
            scale = module.get_submodule(weight.removesuffix(".weight")).scaling["default"]
            adapters[weight] = LayerAdapter(a, parameters[adapter_parameters(weight)[1]], scale)
    return adapters


@contextmanager
def disabled_adapters(module: nn.Module) -> Iterator[None]:
    from peft.helpers import rescale_adapter_scale

    with rescale_adapter_scale(module, 0.0):
        yield


def adapter_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all adapters as complete float32 tensors in host memory, by their names in peft's files. A collective."""
    tensors = {}
    for weight, adapter in adapters_of(module).items():
        for name, tensor in zip(adapter_parameters(weight), (adapter.a, adapter.b), strict=True):
            tensors[peft_name(name)] = full_tensor(tensor).float().cpu().contiguous()
    return tensors


def adapter_config(module: nn.Module, config: LoraConfig, base_model: str) -> str:
    """Return peft's `adapter_config.json` of the adapters of `module`, trained on the model `base_model`."""
    layers = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in adapters_of(module)})
    peft_config = _peft_config(config, layers)
    peft_config.base_model_name_or_path, peft_config.task_type = base_model, "CAUSAL_LM"
    peft_config.inference_mode = True
    fields = peft_config.to_dict() | {"target_modules": layers}  # peft has a set, in any order
    return json.dumps(fields, indent=2, sort_keys=True)


def _peft_config(config: LoraConfig, target_modules: list[str]):
    import peft

    return peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=target_modules)


def _is_adapter(name: str) -> bool:
    return name.endswith((_A, _B))
