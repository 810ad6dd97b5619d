"""What bfloat16 gains on CPU: `python -m benchmarks.bfloat16 [--repeat 3]`.

On one rank with one thread, in one run: the speed of matrix products and of the update of a model of 17M parameters, in
float32 and in bfloat16 (`trainer.policy.fsdp.param_dtype`), and the ratio of the two.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import torch
from torch.utils.benchmark import Timer

from benchmarks.gpu import make_batch
from tests.support.whole_batches import update_batch
from trainer.config import Config, policy_role
from trainer.models.tiny import TinyShape, build_tiny
from trainer.parallel.mesh import destroy_process_group
from trainer.workers.rank import Rank

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOKENS = 4096
SIZE = TinyShape(hidden_size=384, intermediate_size=1536, num_layers=8, num_heads=6, num_kv_heads=3, head_dim=64)


def fastest_update(path: str, dtype: str, repeat: int) -> float:
    """Return the seconds of the fastest of `repeat` updates, after one that is not counted."""
    cfg = Config()
    cfg.trainer.mini_batch_size = 10_000  # one optimizer step an update
    cfg.rollout.max_logprob_diff = None  # the log-probs of the batch are made up
    cfg.trainer.policy.fsdp.param_dtype = dtype
    rank = Rank(cfg, 0, 1, "cpu")
    rank.connect(f"file://{path}/store-{dtype}")
    rank.build([policy_role(rank.cfg)], path)
    batch = make_batch(TOKENS, 256)
    times = []
    for step in range(repeat + 1):
        begin = time.perf_counter()
        update_batch(rank, "policy", batch, step)
        times.append(time.perf_counter() - begin)
    destroy_process_group()
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="updates that are timed (default: 3)")
    repeat = parser.parse_args().repeat
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        build_tiny(SIZE, path)
        squares = {name: torch.ones(1024, 1024, dtype=dtype) for name, dtype in DTYPES.items()}
        timers = {name: Timer("a @ a", globals={"a": square}) for name, square in squares.items()}
        peaks = {name: 2 * 1024**3 / timer.blocked_autorange(min_run_time=2.0).median for name, timer in timers.items()}
        updates = {name: fastest_update(path, name, repeat) for name in DTYPES}
    print("| | float32 | bfloat16 | ratio |\n|---|---|---|---|")
    ratio = peaks["bfloat16"] / peaks["float32"]
    print(f"| matrix products | {peaks['float32'] / 1e9:.0f} GFLOP/s | {peaks['bfloat16'] / 1e9:.0f} | {ratio:.1f} |")
    ratio = updates["float32"] / updates["bfloat16"]
    print(f"| update, {TOKENS} tokens | {updates['float32']:.2f} s | {updates['bfloat16']:.2f} s | {ratio:.2f} |")


if __name__ == "__main__":
    main()
