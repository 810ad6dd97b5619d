"""Code that runs inside vLLM's workers, which import this module as their `worker_extension_cls`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import AutoModelForCausalLM
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.device_allocator import get_mem_allocator_instance
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.reload.meta import CopyCounter
from vllm.utils.nccl import unpinned_nccl_env

from trainer.errors import one_line
from trainer.generation.weight_sync import Broadcast, Ipc, Weights, read_weights, refused_weights, weights_of
from trainer.models.weight_deltas import WeightsDigest, bits_of


class WeightReceiver:
    """Methods added to vLLM's worker class; called by name through `collective_rpc`."""

    def load_shared(self, path: str) -> str:
        """Replace the weights by those of the safetensors files in `path`, tensor by tensor; return their digest."""
        return self._replace_weights(read_weights(path))

    def load_sent(self, source: Broadcast | Ipc) -> str:
        """Replace the weights by those that ranks send meanwhile; return their digest (see `WeightsDigest`)."""
        with unpinned_nccl_env():  # vLLM may have set NCCL for its own groups; both ends must have the same settings
            digest = self._replace_weights(source.receive())
        torch.cuda.empty_cache()  # the rank on the same GPU may need the memory for a save
        return digest

    def _replace_weights(self, weights: Weights) -> str:
        digest = WeightsDigest()
        model, config = self.model_runner.get_model(), self.vllm_config.model_config
        for module in model.modules():
            # vLLM packs the weights of experts when it makes the kernel of a layer, which a reload does not do again on
            # CPU: the kernel would compute with weights in the order of the files.
            method = getattr(module, "quant_method", None)
            if isinstance(method, FusedMoEMethodBase) and next(module.parameters()).device.type == "cpu":
                method.moe_kernel = None
        with every_weight_replaced(model, config, weight_names(model)):
            self.reload_weights(weights_iterator=digest.of(weights))
        with set_current_vllm_config(self.vllm_config):
            for module in self.model_runner.get_model().modules():
                # On CPU, layers compute with packed copies of their weights. A reload packs them again, but not those
                # of an output head tied to the embedding: it has no tensor of its own among the weights, and would
                # silently compute with the old ones.
                if isinstance(module, VocabParallelEmbedding) and module.weight.device.type == "cpu":
                    module.quant_method.process_weights_after_loading(module)
        return str(digest)

    def refused_weights(self, path: str) -> str | None:
        """Return why the safetensors files in `path` are no weights for this model; None: they are.

        vLLM merges weights under names of its own, so the names are those of an empty Hugging Face model.
        """
        config = self.vllm_config.model_config
        own = copy.deepcopy(config.hf_config)
        names = weight_names(self.model_runner.get_model())
        if config.word_embeddings_untied_by_checkpoint and not any(name.endswith("lm_head.weight") for name in names):
            own.tie_word_embeddings = own.get_text_config().tie_word_embeddings = True  # vLLM has tied them again
        try:
            # With vLLM's own attention, as its backend for transformers has it, the model reads the config.
            with set_current_vllm_config(self.vllm_config), torch.device("meta"):
                model = AutoModelForCausalLM.from_config(own, trust_remote_code=config.trust_remote_code)
            return refused_weights(path, weights_of(model, config.dtype))
        except Exception as error:  # an error that the caller gets says that the engine has failed
            return f"cannot check the weights ({one_line(str(error))})"

    def waking_bytes(self) -> int:
        """Return the bytes of its GPU that this worker takes when what sleeps of it wakes."""
        allocations = get_mem_allocator_instance().pointer_to_data.values()
        return sum(allocation.handle[1] for allocation in allocations if allocation.is_asleep)

    def unserved_layers(self, adapter: int) -> list[str]:
        """Return the layers of a loaded adapter that this worker's model does not have. vLLM ignores them."""
        manager = self.model_runner.lora_manager._adapter_manager
        return sorted(set(manager.list_adapters()[adapter].loras) - set(manager.modules))

    def serves_adapter(self, adapter: int, directory: str) -> bool:
        """Return whether a loaded adapter has the values of the files in `directory`, and is in use.

        vLLM puts tensors together and multiplies some by a scale. So the sums of all bits are compared. It stores
        experts in several ways, so those do not count.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        helper = PEFTHelper.from_local_dir(directory, None)
        loaded = expected = 0
        for name, tensor in read_weights(directory):
            module, is_first = parse_fine_tuned_lora_name(name)
            scale = 1.0 if is_first else helper.get_rank_and_scaling(module)[1]
            value = tensor.to(manager.lora_config.lora_dtype)
            expected += 0 if ".experts" in name else _bit_sum(value if scale == 1 else value * scale)
        for name, lora in manager.list_adapters()[adapter].loras.items():
            for one in (lora.lora_a, lora.lora_b):
                parts = one if isinstance(one, list) else [one]
                loaded += 0 if ".experts" in name else sum(_bit_sum(part) for part in parts if part is not None)
        return loaded == expected and adapter in manager.lora_index_to_id


def _bit_sum(tensor: torch.Tensor) -> int:
    return int(bits_of(tensor.cpu()).sum(dtype="u8"))


def weight_names(model: torch.nn.Module) -> set[str]:
    """Return the names of the weights of `model`, without those that are tied to another weight.

    A latent attention (DeepSeek) has weights that it computes from those of the projection beside it, at each load.
    """
    computed = {name for name, layer in model.named_modules() if isinstance(layer, MLAAttention)}
    return {name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in computed}


@contextmanager
def every_weight_replaced(model: torch.nn.Module, config: ModelConfig, expected: set[str]) -> Iterator[None]:
    """Check that `model` loads all `expected` weights in this block.

    vLLM only logs the names of weights that it did not get, and generates with the old ones.

    Args:
        expected: `weight_names` of the model before a reload, which unties weights, has begun.

    Raises:
        ValueError: names the first weight that kept its old value.
    """
    load, loaded = model.load_weights, set()
    first: dict[int, str] = {}  # the names of layers; shared experts, for one, stand in two places of some models
    places = {name: first.setdefault(id(layer), name) for name, layer in model.named_modules(remove_duplicate=False)}

    def record(*args: Any, **kwargs: Any) -> Any:
        with _DirectWrites(model):
            names = load(*args, **kwargs)
        for name in expected if names is None else names:  # None: this model does not tell
            layer, _, weight = name.rpartition(".")
            loaded.add(f"{places.get(layer, layer)}.{weight}".lstrip("."))
        layers = {name: get_layerwise_info(layer) for name, layer in model.named_modules()}
        idle = {name for name, info in layers.items() if info.can_load() and info.load_numel <= 0}  # got nothing
        loaded.difference_update(name for name in weight_names(model) if name.rpartition(".")[0] in idle)
        return names

    model.load_weights = record
    try:
        yield
    finally:
        del model.load_weights
    missing = sorted(expected - loaded)
    if missing and config.quantization is None:  # a quantised model has scales that no file names
        raise ValueError(f"vLLM got no new values for {len(missing)} weights, {missing[0]} among them")


class _DirectWrites(TorchFunctionMode):
    """Gives what a model copies into a weight itself to the loader of that weight.

    During a reload, a weight is a placeholder without data until its loader has been given all of its layer. Some
    models (gpt-oss, MiMo) copy past the loader, and vLLM would go on with the old values.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self._weights = {
            weight.untyped_storage()._cdata: (layer, name)
            for layer in model.modules()
            for name, weight in layer._parameters.items()
            if weight is not None and weight.is_meta
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_write = func is torch.Tensor.copy_ and args[0].is_meta
        if is_write:  # by a loader of vLLM, which counts the elements that it copies?
            is_write = not any(isinstance(mode, CopyCounter) for mode in _get_current_dispatch_mode_stack())
        owner = self._weights.get(args[0].untyped_storage()._cdata) if is_write else None
        if owner is None:
            return func(*args, **(kwargs or {}))
        (target, source), (layer, name) = args[:2], owner
        weight = layer._parameters[name]
        weight.weight_loader = _copy_region
        weight.weight_loader = make_online_process_loader(layer, name)
        weight.weight_loader(weight, source, target.size(), target.stride(), target.storage_offset())
        return target


def _copy_region(param: torch.Tensor, source: torch.Tensor, size: Any, stride: Any, offset: int) -> None:
    param.data.as_strided(size, stride, offset).copy_(source)
