"""What the processes of a run need."""

from __future__ import annotations

import pytest

from tests.support.config import set_value
from trainer.cluster.resources import (
    by_node,
    check_gpus,
    forwarded_variables,
    gpus_per_engine,
    max_world_size,
    rank_environment,
)
from trainer.config import ENGINES, Config, EngineSpec
from trainer.errors import UserError


def test_settings_of_libraries_reach_the_processes_of_a_cluster_and_secrets_do_not():
    given = {
        "NCCL_DEBUG": "INFO",
        "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
        "HF_HOME": "/models",
        "HF_TOKEN": "hf_secret",
        "HF_TOKEN_PATH": "/home/me/token",
        "HUGGING_FACE_HUB_TOKEN": "hf_secret",
        "VLLM_API_KEY": "secret",
        "NCCL_SECRET_FILE": "/home/me/secret",
        "TORCH_PASSWORDS": "secret",
        "MY_HF_HOME": "/models",
        "PATH": "/bin",
    }
    assert forwarded_variables(given) == {name: given[name] for name in list(given)[:3]}


def test_ranks_on_gpus_get_settings_of_the_allocator_and_their_own_gpus():
    found = rank_environment("cuda", {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"})
    assert found["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "0"
    assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert rank_environment("cuda", {name: "backend:native"})["PYTORCH_ALLOC_CONF"] == "backend:native"
    assert rank_environment("cpu", {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("share", "gpus", "fits"), [(False, 2, True), (False, 1, False), (True, 1, True)])
def test_ranks_and_engines_must_fit_on_the_gpus(share, gpus, fits):
    cfg = Config()
    cfg.rollout.colocate = share
    if fits:
        check_gpus(cfg, gpus)
    else:
        with pytest.raises(UserError, match="need 2 GPUs, and there are 1"):
            check_gpus(cfg, gpus)


def test_a_task_without_engines_needs_gpus_for_its_ranks_alone():
    cfg = Config()
    cfg.trainer.task, cfg.trainer.num_workers = "sft", 2
    check_gpus(cfg, 2)
    cfg.trainer.task = "rl"
    with pytest.raises(UserError, match="need 3 GPUs, and there are 2"):
        check_gpus(cfg, 2)


def test_engines_that_take_no_gpus_leave_them_to_the_ranks(monkeypatch):
    monkeypatch.setitem(ENGINES, "served", EngineSpec("my_engine:Engine", gpus=False))
    cfg = Config()
    cfg.trainer.num_workers, cfg.rollout.num_engines = 4, 9
    assert [gpus_per_engine(cfg, device) for device in ("cpu", "cuda")] == [0, 1]
    with pytest.raises(UserError, match="need 13 GPUs"):
        check_gpus(cfg, 4)
    cfg.rollout.engine = "served"
    assert gpus_per_engine(cfg, "cuda") == 0
    check_gpus(cfg, 4)
    assert max_world_size(cfg, "cuda", [{"CPU": 20.0, "GPU": 4.0}], 9) == 4


def test_ranks_of_a_node_are_neighbours():
    assert by_node({0: "a", 1: "b", 2: "a", 3: "b", 4: "a"}) == [0, 2, 4, 1, 3]
    assert by_node({2: "b", 1: "a", 0: "b"}) == [0, 2, 1]
    assert by_node({}) == []


@pytest.mark.parametrize(
    ("device", "free", "engines", "settings", "ranks"),
    [
        ("cpu", [{"CPU": 3.0}, {"CPU": 2.5}], 1, {}, 4),
        ("cpu", [{"CPU": 3.0}, {}], 1, {}, 2),
        ("cpu", [{"CPU": 3.0}], 0, {}, 3),
        ("cpu", [{"CPU": 3.0}], 0, {"trainer.dp_replicate": 2}, 2),
        ("cpu", [{"CPU": 1.0}], 0, {"trainer.dp_replicate": 2}, 0),
        ("cpu", [{"CPU": 20.0}], 1, {}, 8),
        ("cuda", [{"CPU": 20.0, "GPU": 4.0}] * 2, 1, {}, 7),
        ("cuda", [{"CPU": 20.0, "GPU": 4.0}] * 2, 1, {"rollout.tensor_parallel_size": 4}, 4),
        ("cuda", [{"CPU": 20.0, "GPU": 3.0}] * 2, 1, {"rollout.tensor_parallel_size": 4}, 0),
        ("cuda", [{"CPU": 20.0, "GPU": 3.0}] * 2, 1, {"rollout.colocate": True}, 6),
        ("cuda", [{"CPU": 20.0}], 0, {}, 0),
    ],
)
def test_as_many_ranks_as_fit_beside_the_engines(device, free, engines, settings, ranks):
    cfg = Config()
    for key, value in {"trainer.num_workers": 8, **settings}.items():
        set_value(cfg, key, value)
    assert max_world_size(cfg, device, free, engines) == ranks
