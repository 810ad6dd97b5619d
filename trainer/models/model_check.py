"""Compare the forward pass of a loaded model with that of its own class, before the first step.

Two short rows are packed as training packs them, without gradients and with them. Plain transformers computes each of
them alone, with eager attention and a full mask. A model up to `_WHOLE` parameters is compared as the ranks have loaded
it. Of a larger one, rank 0 compares the first layers, as many as have one of each kind, with a part of the vocabulary.
The names in the files are compared with those that transformers has read.

The verdict is kept by everything that it depends on, so that a second start or a resume costs nothing.
"""

from __future__ import annotations

import contextlib
import copy
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from trainer.config import ModelConfig, RoleSpec
from trainer.errors import UserError, describe_error, one_line
from trainer.models.attention import PACKED, can_pack
from trainer.models.files import load_trained_config
from trainer.models.loading import CriticModel, empty_causal_lm
from trainer.models.logprobs import token_logprobs
from trainer.models.lora import full_tensor, hugging_face_name
from trainer.models.verdicts import Verdict, keep_verdict, read_verdict, verdict_file
from trainer.models.weight_files import weight_files, weight_shapes
from trainer.models.weight_names import file_units
from trainer.parallel.mesh import Layout
from trainer.parallel.packing import Packing
from trainer.parallel.shard import param_dtype, transformer_blocks

_WHOLE = 20_000_000
"""Parameters of a model that is compared whole. It takes about half a second."""
_LARGEST = 200_000_000
"""Parameters of the most layers of a part of a model. They take about 5 s."""
_LENGTHS = (17, 40)
"""Tokens of the two rows. The second one is longer than a window up to `_WINDOW`."""
_WINDOW, _SHORT_WINDOW = 128, 24
_TOKENS = 1024
"""All ids of the rows are below this. It is the vocabulary of a part of a model."""
_TIMES = 4
"""A difference is refused if it is so many times the model's own difference between the dtypes."""
_FEW = 0.05
"""The share of tokens for which rounding may choose other experts in half precision."""
_OTHER_LAYERS = "the model, because its config.json counts layers in another way"


@dataclass
class Rows:
    """What a model computes for the two rows."""

    hidden: list[Tensor]
    """`(T, H)` float32: the last hidden states."""
    logprobs: list[Tensor]
    """`(T - 1,)` float32: of each token but the first. Empty for a model with a value head."""

    @property
    def values(self) -> Tensor:
        """The log-probs; without them, the hidden states `(tokens, H)`."""
        return torch.cat(self.logprobs) if self.logprobs else torch.cat(self.hidden)


def check_model(
    model: ModelConfig,
    module: nn.Module,
    path: str,
    layout: Layout,
    spec: RoleSpec,
    pack: bool = True,
    longest: int | None = None,
) -> Verdict:
    """Compare `module`, as `load_model` has loaded it, with its own class. A collective. Random states do not change.

    Args:
        pack, longest: as for `load_model`.

    Raises:
        UserError: they differ, and `model.check` is `refuse`.
    """
    file = verdict_file(model, path, layout.device, layout.sizes, spec, pack, longest)
    verdict = _everywhere(lambda: read_verdict(file))
    if verdict is None:
        started = time.monotonic()
        with torch.random.fork_rng(devices=[]):
            verdict = _compare(model, module, path, layout, spec, pack, longest)
        verdict.seconds = time.monotonic() - started
        if layout.is_main_rank:
            keep_verdict(file, verdict)
    if verdict.problem and model.check == "refuse":
        raise UserError(f"{spec.key}={path}: {verdict.problem}; model.check=accept trains it nevertheless")
    return verdict


def _everywhere(function: Callable[[], Any]) -> Any:
    """Return what `function` returns on rank 0, on all ranks. A collective."""
    found = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


# ---------------------------------------------------------------------------------------------------
# The comparison


