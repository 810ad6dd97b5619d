"""Log-probs in chunks against all logits: `python -m benchmarks.logprob [--tokens 4096] [--vocabulary 151936]`.

Log-probs of tokens from hidden states, forward and backward: ours (`trainer.models.logprobs`) and the naive
way (a tensor of all logits, `log_softmax`, `gather`). Prints CPU seconds on one thread, and by how much the memory of
the process grows. The naive way needs 25 GB for 8,192 tokens, so it runs on fewer tokens; both of its costs are
proportional to their number.

`--divergence` compares a distillation loss instead: the Jensen-Shannon divergence from a teacher with a head of its
own, over the whole vocabulary, with as many tokens for both ways.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory import peak_bytes
from trainer.config.algorithm import TeacherConfig
from trainer.models.logprobs import Distributions, Head, _ChunkedDivergence, _ChunkedScores
from trainer.models.online_softmax import Vocabulary, divergence


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits.log_softmax(dim=-1).gather(-1, targets[:, None])[:, 0]


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return _ChunkedScores.apply(hidden, weight, targets, Head(), 1.0, None)[0]


def naive_divergence(hidden: Tensor, weight: Tensor, states: Tensor) -> Tensor:
    with torch.no_grad():
        p = (states @ weight.detach().roll(1, 0).T).float().log_softmax(-1)
    return divergence(p, (hidden @ weight.T).float().log_softmax(-1), "jsd", 0.5)


def chunked_divergence(hidden: Tensor, weight: Tensor, states: Tensor) -> Tensor:
    teacher = Distributions(states, weight.detach().roll(1, 0), Head(), TeacherConfig(divergence="jsd"))
    return _ChunkedDivergence.apply(hidden, weight, Head(), teacher, Vocabulary())


def measure(function: Callable[..., Tensor], tokens: int, weight: Tensor, repeat: int) -> tuple[float, int]:
    """Return the smallest CPU seconds of a forward and backward pass, and the largest growth of memory in bytes."""
    hidden = torch.randn(tokens, weight.shape[1], dtype=weight.dtype, requires_grad=True)
    is_divergence = function in (naive_divergence, chunked_divergence)
    targets = torch.randn_like(hidden) if is_divergence else torch.randint(0, len(weight), (tokens,))
    seconds, peaks = [], []

    def run() -> Any:
        hidden.grad = weight.grad = None
        begin = time.process_time()
        function(hidden, weight, targets).sum().backward()
        seconds.append(time.process_time() - begin)

    for _ in range(repeat):
        weight.grad = None
        peaks.append(peak_bytes(run, "cpu"))
    return min(seconds), max(peaks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--naive-tokens", type=int, default=1024, help="tokens of the naive way (default: 1024)")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--divergence", action="store_true", help="of a distillation in place of log-probs")
    args = parser.parse_args()
    ways = [("naive", naive, args.naive_tokens), ("ours", chunked, args.tokens)]
    if args.divergence:
        ways = [("ours", chunked_divergence, args.tokens), ("naive", naive_divergence, args.tokens)]
    torch.set_num_threads(1)
    print("| dtype | | tokens | CPU | us a token | memory | of all logits |\n" + "|---" * 7 + "|")
    for dtype in args.dtypes:
        weight = torch.randn(args.vocabulary, args.hidden, dtype=getattr(torch, dtype), requires_grad=True)
        results = {}
        for name, function, tokens in ways:
            seconds, peak = measure(function, tokens, weight, args.repeat)
            results[name] = seconds / tokens, peak / tokens
            logits = 4 * tokens * args.vocabulary
            print(
                f"| {dtype} | {name} | {tokens:,} | {seconds:.2f} s | {1e6 * seconds / tokens:.0f} | "
                f"{peak / 1e9:.2f} GB | {peak / logits:.2f} |",
                flush=True,
            )
        (slow, large), (fast, small) = results["naive"], results["ours"]
        print(f"{dtype}: ours / naive, for each token: time {fast / slow:.2f}, memory {small / large:.3f}", flush=True)


if __name__ == "__main__":
    main()
