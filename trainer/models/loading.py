"""Load Hugging Face causal LMs as FSDP2 modules: build them on the meta device, shard them, fill them from safetensors.

No rank ever holds the full model, because each rank reads only its own slices. If the names in the files differ from
those of the module (weights that transformers converts while loading, or `.bin` files), transformers loads the model on
rank 0, and the weights are scattered.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from trainer.config import LM, SCORE, Config, FSDPConfig, ModelConfig, RoleSpec
from trainer.errors import UserError, describe_error, one_line
from trainer.files.hf_hub import first_line
from trainer.models.attention import PACKED, is_stateful, packing_arguments, set_attention
from trainer.models.checks import SCORE_HEAD, VALUE_HEAD, check_head, is_classifier, refuse_axis, score_name
from trainer.models.files import check_position_table, fit_rotations, load_trained_config, weight_shapes
from trainer.models.logprobs import compile_head, set_head
from trainer.models.lora import add_adapters, hugging_face_name, initialise_adapters
from trainer.models.tensor_parallel import apply_tp
from trainer.models.weight_names import float32_weights, keep_file_format
from trainer.parallel.ac_and_compile import compiles_blocks, prepare_blocks
from trainer.parallel.mesh import Layout
from trainer.parallel.packing import Packing
from trainer.parallel.shard import param_dtype, shard_model, transformer_blocks


class CriticModel(nn.Module):
    """Computes state values of sequences.

    The backbone has the name that it has in the causal LM (usually `model`), so that its parameters have the names of
    the files. `is_score`: the value of a token is that of the state after it, as the score of a reward model; else
    before it.
    """

    def __init__(self, backbone: nn.Module, prefix: str, is_score: bool = False):
        super().__init__()
        self._prefix = prefix
        self._is_score = is_score
        setattr(self, prefix, backbone)
        self.value_head = nn.Linear(backbone.config.hidden_size, 1, bias=False)

    @property
    def config(self):
        return getattr(self, self._prefix).config

    def forward(self, input_ids: Tensor, packing: Packing) -> Tensor:
        """Return the values `(B, T)` of the states of the B sequences of `packing`, T the longest one's length.

        Entry t is the value of the state before token t, and 0 at t = 0; or the score of the state after token t.

        Args:
            input_ids: `(1, N)`.
        """
        arguments = packing_arguments(self.config, packing)
        ids = packing.shard(input_ids)
        hidden = getattr(self, self._prefix)(input_ids=ids, use_cache=False, **arguments).last_hidden_state
        values = packing.gather(self.value_head(hidden).squeeze(-1).float())
        rows = packing.rows_of(values, packing.token_indices if self._is_score else packing.previous_indices)
        return rows.clone()  # no view: what changes one in place would drop FSDP's hook before the backward


def load_model(cfg: Config, path: str, layout: Layout, spec: RoleSpec, fill: bool = True) -> nn.Module:
    """Load the model of a role from the local directory `path`, split over the axes of `layout`. A collective.

    Without the head of a language model, it has the same backbone with a value head. A score head is that of the files
    (`score.weight`, as transformers saves a sequence classifier with one label). That of a trained model starts at 0 if
    they have none, as a head for values does.

    Parameters are float32. Frozen ones are stored in the forward dtype, because no optimizer updates them.

    Args:
        spec: the model's role: its head, whether it is trained, its adapters, and its sharding.
        fill: read the weights. Else they are undefined until a checkpoint is loaded that has all of them.
    """
    config = load_trained_config(cfg.model, path, spec.path_key, cfg.longest_row)
    check_head(config, spec, path, cfg.model.trust_remote_code)
    module, backbone = empty_module(cfg, config, layout.sizes, spec)
    check_position_table(module, cfg.longest_row, f"{spec.path_key}={path}")
    _shard(module, backbone, layout, spec)
    if fill:
        _fill(module, cfg, path, spec)
    return module


def empty_module(
    cfg: Config, config: PretrainedConfig, sizes: Mapping[str, int], spec: RoleSpec
) -> tuple[nn.Module, str]:
    """Return the model of a role on the meta device, with its adapters, before it is split over axes of these sizes:
    a causal LM, or the same backbone with a value head; and the name of the backbone."""
    lm, pack = _build(cfg.model, without_noise(config), spec.path_key), cfg.trainer.pack
    lm.tie_weights()  # again, because moving parameters to the meta device one by one broke the tie
    # What the class freezes, such as biases that select experts, becomes a persistent buffer: no role trains it, and it
    # is small. A buffer is float32 in the forward pass, too: FSDP casts only parameters.
    for name, parameter in list(lm.named_parameters()):
        if not parameter.requires_grad:
            parent, _, leaf = name.rpartition(".")
            owner = lm.get_submodule(parent)
            delattr(owner, leaf)
            owner.register_buffer(leaf, torch.zeros(parameter.shape, dtype=parameter.dtype))
    _leave_training_mode(lm)
    set_attention(lm, cfg.model.attn_implementation, pack)
    if sizes["cp"] > 1 and lm.config._attn_implementation != PACKED:
        reason = f"{type(lm).__name__} needs all tokens on one rank" if pack else "trainer.pack=false keeps rows whole"
        refuse_axis("cp", sizes["cp"], reason)
    keep_file_format(lm, lm)
    has_linear_head = set_head(lm)
    if sizes["tp"] > 1 and not has_linear_head:
        problem = f"the output layer of {type(lm).__name__} is more than one linear layer without a bias"
        refuse_axis("tp", sizes["tp"], problem)
    module: nn.Module = lm
    if spec.head != LM:
        with init_empty_weights(include_buffers=False):
            module = CriticModel(lm.base_model, lm.base_model_prefix, is_score=spec.head == SCORE)
        keep_file_format(module, lm)
    if not spec.trained:
        module.requires_grad_(False)
    if spec.has_adapters:
        add_adapters(module, spec.lora, spec.setting("lora"), heads=() if spec.head == LM else (VALUE_HEAD,))
    return module, lm.base_model_prefix


def _build(model: ModelConfig, config: PretrainedConfig, key: str) -> PreTrainedModel:
    """Return the class of `config` on the meta device. One without torch's kernels (`sdpa`) has its own attention: then
    it either attends by `packed_attention`, or has one sequence a row."""

    def build(implementation: str) -> PreTrainedModel:
        with init_empty_weights(include_buffers=False):
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(config),  # the implementation is written into it
                dtype=torch.float32,
                attn_implementation=implementation,
                trust_remote_code=model.trust_remote_code,
            )

    try:
        try:
            return build(model.attn_implementation)
        except ValueError:
            if model.attn_implementation != "sdpa":
                raise
            return build("eager")
    except (ValueError, ImportError) as error:  # the class has no such attention, or its package is not installed
        raise UserError(
            f"{key}: models of the type {config.model_type} cannot be built with "
            f"model.attn_implementation={model.attn_implementation} ({first_line(error).partition('. ')[0]})"
        ) from error


def without_noise(config: PretrainedConfig) -> PretrainedConfig:
    """Return `config` with every rate of dropout at 0: `resid_pdrop`, `residual_dropout` and others.

    Old and new log-probs of the same weights must be equal. Classes read these rates into modules, numbers and calls of
    `F.dropout`, so that no later look at a model finds all of them.
    """
    config = copy.deepcopy(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            setattr(config, name, without_noise(value))
        elif isinstance(value, float | int) and not isinstance(value, bool) and "drop" in name:
            setattr(config, name, 0.0)
    return config


def _leave_training_mode(lm: PreTrainedModel) -> None:
    """Set `eval()` where training mode means noise alone, such as random experts. Gradients do not depend on it.

    Classes with a state along the sequence choose the kernels that compute gradients by the mode, and have no noise but
    dropout. Code of a model directory may compute without gradients in `eval()`.
    """
    is_foreign = type(lm).__module__.partition(".")[0] != "transformers"
    lm.train(is_stateful(lm) or is_foreign)
    for module in lm.modules():
        if isinstance(module, nn.Dropout):  # whose rate is a number in the code
            module.p = 0.0


def _shard(module: nn.Module, backbone: str, layout: Layout, spec: RoleSpec) -> None:
    device, fsdp = layout.device, FSDPConfig(**vars(spec.sharding))
    dtype = param_dtype(fsdp.param_dtype, device)
    uncast = set() if dtype == torch.float32 else float32_weights(module)
    owners = sorted({name.rpartition(".")[0] for name in uncast})  # FSDP casts modules as a whole
    for name, parameter in module.named_parameters():
        if name not in uncast and (owner := next((one for one in owners if name.startswith(one and f"{one}.")), None)):
            raise UserError(
                f"{spec.setting('sharding')}.param_dtype={spec.sharding.param_dtype}: a part of {owner} stays in "
                f"float32, and {name} does not; choose float32"
            )
        if name not in uncast and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    # Keep the buffers, which are not on the meta device: `to_empty` leaves tensors uninitialised, and no file has the
    # buffers that are not persistent, such as rotary frequencies.
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    if layout.tp_mesh is not None:
        apply_tp(module, backbone, layout.tp_mesh)
    compiled = compiles_blocks(fsdp, device, layout.sizes, torch.are_deterministic_algorithms_enabled())
    prepare_blocks(transformer_blocks(module), fsdp, compiled)
    if compiled:
        compile_head(module)
    shard_model(module, layout.fsdp_mesh, fsdp, spec.trained_whole, [module.get_submodule(one) for one in owners])
    module.to_empty(device="cpu" if fsdp.cpu_offload else device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
        if fsdp.cpu_offload and device == "cuda":  # only parameters are offloaded
            parent, _, leaf = name.rpartition(".")
            module.get_submodule(parent)._buffers[leaf] = buffer.to(device)


def _fill(module: nn.Module, cfg: Config, path: str, spec: RoleSpec) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith(VALUE_HEAD):  # the initial values are 0 on any number of ranks
                parameter.zero_()
    initialise_adapters(module, cfg.trainer.seed)
    try:
        found = weight_shapes(path)
    except ValueError as error:
        raise UserError(f"{spec.path_key}={path}: {error}") from error
    is_given = f"{SCORE_HEAD}weight" in found or is_classifier(module.config.architectures)
    names = _names_in_files(module, has_score=not spec.trained or spec.head == SCORE and is_given)
    if set(names) <= set(found):
        tensors = module.state_dict()
        state = {file_name: tensors[name] for file_name, name in names.items()}
        for name, tensor in state.items():
            if (expected := tuple(tensor.shape)) != (shape := found[name][1]):
                raise UserError(
                    f"{spec.path_key}={path}: the weight {name} has the shape {list(shape)}, and config.json describes "
                    f"{list(expected)}; the two belong to different models"
                )
        reader = HuggingFaceStorageReader(path)
        files = sorted({file for file, _ in found.values()})
        reader.fs.ls = lambda _: files  # type: ignore[method-assign]
        dcp.load(state, storage_reader=reader)
    else:
        _scatter_from_rank0(module, cfg.model, path, spec.path_key, names)


def _names_in_files(module: nn.Module, has_score: bool) -> dict[str, str]:
    """Return the names of the parameters and persistent buffers to load, by their names in the model's files. Without
    `has_score`, the head of a value model is not there, and starts at 0."""
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    tied -= {name for name, _ in module.named_parameters()}
    names = {}
    for name in module.state_dict():
        if name in tied:
            continue
        file_name = hugging_face_name(name)
        if name.startswith(VALUE_HEAD):
            file_name = score_name(name) if has_score else None
        if file_name is not None:
            names[file_name] = name
    return names


def _scatter_from_rank0(module: nn.Module, model: ModelConfig, path: str, key: str, names: dict[str, str]) -> None:
    """Load the model, which messages call `key`, with transformers on rank 0, and scatter its weights. `names` in the
    module are by their names in the files."""
    full: dict[str, Any] = {}
    problem = [None]
    if dist.get_rank() == 0:
        try:
            tensors = load_pretrained(path, torch.float32, model.trust_remote_code, names).state_dict()
            _check_tied(module, tensors, path)
            full = {names[name]: tensor for name, tensor in tensors.items() if name in names}
        except UserError as error:
            problem = [f"{key}={error}"]
        except Exception as error:  # a corrupt or hostile file can raise any exception
            problem = [f"{key}={path}: cannot be loaded, {describe_error(error)}"]
    dist.broadcast_object_list(problem)
    if problem[0]:
        raise UserError(problem[0])
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(module, full, options=options)


def load_pretrained(
    path: str,
    dtype: torch.dtype | str,
    trust_remote_code: bool,
    needed: Collection[str] | None = None,
    longest: int | None = None,
) -> PreTrainedModel:
    """Return the causal LM, or the reward model, in the directory `path` as transformers loads it.

    Args:
        needed: names of the tensors that are used. None: all.
        longest: most tokens of a sequence (see `fit_rotations`). None: the length of each batch decides.

    Raises:
        UserError: its files lack one, and transformers would give it random values.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if longest is not None:
        fit_rotations(config, longest, f"model.path={path}")
    is_reward_model = is_classifier(config.architectures)
    lm, report = (AutoModelForSequenceClassification if is_reward_model else AutoModelForCausalLM).from_pretrained(
        path, config=config, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
    )
    lacking = set(report["missing_keys"]) | (set() if needed is None else set(needed) - set(lm.state_dict()))
    missing = sorted(lacking if needed is None else lacking & set(needed))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        unknown = sorted(report["unexpected_keys"])
        others = f"; they have {one_line(unknown[0])}, which is no weight of {type(lm).__name__}" if unknown else ""
        raise UserError(f"{path}: its files lack the weight {missing[0]}{more}{others}")
    return lm


def _check_tied(module: nn.Module, tensors: Mapping[str, Tensor], path: str) -> None:
    """Refuse weights that `module` ties, and that transformers has not tied because their values differ."""
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if name in tensors and tensors[name].data_ptr() != tensors[other].data_ptr():
            raise UserError(
                f"{path}: its files have a {name} that differs from {other}, although its config.json ties the two; "
                "set tie_word_embeddings to false there"
            )
