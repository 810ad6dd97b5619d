"""Log-probs in chunks against all logits: `python -m benchmarks.logprob [--tokens 4096] [--vocabulary 151936]`.

Log-probs of tokens from hidden states, forward and backward: ours (`trainer.models.logprobs`) and the naive
way (a tensor of all logits, `log_softmax`, `gather`). Prints CPU seconds on one thread, and by how much the memory of
the process grows. The naive way needs 25 GB for 8,192 tokens, so it runs on fewer tokens; both of its costs are
proportional to their number.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory import peak_bytes
from trainer.models.logprobs import Head, _ChunkedScores


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits.log_softmax(dim=-1).gather(-1, targets[:, None])[:, 0]


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return _ChunkedScores.apply(hidden, weight, targets, Head(), 1.0, None)[0]


def measure(function: Callable[..., Tensor], tokens: int, weight: Tensor, repeat: int) -> tuple[float, int]:
    """Return the smallest CPU seconds of a forward and backward pass, and the largest growth of memory in bytes."""
    hidden = torch.randn(tokens, weight.shape[1], dtype=weight.dtype, requires_grad=True)
    targets = torch.randint(0, len(weight), (tokens,))
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
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| dtype | | tokens | CPU | us a token | memory | of all logits |\n" + "|---" * 7 + "|")
    for dtype in args.dtypes:
        weight = torch.randn(args.vocabulary, args.hidden, dtype=getattr(torch, dtype), requires_grad=True)
        results = {}
        for name, function, tokens in (("naive", naive, args.naive_tokens), ("ours", chunked, args.tokens)):
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
