"""What a rollout gains: `python -m benchmarks.rollout [--engines N] [--reward-s S] [--prompts N]`.

Engines (transformers, with a model of random weights) and reward processes are processes of this machine. From one run,
on the same prompts:

- rewards that take `--reward-s` each, computed while other completions are generated, against computing them after
  the last completion. 1.00 means that they cost nothing more than the longer of the two;
- tokens and log-probs of 1M tokens, pickled as arrays, against lists.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from trainer.cluster.process_cluster import ProcessCluster
from trainer.config import Config, RewardConfig, RolloutConfig
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.engine_pool import EnginePool
from trainer.generation.event_loop import all_of
from trainer.learner.train_workers import TrainWorkers
from trainer.models.tiny import TinyShape, build_tiny
from trainer.rewards.scorer import RewardInput
from trainer.rewards.scoring import RewardPool

REWARD = "import time\n\ndef slow(completion, answer):\n    time.sleep({seconds})\n    return 1.0\n"


def judge(pool: RewardPool, engines: EnginePool, requests: list[Request], early: bool) -> float:
    """Return the seconds to generate completions and compute their rewards.

    Args:
        early: compute rewards while other completions are generated.
    """

    async def run() -> None:
        async with pool.open("a step", len(requests), None) as scoring:  # type: ignore[arg-type]

            async def score(place: int) -> None:
                await scoring.score(place, [RewardInput(str(place), "")])

            async def one(place: int, request: Request) -> None:
                await engines.complete_together([request])
                if early:
                    await score(place)

            if early:
                await all_of([one(place, request) for place, request in enumerate(requests)])
            else:
                await engines.complete_together(requests)
                await all_of([score(place) for place in range(len(requests))])

    begin = time.perf_counter()
    engines.loop.run(run())
    return time.perf_counter() - begin


def pickling() -> str:
    """Return a line with the times of pickling 1M tokens and their log-probs."""
    rng = np.random.default_rng(0)
    completions = [Completion(rng.integers(0, 150_000, 1000), rng.normal(size=1000), "stop", 1) for _ in range(1000)]
    lists = [(one.token_ids.tolist(), one.logprobs.tolist(), "stop", 1) for one in completions]

    def seconds(value: object) -> tuple[float, int]:
        begin = time.perf_counter()
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        pickle.loads(data)
        return time.perf_counter() - begin, len(data)

    (new, new_bytes), (old, old_bytes) = (min(seconds(value) for _ in range(5)) for value in (completions, lists))
    return (
        f"pickle and unpickle 1M tokens: lists {old * 1000:.0f} ms and {old_bytes / 1e6:.0f} MB, arrays "
        f"{new * 1000:.0f} ms and {new_bytes / 1e6:.0f} MB: {old / new:.1f} times faster"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1, help="engines (default: 1)")
    parser.add_argument("--prompts", type=int, default=64, help="requests (default: 64)")
    parser.add_argument("--reward-s", type=float, default=0.1, help="seconds of a reward, on no core (default: 0.1)")
    arguments = parser.parse_args()
    print(pickling(), flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rollout = RolloutConfig(engine="transformers", num_engines=arguments.engines, max_num_seqs=8, weight_sync="auto")
    cfg = Config(rollout=rollout)
    cfg.trainer.ray_address = "processes"
    sampling = Sampling(1.0, 1.0, -1, 64, ())
    rng = random.Random(0)
    requests = [Request([rng.randrange(256) for _ in range(20)], seed, sampling) for seed in range(arguments.prompts)]
    with tempfile.TemporaryDirectory() as root:
        Path(root, "slow_rewards.py").write_text(REWARD.format(seconds=arguments.reward_s))
        sys.path.insert(0, root)
        path = os.path.join(root, "model")
        build_tiny(TinyShape(), path)
        reward = RewardConfig(name="slow_rewards:slow", num_processes=1)
        with ProcessCluster(cfg, "cpu") as cluster, RewardPool(reward) as pool:
            ranks = TrainWorkers(cfg, cluster)
            engines = EnginePool(cfg, cluster, ranks, path)
            ranks.begin(path)()
            engines.start(version=1, is_initial=True)
            engines.generate(requests)
            judge(pool, engines, requests[:8], early=True)  # starts the process
            begin = time.perf_counter()
            engines.generate(requests)
            generation = time.perf_counter() - begin
            late, early = (judge(pool, engines, requests, early=flag) for flag in (False, True))
    rewards = arguments.prompts * arguments.reward_s
    print(
        f"generation alone {generation:.2f} s, rewards alone {rewards:.2f} s\n"
        f"rewards after the last completion {late:.2f} s, meanwhile {early:.2f} s: {late / early:.2f} times faster, "
        f"{early / max(generation, rewards):.2f} times the longer of the two"
    )


if __name__ == "__main__":
    main()
