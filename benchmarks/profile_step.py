"""Where the time of a step goes, before and now: `python -m benchmarks.profile_step [--models 17M 100M]`.

Runs the log-prob pass and the update of one rank under torch's profiler, on sequences with the lengths of GSM8K, and
groups the time of all operators. `before` is a plain loop with transformers on the same rows: padded to the longest,
eager attention with a dense mask, all logits. `now` is this project's rank. Both compute log-probs, and in the update
entropies as well, with gradients of the log-probs, clipped, and one step of AdamW.

The seconds are CPU seconds of one thread without the profiler, shared out as the profiler has seen them. `needed` is
the FLOPs that the real tokens need, divided by those seconds and by the speed of products of large matrices.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3

from benchmarks.models import SHAPES, add_data, make_model
from benchmarks.ranks import cpu_seconds, gsm8k_lengths, make_batch, matmul_flops, one_policy
from tests.support.whole_batches import compute_batch, update_batch
from trainer.models.attention import PACKED
from trainer.parallel.batching import Batch

REGIONS = {
    "region: attention": "attention",
    "region: head": "log-probs from hidden states",
    "_ChunkedScores": "log-probs from hidden states",
    "Optimizer.step": "optimizer and clipping",
    "region: clipping": "optimizer and clipping",
    "FSDP::": "gathering and reducing (FSDP2)",
    "c10d::": "gathering and reducing (FSDP2)",
}
"""What an operator belongs to, by the beginning of the name of an event around it."""
PRODUCTS, COPIES, ELEMENTWISE = "products of matrices in the layers", "copies and casts", "norms, rotary, elementwise"
REST = "Python and the rest"
ROWS = [PRODUCTS, *dict.fromkeys(REGIONS.values()), ELEMENTWISE, COPIES, REST]
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
_COPIES = ("aten::copy_", "aten::cat", "aten::index", "aten::zero_", "aten::fill_", "aten::embedding", "aten::clone")
_NODE = "autograd::engine::evaluate_function"


def kind_of(name: str) -> str:
    """Return the row of an operator that belongs to no region."""
    if name in _PRODUCTS:
        return PRODUCTS
    if name.startswith("aten::_foreach"):
        return REGIONS["Optimizer.step"]
    return COPIES if name.startswith(_COPIES) else ELEMENTWISE


def shares(events: list[FunctionEvent], seconds: float) -> dict[str, float]:
    """Return the share of each row in a run of so many seconds.

    An operator belongs to the region of the events around it. One in a backward pass belongs to the region of the
    operator of the forward pass that has the same sequence number.
    """
    events = sorted(events, key=lambda event: event.time_range.start)
    forward: dict[int, str | None] = {}
    for event in events:
        if event.sequence_nr >= 0 and "Backward" not in event.name:
            forward[event.sequence_nr] = region(event, {})  # the last one has made the node
    times: Counter[str] = Counter()
    for event in events:
        if event.name.startswith(("aten::", "c10d::", "fsdp::")):
            times[region(event, forward) or kind_of(event.name)] += event.self_cpu_time_total / 1e6
    times[REST] = seconds - sum(times.values())
    return {row: times[row] / seconds for row in ROWS}


def region(event: FunctionEvent | None, forward: dict[int, str | None]) -> str | None:
    while event is not None:
        found = next((name for start, name in REGIONS.items() if event.name.startswith(start)), None)
        if found is None and event.name.startswith(_NODE):
            found = forward.get(event.sequence_nr)
        if found is not None:
            return found
        event = event.cpu_parent
    return None


def profiled(run: Callable[[], Any]) -> dict[str, float]:
    """Return the CPU seconds of each row in one run."""
    seconds = cpu_seconds(run, repeat=1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("run"):
        run()
    events = list(profiler.events())
    total = next(event for event in events if event.name == "run").cpu_time_total / 1e6
    return {row: share * seconds for row, share in shares(events, total).items()}


def in_region(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"region: {name}"):
            return function(*args, **kwargs)

    return recorded


@contextmanager
def attention_recorded() -> Iterator[None]:
    eager, packed = modeling_qwen3.eager_attention_forward, ALL_ATTENTION_FUNCTIONS[PACKED]
    modeling_qwen3.eager_attention_forward = in_region("attention", eager)
    ALL_ATTENTION_FUNCTIONS.register(PACKED, in_region("attention", packed))
    try:
        yield
    finally:
        modeling_qwen3.eager_attention_forward = eager
        ALL_ATTENTION_FUNCTIONS.register(PACKED, packed)


class PlainLoop:
    """What a plain loop with transformers does for a batch."""

    def __init__(self, path: str, dtype: str, batch: Batch):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")
        self.rows = {name: torch.as_tensor(values) for name, values in batch.items()}
        columns = torch.arange(self.rows["input_ids"].shape[1])
        self.real = (columns < self.rows["lengths"][:, None]).long()

    def scores(self, entropies: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids = self.rows["input_ids"]
        with self.autocast:
            states = self.model.model(input_ids=ids, attention_mask=self.real, use_cache=False).last_hidden_state
            with record_function("region: head"):
                logp = self.model.lm_head(states)[:, :-1].float().log_softmax(dim=-1)
                chosen = logp.gather(-1, ids[:, 1:, None])[..., 0]
                with torch.no_grad():
                    return chosen, -(logp.exp() * logp).sum(dim=-1) if entropies else None

    @torch.no_grad()
    def logprobs(self) -> None:
        self.scores(entropies=False)

    def update(self) -> None:
        logprobs, _ = self.scores(entropies=True)
        mask, advantages = self.rows["mask"][:, 1:], self.rows["advantages"][:, 1:]
        ratio = (logprobs - self.rows["old_logprobs"][:, 1:]).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        (-(gain * mask).sum() / mask.sum()).backward()
        with record_function("region: clipping"):
            clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(path: str, directory: str, dtype: str, batch: Batch) -> tuple[list[dict[str, float]], int]:
    """Return the seconds of each row for both passes, before and now, and the number of parameters."""
    plain = PlainLoop(path, dtype, batch)
    scored = {key: batch[key] for key in ("input_ids", "mask", "lengths", "group_ids")}
    with attention_recorded():
        before = profiled(plain.logprobs), profiled(plain.update)
        parameters = plain.model.num_parameters()
        del plain
        with one_policy(path, directory, dtype) as rank:
            logprobs = profiled(lambda: compute_batch(rank, "policy", "logprobs", scored))
            now = logprobs, profiled(lambda: update_batch(rank, "policy", batch, 1))
    return [before[0], now[0], before[1], now[1]], parameters


def print_profile(name: str, dtype: str, rows: int, path: str, directory: str) -> None:
    shape, lengths = SHAPES[name], gsm8k_lengths(rows)
    batch = make_batch(lengths, shape.vocabulary)
    limit = matmul_flops(dtype)
    columns, parameters = measure(path, directory, dtype, batch)
    head = shape.vocabulary * shape.hidden
    attention = 2 * shape.layers * 64 * shape.heads * float((lengths.astype(float) ** 2).sum())
    needed = 2 * (parameters - head) * lengths.sum() + 2 * head * batch["mask"].sum() + attention
    print(f"\n| {name}, {dtype} | log-probs before | now | update before | now |\n" + "|---" * 5 + "|")
    totals = [sum(column.values()) for column in columns]
    for row in ROWS:
        cells = (
            f"{column[row]:.2f} s, {column[row] / total:.0%}" for column, total in zip(columns, totals, strict=True)
        )
        print(f"| {row} | {' | '.join(cells)} |")
    print(f"| all | {' | '.join(f'{total:.2f} s' for total in totals)} |")
    reached = (factor * needed / total / limit for factor, total in zip((1, 1, 3, 3), totals, strict=True))
    print(f"| needed, of {limit / 1e9:,.0f} GFLOP/s | {' | '.join(f'{share:.0%}' for share in reached)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--rows", type=int, default=16, help="sequences (default: 16)")
    add_data(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        for name in args.models:
            path = os.path.join(directory, name)
            make_model(SHAPES[name], args.data, path)
            for dtype in args.dtypes:
                print_profile(name, dtype, args.rows, path, directory)


if __name__ == "__main__":
    main()
