"""What packing saves: `python -m benchmarks.packing [--rows 16] [--dtype float32]`.

The update of a policy on sequences with the lengths of GSM8K prompts and their completions: packed as in training, one
sequence at a time, and padded to the longest of the batch (by computing on sequences of that length). Then
packed with the prompt of each eight completions once. Prints CPU seconds on one thread, and ratios to the packed
update.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import numpy as np

from benchmarks.models import SHAPES, add_data, make_model
from benchmarks.ranks import cpu_seconds, gsm8k_lengths, make_batch, one_policy
from tests.support.whole_batches import update_batch
from trainer.workers.policy import PolicyWorker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--model", choices=list(SHAPES), default="17M")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    add_data(parser)
    args = parser.parse_args()
    lengths = gsm8k_lengths(args.rows)
    padded = np.full_like(lengths, lengths.max())
    print("| update of | real tokens | computed tokens | CPU | to packed |\n" + "|---" * 5 + "|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model")
        make_model(SHAPES[args.model], args.data, path)
        with one_policy(path, directory, args.dtype) as rank:
            base, worker = None, rank.roles["policy"]
            assert isinstance(worker, PolicyWorker)
            for name, sizes, most, shares in (
                ("packed rows", lengths, 16384, False),
                ("one row at a time", lengths, 1, False),
                ("padded rows", padded, 16384, False),
                ("packed rows with shared prompts", lengths, 16384, True),
            ):
                worker.max_tokens, worker.shares_prompts = most, shares
                batch = make_batch(sizes, SHAPES[args.model].vocabulary)
                before = worker.tokens_computed
                update_batch(rank, "policy", batch, 1)
                computed = worker.tokens_computed - before
                seconds = cpu_seconds(lambda batch=batch: update_batch(rank, "policy", batch, 1))
                base = base or seconds
                print(
                    f"| {name} | {lengths.sum():,} | {computed:,} | {seconds:.2f} s | {seconds / base:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
