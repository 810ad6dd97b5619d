"""Compare the forward pass of a model with that of its own class, before the first step.

Rank 0 compares the first layers, as many as have one of each kind, with a part of the vocabulary: on the CPU, in
float32. Two short rows are packed as training packs them, without gradients and with them. Plain transformers computes
each of them alone, with eager attention and a full mask. The tensors in the ranks and the names in the files are
compared with those that transformers has read.

The verdict is kept by everything that it depends on, so that a second start or a resume costs nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import glob
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

import trainer
from trainer.config import LM, Config, ModelConfig, RoleSpec
from trainer.errors import UserError, describe_error, one_line
from trainer.files.atomic_io import digest_bytes, digest_file, write_file
from trainer.models.attention import PACKED, can_pack
from trainer.models.files import cache_directory, load_trained_config, weight_files, weight_shapes
from trainer.models.loading import empty_module
from trainer.models.logprobs import token_logprobs
from trainer.models.lora import full_tensor, hugging_face_name
from trainer.models.weight_names import file_units
from trainer.parallel.mesh import Layout
from trainer.parallel.packing import Packing
from trainer.parallel.shard import transformer_blocks

_SMALL = 20_000_000
"""Parameters of first layers that are compared even if all are of one kind. It takes about half a second."""
_LARGEST = 200_000_000  # parameters of the most layers that are compared. They take about 5 s.
_LENGTHS = (17, 40)  # tokens of the two rows. The second one is longer than a window up to `_WINDOW`.
_WINDOW, _SHORT_WINDOW = 128, 24
_TOKENS = 1024  # the vocabulary of the part of a model
_OTHER_LAYERS = "the model, because its config.json counts layers in another way"
_PLAIN: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}


@dataclass
class Verdict:
    problem: str | None = None  # what differs, and the key that trains the model rightly. None: nothing.
    not_compared: list[str] = field(default_factory=list)


def keep_verdict(file: str, verdict: Verdict) -> None:
    """Write `verdict` to `file`. If that cannot be written, the next start compares again."""
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(file), exist_ok=True)
        write_file(file, json.dumps(asdict(verdict), indent=1))


def read_verdict(file: str) -> Verdict | None:
    """Return the verdict in `file`. None: there is none."""
    try:
        with open(file, "rb") as stream:
            return Verdict(**json.loads(stream.read()))
    except (OSError, ValueError, TypeError):
        return None


def verdict_file(cfg: Config, path: str, sizes: Mapping[str, int], spec: RoleSpec) -> str:
    """Return the name of the file of a verdict: a digest of all that it depends on, and of our own code."""
    model = cfg.model
    with os.scandir(path) as entries:
        files = [(e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in entries if e.is_file()]
    parts = [
        digest_file(os.path.join(path, "config.json")),
        *sorted(files),
        *(model.attn_implementation, model.trust_remote_code, cfg.trainer.pack, cfg.longest_row),
        *(spec.head, spec.has_adapters),
        sorted((name, size > 1) for name, size in sizes.items()),
        *(version("torch"), version("transformers"), _code()),
    ]
    name = digest_bytes(repr(parts).encode())
    return os.path.join(cache_directory(model), "model_checks", f"{name}.json")


@functools.cache
def _code() -> str:
    package = glob.escape(os.path.dirname(trainer.__file__))
    files = [file for room in ("models", "parallel") for file in sorted(glob.glob(f"{package}/{room}/*.py"))]
    return digest_bytes(" ".join(map(digest_file, files)).encode())


def check_model(cfg: Config, module: nn.Module, path: str, layout: Layout, spec: RoleSpec) -> Verdict:
    """Compare `module`, as `load_model` has loaded it, with its own class. A collective. Random states do not change.
    Raises UserError: they differ, and `model.check` is `refuse`."""
    file = verdict_file(cfg, path, layout.sizes, spec)
    verdict = _everywhere(lambda: read_verdict(file))
    if verdict is None:
        with torch.random.fork_rng(devices=[]), _quiet():
            verdict = _compare(cfg, module, path, spec)
        if layout.is_main_rank:
            keep_verdict(file, verdict)
    if verdict.problem and cfg.model.check == "refuse":
        raise UserError(f"{spec.path_key}={path}: {verdict.problem}; model.check=accept trains it nevertheless")
    return verdict


def _everywhere(function: Callable[[], Any]) -> Any:
    """Return what `function` returns on rank 0, on all ranks. A collective."""
    found = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def _compare(cfg: Config, module: nn.Module, path: str, spec: RoleSpec) -> Verdict:
    config = load_trained_config(cfg.model, path, spec.path_key, cfg.longest_row)
    ids = _ids_of(config, cfg.longest_row)
    verdict = Verdict()
    own: PreTrainedModel | None = None

    def on_rank0(step: Callable[[], Any]) -> Any:
        """Return what `step` returns, on all ranks. A failure is the problem of the verdict."""

        def run() -> Any:
            try:
                return step()
            except UserError as error:
                verdict.problem = str(error)
            except Exception as error:  # code of the model, or a file that transformers itself does not read
                failed = describe_error(error)
                verdict.problem = f"it cannot be compared with its own class, because that fails: {failed}"

        return _everywhere(run)

    def load() -> dict[str, torch.Size]:
        nonlocal own
        own, unread, verdict.not_compared = _first_layers(cfg.model, config, module, path, spec)
        if own is None:
            return {}
        verdict.problem, outside = _split_unread(own, unread)
        verdict.not_compared += outside
        return {name: tensor.shape for name, tensor in own.state_dict().items()}

    def judge() -> None:
        assert own is not None
        verdict.problem = verdict.problem or different or _lost_in_export(own)
        if cfg.model.attn_implementation == "flash_attention_2":
            verdict.not_compared.append("the passes, because flash-attn computes on GPUs in half precision alone")
        elif verdict.problem is None:  # a part of the model as ranks build it, with the weights of `own`
            role = RoleSpec(spec.name, path_key=spec.path_key)
            subject, _ = empty_module(cfg, own.config, {"cp": 1, "tp": 1}, role)
            subject.load_state_dict(own.state_dict(), assign=True, strict=False)
            subject.tie_weights()
            verdict.problem = _judge(subject, own, ids)

    shapes = on_rank0(load)
    different = _other_tensor(module, shapes or {}, own)
    if shapes:
        on_rank0(judge)
    return _everywhere(lambda: verdict)


def _ids_of(config: PretrainedConfig, longest: int) -> list[Tensor]:
    text = config.get_text_config()
    window = _window(text) or 0
    most = min(one for one in (getattr(text, "max_position_embeddings", None), longest, 2 * _WINDOW) if one)
    longer = 16 + (window if window <= _WINDOW else _SHORT_WINDOW)
    lengths = [min(most, _LENGTHS[0]), min(most, max(_LENGTHS[1], longer))]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(min(text.vocab_size, _TOKENS), (length,), generator=generator) for length in lengths]


def _window(text: Any) -> int | None:
    window = getattr(text, "sliding_window", None)
    return window if isinstance(window, int) else None


@dataclass
class Rows:
    hidden: list[Tensor]  # `(T, H)`: the last hidden states. Empty if the class does not tell them.
    logprobs: list[Tensor]  # `(T - 1,)`: of each token but the first


def _passes(module: nn.Module, ids: Sequence[Tensor]) -> list[Rows]:
    """Return what `module` computes for the rows: packed if it packs them, else alone; again with gradients; alone."""
    together = [list(ids)] if can_pack(module) else [[row] for row in ids]
    passes = []
    for rows_of, has_gradients in ((together, False), (together, True), ([[row] for row in ids], False)):
        found = Rows([], [])
        for rows in rows_of:
            lengths = [len(row) for row in rows]
            with torch.set_grad_enabled(has_gradients), _recorded_hidden(module) as states:
                logprobs = token_logprobs(module, torch.cat(rows)[None], Packing(lengths, "cpu")).detach()
            found.logprobs += [row[1:length] for row, length in zip(logprobs, lengths, strict=True)]
            if states:  # some classes call a part of their backbone
                found.hidden += states[0][0].detach().split(lengths)
        passes.append(found)
    return passes


@contextlib.contextmanager
def _recorded_hidden(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list to which each pass adds its last hidden states, if the class has a backbone that it calls."""
    states: list[Tensor] = []

    def add(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(getattr(output, "last_hidden_state", None), Tensor):
            states.append(output.last_hidden_state)

    with model.base_model.register_forward_hook(add):
        yield states


def _judge(module: nn.Module, lm: PreTrainedModel, ids: Sequence[Tensor]) -> str | None:
    """Return what `module` computes otherwise than `lm`, a plain model of transformers that computes each row alone, by
    the first cause that explains it; None: nothing."""
    together, again, alone = _passes(module, ids)
    own = Rows([], [])
    with torch.no_grad(), _recorded_hidden(lm) as states:
        for row in ids:
            logp = lm(input_ids=row[None], attention_mask=torch.ones_like(row)[None], use_cache=False).logits[0]
            own.logprobs.append(logp.float().log_softmax(-1)[:-1].gather(-1, row[1:, None])[:, 0])
    own.hidden = [state[0] for state in states]

    def differs(rows: Rows, others: Rows, of: Callable[[Rows], list[Tensor]] = lambda rows: rows.logprobs) -> bool:
        difference, limit = _difference(of(rows), of(others), of(own))
        return not difference <= limit  # NaN differs

    difference, limit = _difference(together.logprobs, own.logprobs, own.logprobs)
    size = f"log-probs by up to {difference:.2g} nats, where rounding explains {limit:.2g}"
    is_packed = can_pack(module)
    pack = "set trainer.pack=false"
    key = pack if module.config._attn_implementation == PACKED else "set model.attn_implementation=eager"
    knows_hidden = bool(own.hidden and alone.hidden)
    if differs(together, again):
        sees = [differs(rows, alone) for rows in (together, again)]
        if is_packed and not all(sees):
            when = "no gradients are computed" if sees[0] else "gradients are computed"
            return f"the sequences of a packed row see each other where {when} ({size}); {pack}"
        return (
            "two passes of the same weights differ: its code draws random numbers, as dropout does, while it computes; "
            "set the rate to 0 in its config.json"
        )
    if differs(alone, own) and knows_hidden and not differs(alone, own, lambda rows: rows.hidden):
        return f"its output layer (head) computes something else than its own class ({size})"
    if differs(alone, own):
        window = _window(module.config.get_text_config()) or 0
        has_longer_rows = knows_hidden and 0 < window < max(map(len, ids))
        is_window = has_longer_rows and not differs(alone, own, lambda rows: [one[:window] for one in rows.hidden])
        cause = f"a window of {window} tokens" if is_window else "its forward pass"
        return f"{cause} is another one than in its own class ({size}); {key}"
    if is_packed and differs(together, own):
        return f"the sequences of a packed row see each other, unlike in its own class ({size}); {pack}"
    return None


def _difference(rows: list[Tensor], others: list[Tensor], own: list[Tensor]) -> tuple[float, float]:
    """Return the largest difference of rows, and what rounding in float32 explains of values like `own`."""
    scale = torch.cat(own)
    limit = 2e-6 * float(scale.abs().max()) + 1e-4 * float(scale.std())
    return float((torch.cat(rows) - torch.cat(others)).abs().max()), limit


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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


def _first_layers(
    model: ModelConfig, config: PretrainedConfig, module: nn.Module, path: str, spec: RoleSpec
) -> tuple[PreTrainedModel | None, list[str], list[str]]:
    """Return the first layers of the model (None: they cannot be built or are too large), the names in its files that
    nothing reads, and what is not compared."""
    text, blocks = config.get_text_config(), transformer_blocks(module)
    types = getattr(text, "layer_types", None) or [""] * len(blocks)
    if len(types) != len(blocks):
        return None, [], [_OTHER_LAYERS]
    if not weight_files(path):
        return None, [], ["the model, because its files are no safetensors"]
    kinds: dict[Any, int] = {}
    sizes = []
    for number, block in enumerate(blocks):
        shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
        kinds.setdefault((shapes, types[number]), number)
        sizes.append(sum(p.numel() for p in block.parameters()))
    small = sum(total <= _SMALL for total in itertools.accumulate(sizes))
    count = max(max(kinds.values()) + 1, small)
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
    if (_window(text) or 0) > _WINDOW:
        text.sliding_window = _SHORT_WINDOW
    tensors = _first_tensors(path, count, vocabulary)
    try:
        with torch.device("meta"), no_init_weights():
            lm_class = type(AutoModelForCausalLM.from_config(part, trust_remote_code=model.trust_remote_code))
        lm, report = lm_class.from_pretrained(None, config=part, state_dict=tensors, output_loading_info=True, **_PLAIN)
        with torch.no_grad():
            lm.eval()(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    except Exception as error:  # the class needs more layers, or a larger vocabulary
        return None, [], [f"the model, because its first layers do not compute alone ({describe_error(error)})"]
    if len(transformer_blocks(lm)) != count:
        return None, [], [_OTHER_LAYERS]
    of_head = set() if spec.head == LM else {"lm_head.weight"}  # which a reward model does not have
    if lacking := sorted(set(report["missing_keys"]) - of_head):
        return None, [], [f"the model, because its first layers lack {lacking[0]}"]
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
    number = re.search(r"\.(\d+)\.", name)
    return int(number[1]) if number else None


def _split_unread(own: PreTrainedModel, names: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return a sentence on a weight of the files that belongs to a module of the model and that nothing reads, such as
    a bias or a further layer (None: there is none), and on those of modules that the class does not have."""
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


def _other_tensor(module: nn.Module, shapes: Mapping[str, torch.Size], own: PreTrainedModel | None) -> str | None:
    """Return, on rank 0, a sentence on a weight or buffer that is not that of `own`, the model as transformers has read
    it (None on other ranks), whose tensors have these `shapes`. None: there is none.

    A collective: one tensor at a time is complete on each rank.
    """
    persistent, tensors = module.state_dict(), own.state_dict() if own is not None else {}
    different = None
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        file_name = hugging_face_name(name)
        if name not in persistent or file_name is None or shapes.get(file_name) != tensor.shape:
            continue
        found = full_tensor(tensor.detach())
        if tensors and different is None and not torch.equal(found.cpu(), tensors[file_name].to(found.dtype)):
            kind = "weight" if isinstance(tensor, nn.Parameter) else "buffer"
            different = f"its {kind} {name} is not the one that transformers reads from its files"
    return different


def _lost_in_export(own: PreTrainedModel) -> str | None:
    """Return a sentence on a weight that an export would not give back; None: there is none."""
    weights = own.state_dict()
    exported: dict[str, Tensor] = {}
    for unit in file_units(own, weights):
        exported |= unit.to_files({name: weights[name] for name in unit.names})
    read = type(own).from_pretrained(None, config=copy.deepcopy(own.config), state_dict=exported, **_PLAIN)
    again = read.state_dict()
    lost = [name for name, tensor in weights.items() if name not in again or not torch.equal(again[name], tensor)]
    return f"its weight {lost[0]} does not come back from an export" if lost else None