def _compare(
    model: ModelConfig,
    module: nn.Module,
    path: str,
    layout: Layout,
    spec: RoleSpec,
    pack: bool,
    longest: int | None,
) -> Verdict:
    config = load_trained_config(model, path, spec.key, longest)
    is_whole = sum(parameter.numel() for parameter in module.parameters()) <= _WHOLE
    ids, not_compared = _ids_of(module, config, is_whole, longest)
    ours = _passes(module, ids, layout) if is_whole else None
    complete = {name: full_tensor(tensor.detach()) for name, tensor in module.named_parameters()} if is_whole else {}

    def judge() -> Verdict:
        verdict = Verdict(not_compared=not_compared)
        try:
            own, unread, missing = _whole(model, config, path) if is_whole else _part(model, config, module, path)
            verdict.not_compared += missing
            if own is None:
                return verdict
            inside, outside = _split_unread(own, unread)
            verdict.not_compared += outside
            verdict.problem = inside or _other_tensor(module, complete, own, layout) or _lost_in_export(own)
            if verdict.problem is None:
                subject = module if is_whole else _subject(model, own, spec, pack)
                found = ours or _passes(subject.to(layout.device), ids, None, layout.device)
                _judge(verdict, found, own, ids, subject, param_dtype(spec.sharding.param_dtype, layout.device))
        except UserError as error:
            verdict.problem = str(error)
        except Exception as error:  # code of the model, or a file that transformers itself does not read
            verdict.problem = f"it cannot be compared with its own class, because that fails: {describe_error(error)}"
        return verdict

    with _quiet():
        return _everywhere(judge)


def _ids_of(
    module: nn.Module, config: PretrainedConfig, is_whole: bool, longest: int | None
) -> tuple[list[Tensor], list[str]]:
    """Return the ids `(T,)` of the rows, and which windows are longer."""
    text = config.get_text_config()
    windows = {window for block in transformer_blocks(module) if (window := _window(block, text))}
    short = [window for window in windows if window <= _WINDOW] or ([] if is_whole or not windows else [_SHORT_WINDOW])
    most = min(one for one in (getattr(text, "max_position_embeddings", None), longest, 2 * _WINDOW) if one)
    lengths = [min(most, _LENGTHS[0]), min(most, max(_LENGTHS[1], *(window + 16 for window in short), 0))]
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(min(text.vocab_size, _TOKENS), (length,), generator=generator) for length in lengths]
    too_long = sorted(window for window in windows if window > _WINDOW) if is_whole else []
    return ids, [f"windows of {window} tokens" for window in too_long]


def _window(block: nn.Module, text: Any) -> int | None:
    own = {getattr(module, "visible_window", None) for module in block.modules()} - {None}
    return max(own) if own else getattr(text, "sliding_window", None)


def _passes(module: nn.Module, ids: Sequence[Tensor], layout: Layout | None, device: str = "cpu") -> list[Rows]:
    """Return what `module` computes for the rows: packed if it packs them, else alone; again with gradients; alone."""
    cp, device = (layout.cp, layout.device) if layout else (None, device)
    together = [list(ids)] if can_pack(module) else [[row] for row in ids]

    def compute(rows_of: list[list[Tensor]]) -> Rows:
        found = Rows([], [])
        for rows in rows_of:
            _add_pass(found, module, rows, Packing([len(row) for row in rows], device, cp))
        return found

    with torch.compiler.set_stance("force_eager"):
        passes = []
        for rows_of, has_gradients in ((together, False), (together, True), ([[row] for row in ids], False)):
            with torch.set_grad_enabled(has_gradients):
                passes.append(compute(rows_of))
    if isinstance(module, FSDPModule):
        module.reset_iter_state()  # also because no backward pass follows the one with gradients
    return passes


def _add_pass(found: Rows, module: nn.Module, rows: list[Tensor], packing: Packing) -> None:
    states: list[Tensor] = []
    hook = _record_hidden(module.get_submodule(module._prefix) if isinstance(module, CriticModel) else module, states)
    ids = torch.cat(rows)[None].to(packing.device)
    lengths = [len(row) for row in rows]
    try:
        if isinstance(module, CriticModel):
            module(ids, packing)
        else:
            logprobs = token_logprobs(module, ids, packing).detach().float().cpu()
            found.logprobs += [row[1:length] for row, length in zip(logprobs, lengths, strict=True)]
    finally:
        hook.remove()
    if states:  # some classes call a part of their backbone
        found.hidden += packing.gather(states[0][0].detach().T.contiguous()).T.float().cpu().split(lengths)


