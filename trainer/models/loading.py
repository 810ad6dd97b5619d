"""Hugging Face causal LMs as FSDP2 modules: built on the meta device, sharded, then filled from safetensors.

No rank ever holds the whole model: each reads its own slices. Architectures whose files do not match
their modules name by name (weights that transformers converts while loading, or `.bin` files) are loaded
by transformers on rank 0 and scattered.
"""

from __future__ import annotations

import glob
import json
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from trainer.config import FSDPConfig, LoraConfig, ModelConfig
from trainer.errors import UserError
from trainer.models.attention import set_attention
from trainer.models.critic import CriticModel
from trainer.models.files import load_config
from trainer.models.lora import add_adapters, hugging_face_name, initialise_adapters
from trainer.parallel.shard import param_dtype, shard_model


def load_causal_lm(
    model: ModelConfig, path: str, mesh: DeviceMesh, fsdp: FSDPConfig, lora: LoraConfig | None = None, seed: int = 0
) -> nn.Module:
    """The causal LM of the local directory `path`, sharded over `mesh`. A collective.

    In float32; what LoRA freezes in the precision of its forward pass, since no optimizer adds small steps to it.

    Args:
        lora: train adapters instead of the weights, if it has a rank.
        seed: of the adapters' start.
    """
    lm = _empty_causal_lm(model, path)
    if lora is not None and lora.rank is not None:
        add_adapters(lm, lora, "trainer.policy.lora")
    return _shard_and_fill(lm, model, path, mesh, fsdp, seed)


def load_critic(
    model: ModelConfig, path: str, mesh: DeviceMesh, fsdp: FSDPConfig, lora: LoraConfig | None = None, seed: int = 0
) -> nn.Module:
    """The same backbone with a value head instead of the LM head, sharded over `mesh` (see `load_causal_lm`)."""
    lm = _empty_causal_lm(model, path)
    with init_empty_weights(include_buffers=False):
        critic = CriticModel(lm.base_model, lm.base_model_prefix)
    if lora is not None and lora.rank is not None:
        add_adapters(critic, lora, "trainer.critic.lora", heads=("value_head.",))
    return _shard_and_fill(critic, model, path, mesh, fsdp, seed)


def _empty_causal_lm(model: ModelConfig, path: str) -> nn.Module:
    with init_empty_weights(include_buffers=False):
        lm = AutoModelForCausalLM.from_config(
            load_config(model, path),
            dtype=torch.float32,
            attn_implementation=model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
        )
    lm.tie_weights()  # moving parameters to the meta device one by one has parted the tied ones
    _disable_dropout(lm)
    set_attention(lm)
    return lm


def _disable_dropout(lm: nn.Module) -> None:
    """Old and new log-probs of the same weights must be equal, so nothing random may run in between."""
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout") and not isinstance(module.attention_dropout, nn.Module):
            module.attention_dropout = 0.0


def _shard_and_fill(
    module: nn.Module, model: ModelConfig, path: str, mesh: DeviceMesh, fsdp: FSDPConfig, seed: int
) -> nn.Module:
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(param_dtype(fsdp.param_dtype, mesh.device_type))
    # Buffers were computed for real (rotary frequencies); to_empty would leave rubbish in them.
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    shard_model(module, mesh, fsdp)
    module.to_empty(device="cpu" if fsdp.cpu_offload else mesh.device_type)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
        if fsdp.cpu_offload and mesh.device_type == "cuda":  # only parameters are offloaded
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner)._buffers[leaf] = buffer.to(mesh.device_type)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith("value_head."):  # the first values are 0 whatever the rank count
                parameter.zero_()

    initialise_adapters(module, seed)
    parameters = {hugging_face_name(name): name for name, _ in module.named_parameters()}
    names = {theirs: ours for theirs, ours in parameters.items() if theirs and not theirs.startswith("value_head.")}
    if set(names) <= _names_in_safetensors(path):
        wanted = {theirs: module.get_parameter(ours).detach() for theirs, ours in names.items()}
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(path))
    else:
        _scatter_from_rank0(module, model, path, names)
    return module


def _scatter_from_rank0(module: nn.Module, model: ModelConfig, path: str, wanted: dict[str, str]) -> None:
    """Args:
    wanted: the module's names by those of the model's files.
    """
    full: dict[str, Any] = {}
    problem = [None]
    if dist.get_rank() == 0:
        try:
            lm = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, trust_remote_code=model.trust_remote_code
            )
            full = {wanted[name]: tensor for name, tensor in lm.state_dict().items() if name in wanted}
            missing = sorted(set(wanted.values()) - set(full))
            problem = [f"it lacks the weight {missing[0]}" if missing else None]
        except (OSError, ValueError) as error:
            problem = [str(error).splitlines()[0]]
    dist.broadcast_object_list(problem)
    if problem[0]:
        raise UserError(f"model.path={path}: cannot be loaded, {problem[0]}")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(module, full, options=options)


def _names_in_safetensors(path: str) -> set[str]:
    """Tensor names that the safetensors files of a model directory hold."""
    index = os.path.join(path, "model.safetensors.index.json")
    if os.path.exists(index):
        with open(index) as file:
            return set(json.load(file)["weight_map"])
    from safetensors import safe_open

    names: set[str] = set()
    for file in glob.glob(os.path.join(path, "*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return names
