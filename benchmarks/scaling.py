"""How the cost of an update grows: `python -m benchmarks.scaling`.

With the length of the sequences, with their number, and with the size of the model, on one rank: CPU seconds and the
exponent of the growth from the first to the last row (1: linear). A number of tokens that is doubled by more sequences
must cost twice as much; longer sequences cost more by their attention. Then with the ranks, real processes over gloo:
seconds on the clock, CPU seconds of all ranks together, and both as ratios to one rank. With more ranks than cores, and
on a machine with other work, only the CPU seconds tell something.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.models import SHAPES, Shape, add_data, make_model
from benchmarks.ranks import TimedRank, cpu_seconds, gsm8k_lengths, make_batch, one_policy
from tests.support.whole_batches import update_batch
from trainer.cluster.process_cluster import ProcessCluster
from trainer.config import Config, RolloutConfig

SMALL = Shape(2048, 256, 768, 4, 4, 2)
MODELS = {"4M": SMALL, "17M": SHAPES["17M"], "48M": Shape(8192, 768, 2304, 6, 12, 4)}


def print_growth(title: str, values: Iterable[float], cost: Callable[[Any], float]) -> None:
    """Print the cost at each value, relative to the first, and the exponent of its growth."""
    print(f"\n| {title} | CPU | to the first | exponent |\n" + "|---" * 4 + "|", flush=True)
    first: tuple[float, float] | None = None
    for value in values:
        seconds = cost(value)
        first = first or (value, seconds)
        ratio, growth = seconds / first[1], value / first[0]
        exponent = f"{math.log(ratio) / math.log(growth):.2f}" if growth != 1 else ""
        print(f"| {value:,.0f} | {seconds:.2f} s | {ratio:.2f} | {exponent} |", flush=True)


def measure_ranks(path: str, vocabulary: int, rows: int, counts: list[int]) -> None:
    print(f"\n| ranks | update of {rows} rows | speed-up | CPU of all | to one rank |\n" + "|---" * 5 + "|", flush=True)
    base: tuple[float, float] | None = None
    for count in counts:
        cfg = Config(rollout=RolloutConfig(max_logprob_diff=None))  # the log-probs of the batch are made up
        cfg.trainer = dataclasses.replace(cfg.trainer, num_workers=count, mini_batch_size=10_000)
        cfg.trainer.max_tokens_per_micro_batch = 4096
        with ProcessCluster(cfg, "cpu") as cluster:
            group = cluster.launch_ranks("rank", functools.partial(TimedRank, cfg), {"OMP_NUM_THREADS": "1"})
            batch = make_batch(gsm8k_lengths(rows), vocabulary)
            times = group.call("run", cluster.rendezvous_address(group), path, cluster.put(batch))
        wall, cpu = max(one for one, _ in times), sum(one for _, one in times)
        base = base or (wall, cpu)
        print(f"| {count} | {wall:.2f} s | {base[0] / wall:.2f} | {cpu:.2f} s | {cpu / base[1]:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rows", type=int, default=64)
    add_data(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "small")
        make_model(SMALL, args.data, path)
        with one_policy(path, directory, "float32") as rank:

            def cost(rows: float, length: float) -> float:
                batch = make_batch(np.full(int(rows), int(length)), SMALL.vocabulary, completion=int(length))
                return cpu_seconds(lambda: update_batch(rank, "policy", batch, 1), repeat=1)

            print_growth("tokens of each of 8 sequences", (256, 512, 1024, 2048), lambda length: cost(8, length))
            print_growth("sequences of 256 tokens", (8, 16, 32, 64), lambda rows: cost(rows, 256))
        measure_ranks(path, SMALL.vocabulary, args.rows, args.ranks)

        sizes: dict[int, str] = {}
        for name, shape in MODELS.items():
            sizes[make_model(shape, args.data, os.path.join(directory, name))] = name

        def cost_of_model(parameters: float) -> float:
            name = sizes[int(parameters)]
            batch = make_batch(np.full(16, 128), MODELS[name].vocabulary, completion=64)
            with one_policy(os.path.join(directory, name), directory, "float32") as rank:
                return cpu_seconds(lambda: update_batch(rank, "policy", batch, 1))

        print_growth("parameters", sizes, cost_of_model)


if __name__ == "__main__":
    main()