def _record_hidden(model: nn.Module, states: list[Tensor]) -> Any:
    """Add the last hidden states of each pass to `states`, if the class has a backbone; returns what ends it."""

    def add(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(getattr(output, "last_hidden_state", None), Tensor):
            states.append(output.last_hidden_state)

    return model.base_model.register_forward_hook(add)


def _own_rows(lm: PreTrainedModel, ids: Sequence[Tensor]) -> Rows:
    """Return what `lm`, a plain model of transformers, computes for each row alone."""
    found, states = Rows([], []), []
    hook = _record_hidden(lm, states)
    with torch.no_grad():
        for row in ids:
            row = row.to(lm.device)[None]
            logp = lm(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).logits[0].float()
            logp = logp.log_softmax(-1)[:-1].gather(-1, row[0, 1:, None])[:, 0]
            found.logprobs.append(logp.cpu())
    hook.remove()
    found.hidden = [state[0].float().cpu() for state in states]
    return found


def _judge(
    verdict: Verdict,
    passes: list[Rows],
    lm: PreTrainedModel,
    ids: Sequence[Tensor],
    module: nn.Module,
    dtype: torch.dtype,
) -> None:
    """Say in `verdict` what of `passes` differs from what `lm` computes, by the first cause that explains it."""
    own = _own_rows(lm, ids)
    rounded = own
    if dtype != torch.float32:
        for parameter in lm.parameters():
            parameter.data = parameter.data.to(dtype)
        rounded = _own_rows(lm, ids)
    together, again, alone = passes
    has_experts = any("expert" in name for name, _ in lm.named_parameters()) and dtype != torch.float32
    if not together.logprobs:
        own.logprobs = rounded.logprobs = []

    def differences(rows: Rows, others: Rows, of: Callable[[Rows], Tensor]) -> tuple[float, float, int]:
        """Return the largest difference, its limit, and the number of tokens with other experts."""
        scale = of(own)
        floor = 2e-6 * float(scale.abs().max()) + 1e-4 * float(scale.std())
        limit = max(floor, _TIMES * _largest(of(rounded) - scale, has_experts)[0])
        difference, left_out = _largest(of(rows) - of(others), has_experts, limit)
        return difference, limit, left_out

    def differs(rows: Rows, others: Rows, of: Callable[[Rows], Tensor] = lambda rows: rows.values) -> bool:
        difference, limit, _ = differences(rows, others, of)
        return not difference <= limit  # NaN differs

    verdict.difference, verdict.limit, verdict.other_experts = differences(together, own, lambda rows: rows.values)
    unit = "log-probs by up to {:.2g} nats" if own.logprobs else "hidden states by up to {:.2g}"
    size = f"{unit.format(verdict.difference)}, where rounding explains {verdict.limit:.2g}"
    is_packed = can_pack(module)
    pack = "set trainer.pack=false"
    key = pack if module.config._attn_implementation == PACKED else "set model.attn_implementation=eager"
    knows_hidden = bool(own.hidden and alone.hidden)
    if (
        is_packed
        and differs(together, again)
        and (sees := [differs(rows, alone) for rows in (together, again)]) != [True, True]
    ):
        when = "no gradients are computed" if sees[0] else "gradients are computed"
        verdict.problem = f"the sequences of a packed row see each other where {when} ({size}); {pack}"
    elif differs(together, again):
        verdict.problem = (
            "two passes of the same weights differ: its code draws random numbers, as dropout does, while it computes; "
            "set the rate to 0 in its config.json"
        )
    elif differs(alone, own) and knows_hidden and not differs(alone, own, lambda rows: torch.cat(rows.hidden)):
        verdict.problem = f"its output layer (head) computes something else than its own class ({size})"
    elif differs(alone, own):
        text = module.config.get_text_config()
        windows = [window for block in transformer_blocks(module) if (window := _window(block, text))]
        of = [min([*windows, len(row)]) for row in ids]
        has_longer_rows = knows_hidden and bool(windows) and min(windows) < max(map(len, ids))
        inside = lambda rows: torch.cat([hidden[:n] for hidden, n in zip(rows.hidden, of, strict=True)])  # noqa: E731
        is_window = has_longer_rows and not differs(alone, own, inside)
        cause = f"a window of {min(windows)} tokens" if is_window else "its forward pass"
        verdict.problem = f"{cause} is another one than in its own class ({size}); {key}"
    elif is_packed and differs(together, own):
        verdict.problem = f"the sequences of a packed row see each other, unlike in its own class ({size}); {pack}"


def _largest(difference: Tensor, has_experts: bool, limit: float = 0.0) -> tuple[float, int]:
    """Return the largest difference of a token. In half precision, a few tokens may have other experts.

    Returns:
        the largest, and the number of tokens that were left out.
    """
    of_tokens = difference.abs().reshape(len(difference), -1).amax(1).sort(descending=True).values
    few = int(_FEW * len(of_tokens)) if has_experts else 0
    return float(of_tokens[few]), int((of_tokens[:few] > limit).sum())


# ---------------------------------------------------------------------------------------------------
# The model's own class


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' bars and its remarks on what it loads."""
    logs = transformers.utils.logging
    level, has_bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if has_bars:
            logs.enable_progress_bar()


def _whole(model: ModelConfig, config: PretrainedConfig, path: str) -> tuple[PreTrainedModel, list[str], list[str]]:
    """Return what `_part` returns, for the whole model."""
    lm, report = AutoModelForCausalLM.from_pretrained(
        path,
        config=copy.deepcopy(config),
        dtype=torch.float32,
        attn_implementation="eager",
        trust_remote_code=model.trust_remote_code,
        output_loading_info=True,
    )
    return lm.eval(), sorted(report["unexpected_keys"]), []


def _part(
    model: ModelConfig, config: PretrainedConfig, module: nn.Module, path: str
) -> tuple[PreTrainedModel | None, list[str], list[str]]:
    """Return the first layers of the model, the names in its files that nothing reads, and what is not compared.

    Returns:
        None if one layer is too large, or transformers does not build so few.
    """
    text, blocks = config.get_text_config(), transformer_blocks(module)
    types = getattr(text, "layer_types", None) or [""] * len(blocks)
    if len(types) != len(blocks):
        return None, [], [_OTHER_LAYERS]
    kinds: dict[Any, int] = {}
    sizes = []
    for number, block in enumerate(blocks):
        shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
        kinds.setdefault((shapes, types[number], _window(block, text)), number)
        sizes.append(sum(p.numel() for p in block.parameters()))
    count = max(kinds.values()) + 1
    while count and sum(sizes[:count]) > _LARGEST:
        count -= 1
    missing = [f"layer {first} and those of its kind" for first in kinds.values() if first >= count]
    if not count:
        return None, [], ["the model, because its layers are too large"]
    part = copy.deepcopy(config)
    for one in {id(c): c for c in (part, part.get_text_config())}.values():
        for name, value in list(vars(one).items()):
            if isinstance(value, list) and len(value) == len(blocks):
                setattr(one, name, value[:count])
            elif name.endswith("_token_id"):
                setattr(one, name, None)
    text = part.get_text_config()
    text.num_hidden_layers, vocabulary = count, text.vocab_size
    text.vocab_size = min(vocabulary, _TOKENS)
    if isinstance(getattr(text, "sliding_window", None), int) and text.sliding_window > _WINDOW:
        text.sliding_window = _SHORT_WINDOW
    tensors = _first_tensors(path, count, vocabulary)
    try:
        with torch.device("meta"), no_init_weights():
            lm_class = type(AutoModelForCausalLM.from_config(part, trust_remote_code=model.trust_remote_code))
        lm, report = lm_class.from_pretrained(
            None,
            config=part,
            state_dict=tensors,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
        with torch.no_grad():
            lm.eval()(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    except Exception as error:  # the class needs more layers, or a larger vocabulary
        return None, [], [f"the model, because its first layers do not compute alone ({describe_error(error)})"]
    if len(transformer_blocks(lm)) != count:
        return None, [], [_OTHER_LAYERS]
    if report["missing_keys"]:
        return None, [], [f"the model, because its first layers lack {sorted(report['missing_keys'])[0]}"]
    ignored = [re.compile(pattern) for pattern in lm._keys_to_ignore_on_load_unexpected or ()]
    beyond = [name for name in weight_shapes(path) if (_layer(name) or 0) >= len(blocks)]
    beyond = [name for name in beyond if not any(pattern.search(name) for pattern in ignored)]
    return lm, sorted([*report["unexpected_keys"], *beyond]), missing


def _first_tensors(path: str, count: int, vocabulary: int) -> dict[str, Tensor]:
    """Return the tensors of the first `count` layers, and `_TOKENS` rows of those that have one for each token."""
    from safetensors import safe_open

    tensors = {}
    for file in weight_files(path):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if (_layer(name) or 0) >= count:
                    continue
                tensor = opened.get_slice(name)
                rows = tensor.get_shape()[:1]
                tensors[name] = tensor[: min(_TOKENS, vocabulary)] if rows == [vocabulary] else opened.get_tensor(name)
    return tensors


def _layer(name: str) -> int | None:
    """Return the number of the layer that a weight belongs to, if its name has one."""
    number = re.search(r"\.(\d+)\.", name)
    return int(number[1]) if number else None


def _split_unread(own: PreTrainedModel, names: Sequence[str]) -> tuple[str | None, list[str]]:
    """Say which weights of the files nothing reads.

    Returns:
        a sentence on one that belongs to a module of the model, such as the bias of a layer or a further layer; None:
        there is none. Others are of modules that the class does not have, such as layers that predict more tokens.
    """
    modules = dict(own.named_modules())
    outer = {"", own.base_model_prefix}
    inside, outside = [], []
    for name in names:
        parent = name
        while parent not in modules:
            parent = parent.rpartition(".")[0]
        (outside if parent in outer else inside).append(name)
    problem = f"its files hold {_first_of(inside)}, which {type(own).__name__} does not read" if inside else None
    return problem, [f"what nothing reads in the files ({_first_of(outside)})"] if outside else []


def _first_of(names: Sequence[str]) -> str:
    return one_line(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _subject(model: ModelConfig, own: PreTrainedModel, spec: RoleSpec, pack: bool) -> nn.Module:
    """Return a part of the model as ranks build it, with the weights of `own`."""
    role = RoleSpec(spec.name, key=spec.key)
    lm, _ = empty_causal_lm(model, own.config, {"cp": 1, "tp": 1}, role, pack)
    lm.load_state_dict(own.state_dict(), assign=True, strict=False)
    lm.tie_weights()
    return lm


def _other_tensor(module: nn.Module, complete: dict[str, Tensor], own: PreTrainedModel, layout: Layout) -> str | None:
    """Return a sentence on a weight or buffer that is not that of the files; None: there is none.

    Args:
        complete: parameters of all ranks, by name. Of others, rank 0 compares its shards.
    """
    tensors = own.state_dict()
    persistent = module.state_dict()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        file_name = hugging_face_name(name)
        expected = tensors.get(file_name) if file_name else None
        if expected is None or name not in persistent or expected.shape != tensor.shape:
            continue
        found = complete.get(name, tensor.detach())
        if isinstance(found, DTensor):
            if layout.tp_mesh is not None:  # each rank has a part of a part
                continue
            shape, offset = compute_local_shape_and_global_offset(found.shape, found.device_mesh, found.placements)
            expected = expected[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
            found = found.to_local()
        if not torch.equal(found.cpu(), expected.to(found.dtype)):
            kind = "weight" if isinstance(tensor, nn.Parameter) else "buffer"
            return f"its {kind} {name} is not the one that transformers reads from its files"
    return None


def _lost_in_export(own: PreTrainedModel) -> str | None:
    """Return a sentence on a weight that an export would not give back; None: there is none."""
    weights = own.state_dict()
    exported: dict[str, Tensor] = {}
    for unit in file_units(own, weights):
        exported |= unit.to_files({name: weights[name] for name in unit.names})
    again = (
        type(own)
        .from_pretrained(
            None,
            config=copy.deepcopy(own.config),
            state_dict=exported,
            dtype=torch.float32,
            attn_implementation="eager",
        )
        .state_dict()
    )
    lost = [name for name, tensor in weights.items() if name not in again or not torch.equal(again[name], tensor)]
    return f"its weight {lost[0]} does not come back from an export" if lost else None
