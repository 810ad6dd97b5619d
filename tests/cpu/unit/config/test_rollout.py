"""Keys of `rollout.*` that the chosen engine cannot do."""

from __future__ import annotations

import pytest

from tests.cpu.unit.config.contradictions import test_contradictions_are_refused_in_one_sentence  # noqa: F401
from trainer.config import ENGINES, Config

CONTRADICTIONS = [
    (
        ["rollout=transformers", "rollout.tensor_parallel_size=2"],
        "rollout.tensor_parallel_size=2: rollout.engine=transformers runs on one device; choose vllm",
    ),
    (
        ["rollout=transformers", "+rollout.engine_args.x=2"],
        "rollout.engine_args=.*: rollout.engine=transformers takes none; choose vllm",
    ),
    (["rollout=vllm", "rollout.colocate=true", "rollout.ahead=1"], "rollout.ahead=1: .*share the GPUs.*; choose 0"),
    (["rollout.max_staleness=2"], "rollout.max_staleness=2: needs rollout.in_flight_updates=true"),
    (
        ["rollout=transformers", "rollout.in_flight_updates=true"],
        "rollout.in_flight_updates=True: rollout.engine=transformers takes weights only when it generates nothing; "
        "choose rollout=vllm or server, or rollout.ahead=1 instead",
    ),
    (
        ["rollout.in_flight_updates=true", "rollout.ahead=1"],
        "rollout.in_flight_updates=True: engines take new weights before .* choose one of the two",
    ),
    (
        ["rollout.in_flight_updates=true", "rollout.colocate=true"],
        "rollout.in_flight_updates=True: engines that share the GPUs .* or rollout.colocate=false",
    ),
    (["rollout.lora_sync=merged"], "rollout.lora_sync=merged: needs trainer.policy.lora.rank"),
    (
        ["trainer.policy.lora.rank=4", "rollout=transformers", "rollout.lora_sync=adapter"],
        "rollout.lora_sync=adapter: rollout.engine=transformers serves no adapters; choose merged or rollout=vllm",
    ),
    (["trainer.policy.lora.rank=600", "rollout.lora_sync=adapter"], "rollout.lora_sync=adapter: .*up to rank 512"),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_largest_rank_that_an_engine_serves_decides_what_auto_means(engine):
    config = Config()
    config.rollout.engine, most = engine, ENGINES[engine].max_lora_rank
    config.trainer.policy.lora.rank = most + 1
    assert not config.syncs_adapter
    config.trainer.policy.lora.rank = max(most, 1)
    assert config.syncs_adapter == (most > 0)
