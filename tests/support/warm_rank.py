"""Train, save and resume on one rank when this module is imported, so that the forks of this process are warm.

In a new process, torch, FSDP2 and transformers compute for seconds before the first step: they import modules, compile
expressions and fill caches. A fork server imports this module, so the ranks of tests need not do that again.
"""

from __future__ import annotations

import gc
import tempfile

from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support.training import config, load_then_step, save_then_step, train_two_steps
from trainer.models.tiny import TinyShape, build_tiny
from trainer.parallel.mesh import destroy_process_group
from trainer.workers.rank import Rank


def _warm_up() -> None:
    shape = TinyShape(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16)
    with tempfile.TemporaryDirectory() as directory:
        build_tiny(shape, f"{directory}/model")
        rank = Rank(config(max_tokens_per_micro_batch=400, mini_batch_size=6), 0, 1, "cpu")
        rank.connect(f"file://{directory}/store")
        train_two_steps(rank, f"{directory}/model")
        save_then_step(rank, f"{directory}/model", f"{directory}/saved")
        load_then_step(rank, f"{directory}/model", f"{directory}/saved")
    del rank
    gc.collect()
    destroy_process_group()
    _clear_sharding_prop_cache()  # it has meshes of the group that has ended


_warm_up()
