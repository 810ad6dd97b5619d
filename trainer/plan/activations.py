"""The memory of activations, traced: forward and backward passes of one and of three blocks on fake tensors.

The passes are those of the model itself, with our attention for packed rows and our recomputation, at the shapes that a
rank has with tensor and context parallelism. Fake tensors have shapes and no memory, so a trace takes no longer for a
large model. Every further block adds as much as the second and the third have added together, divided by two.

Not traced: the output layer (see `head_bytes`), and what FSDP2 gathers and reduces (see `trainer.plan.ranks`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from trainer.config import LM, Config, LoraConfig, RoleSpec
from trainer.models.attention import PACKED
from trainer.models.logprobs import logits_at_a_time
from trainer.parallel.ac_and_compile import compiles_blocks, recomputed
from trainer.parallel.collectives import AxisGroup
from trainer.parallel.packing import Packing
from trainer.parallel.shard import transformer_blocks
from trainer.plan.hardware import COMPILED_KEEPS
from trainer.plan.model_shape import ModelShape, empty_module, forward_dtype, refusing, shape_key
from trainer.plan.workload import Row, Sizes

_FEW, _MANY = 1, 3
"""Blocks of the traces."""
_DEVICE = torch.ops.prim.device.default
"""Asks a fake tensor for its device."""


class TensorMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that operators return in the block, while they live. Fake tensors count, too.

    A view shares the memory of its tensor, which counts once. Tensors from before the block do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._counted: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _DEVICE:  # two of three calls for fake tensors
            return function(*args)
        kwargs = kwargs or {}
        before = {tensor.untyped_storage()._cdata for tensor in _tensors_in([args, kwargs])}
        result = function(*args, **kwargs)
        for tensor in _tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in before and storage._cdata not in self._counted:
                self._count(storage, storage._cdata)
        return result

    def _count(self, storage: torch.UntypedStorage, number: int) -> None:
        size = storage.nbytes()
        self._counted.add(number)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, number, size).atexit = False

    def _forget(self, number: int, size: int) -> None:
        self._counted.discard(number)
        self.now -= size


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or the results of an operator: it takes and returns no other containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


@dataclass(frozen=True)
class Activations:
    """Bytes on a rank while the backbone computes a micro-batch. 0 for the passes that are not traced."""

    forward: int = 0
    """The most at a time in a pass without gradients."""
    saved: int = 0
    """Left at the end of a forward pass, for the backward pass."""
    peak: int = 0
    """The most at a time in forward and backward pass."""


_traced: dict[tuple[object, ...], Activations] = {}


def trace(
    cfg: Config, role: RoleSpec, model: ModelShape, sizes: Sizes, row: Row, device: str, backward: bool
) -> Activations:
    """Return the activations of the model of a role in a pass without gradients, or in a forward and a backward pass.

    Raises:
        UserError: the code of the model cannot be traced.
    """
    # The head has no part in it, nor without gradients what is trained. So roles with the same backbone share traces.
    lora = role.lora if role.has_adapters else LoraConfig()  # its other values say nothing without adapters
    same = replace(role, head=LM, trained=False, optimizer=None, lora=lora)
    mode = role.sharding.activation_checkpointing if backward else "none"
    key = (*shape_key(cfg, same, sizes), sizes["cp"], row, backward, mode, forward_dtype(role, device), device)
    if key not in _traced:
        with refusing(cfg, role, model.config):
            few, many = (_trace(cfg, role, model.config, sizes, row, device, backward, n) for n in (_FEW, _MANY))
        blocks = (model.text.num_hidden_layers - _FEW) / (_MANY - _FEW)
        pairs = zip(astuple(few), astuple(many), strict=True)
        _traced[key] = Activations(*(int(first + (last - first) * blocks) for first, last in pairs))
    found = _traced[key]
    if not compiles_blocks(role.sharding, device, sizes, cfg.trainer.deterministic):
        return found
    freed = int((1 - COMPILED_KEEPS[mode]) * found.saved)
    return replace(found, saved=found.saved - freed, peak=found.peak - freed)


def head_bytes(
    rows: int,
    width: int,
    row: Row,
    itemsize: int,
    device: str,
    trained: bool,
    entropy: str | None = None,
    cp: int = 1,
    compiled: bool = False,
    softcap: bool = False,
) -> tuple[int, int]:
    """Return the bytes that the output layer takes without gradients, and at most in forward and backward pass.

    That is what `trainer.models.logprobs` holds: the logits of a chunk of tokens, and gradients in float32.

    Args:
        rows: tokens of the vocabulary that the rank has. 0: the model has a value head.
        width: of the hidden states.
        itemsize: bytes of a number of the weights.
        trained: the output layer gets gradients.
        entropy: of the update (see `Objective.entropy`).
        cp: ranks that have a slice of the row each.
        compiled: the softmax is one kernel, which holds nothing but the logits and their gradients.
        softcap: the logits have a soft cap.
    """
    if rows == 0:
        return 0, 0
    tokens = row.tokens_of_rank(cp)
    targets = min(row.targets, tokens)  # in a slice without prompts, all of them
    logits = logits_at_a_time(rows, targets, device)
    inputs = targets * (itemsize * width + 4 * 4)
    half = itemsize if itemsize < 4 else 0  # of copies in the precision of the weights
    # On CPU the copies of a piece are there while those of the next are made.
    copies = 2 if logits < rows * targets and device == "cpu" else 1
    forward = 4 * logits + (half * logits if device == "cpu" else 0)
    of_weights, of_inputs = 4 * rows * width * trained, 4 * targets * width
    gradients = itemsize if compiled else copies * half  # operators in place need no copy of the same precision
    slope, probabilities = (0, 0) if compiled else (4 * softcap, 4 * (entropy == "gradient"))
    chunks = (4 + slope + max(probabilities, gradients)) * logits + of_inputs + of_weights
    after = half * rows * width * trained + of_weights + (half + 4) * targets * width
    spread = itemsize * rows * width * trained + (itemsize * targets + (half + 4) * tokens) * width
    with_entropy = forward + 4 * logits * (entropy is not None and not compiled)
    return inputs + forward, inputs + max(with_entropy, chunks, after, spread)


def _trace(
    cfg: Config,
    role: RoleSpec,
    config: PretrainedConfig,
    sizes: Sizes,
    row: Row,
    device: str,
    backward: bool,
    layers: int,
) -> Activations:
    config = _shrunk(config, layers, sizes["tp"])
    module, backbone = empty_module(cfg, role, config, {**sizes, "tp": 1, "cp": 1})
    cp = sizes["cp"]
    axis = _LoneAxis(SimpleNamespace(size=lambda: cp), 0, cp) if cp > 1 else None  # type: ignore[arg-type]
    packing = Packing(row.lengths, "cpu", axis, row.prefix_lengths)
    body = module.get_submodule(backbone)
    packs = body.config._attn_implementation == PACKED
    packing.kernels = device
    for block in transformer_blocks(body):
        block.forward = recomputed(block.forward, role.sharding.activation_checkpointing)
    body.train(role.trained)
    dtype, width = forward_dtype(role, device), config.get_text_config().hidden_size
    shape = (1, packing.local_slice.stop - packing.local_slice.start, width)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _use_fake_tensors(body, dtype)
        arguments: dict[str, Any] = {"position_ids": packing.position_ids, "use_cache": False}
        if packs:
            packing.prepare()
            arguments |= {"position_ids": packing.shard(packing.position_ids), "packing": packing}
        if not backward:
            with TensorMemory() as memory, torch.no_grad():
                body(inputs_embeds=torch.empty(shape, dtype=dtype), **arguments)
            return Activations(forward=memory.peak)
        with TensorMemory() as memory:
            # The embeddings have no part in it: their gradient is that of an FSDP unit.
            inputs = torch.empty(shape, dtype=dtype).requires_grad_()
            inputs.register_post_accumulate_grad_hook(_drop_gradient)
            hidden = body(inputs_embeds=inputs, **arguments).last_hidden_state
            saved = memory.now
            hidden.backward(torch.empty_like(hidden))
        return Activations(saved=saved, peak=memory.peak)


def _use_fake_tensors(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace parameters on the meta device, and buffers, by fake tensors on CPU. Call it in a `FakeTensorMode`."""
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                fake = nn.Parameter(torch.empty(parameter.shape, dtype=dtype), parameter.requires_grad)
                if fake.requires_grad:
                    fake.register_post_accumulate_grad_hook(_drop_gradient)
                child._parameters[name] = fake
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None  # FSDP2 counts it


def _shrunk(config: PretrainedConfig, layers: int, tp: int) -> PretrainedConfig:
    """Return the config of a model with fewer blocks, and with the part of each matrix that a rank has."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    heads = text.num_attention_heads
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = (text.layer_types * layers)[:layers]
    if tp > 1:
        text.num_attention_heads = heads // tp
        text.num_key_value_heads = (getattr(text, "num_key_value_heads", None) or heads) // tp
        text.intermediate_size //= tp
    return config


class _LoneAxis(AxisGroup):
    """Takes the memory of the exchange with other ranks, without them."""

    def all_to_all(self, tensors: Tensor) -> Tensor:
        return _Exchange.apply(tensors)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensors: Tensor) -> Tensor:
        return torch.empty_like(tensors.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty_like(grads[0].contiguous())
