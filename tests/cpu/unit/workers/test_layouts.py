"""Ranks that share the tokens of a micro-batch: gradients and losses are those of one rank."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from tests.support.architectures import ARCHITECTURES, VOCABULARY, random_model
from tests.support.ranks import run_ranks
from tests.support.training import GROUPS, assembled, config, make_batch, update
from trainer.config import Config
from trainer.errors import UserError
from trainer.models.axes import check_model_axes
from trainer.workers.rank import Rank

LAYOUTS = {
    "2 contexts": (2, {"context_parallel": 2}),
    "2 shares in 2 contexts each": (4, {"context_parallel": 2}),
    "2 replicas in 2 contexts each": (4, {"context_parallel": 2, "replicas": 2}),
    "more contexts than key and value heads": (4, {"context_parallel": 4}),
}


def of_layout(cfg: Config, **axes: int) -> Config:
    return dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, **axes))


def settings(**trainer) -> Config:
    """One optimizer step without clipping."""
    cfg = config(mini_batch_size=GROUPS, max_tokens_per_micro_batch=50, **trainer)
    for role in (cfg.trainer.policy, cfg.trainer.critic):
        role.optimizer.max_grad_norm = 0.0
    return cfg


def gradients(rank: Rank, path: str) -> dict:
    """Gradients of policy and critic, and what else they compute of a batch."""
    rank.build(["policy", "critic"], path)
    batch = make_batch()
    batch["input_ids"] %= VOCABULARY
    found: dict = {"gradients": {}, "metrics": {}}
    critic = rank.roles["critic"].module
    head = critic.value_head.weight  # it starts at 0, and would give the backbone no gradients
    values = torch.linspace(-1, 1, head.numel()).view(head.shape)
    with torch.no_grad():
        head.copy_(distribute_tensor(values, head.device_mesh, head.placements, src_data_rank=None))
    for role, name in (("policy", "logprobs"), ("critic", "values")):
        rows, values = rank.call(role, name, batch)
        found[name] = {"rows": rows, name: values}  # each role has a plan of its own
    for role in ("policy", "critic"):
        worker = rank.roles[role]

        def recording(*_, worker=worker, role=role) -> None:
            for name, parameter in worker.module.named_parameters():
                found["gradients"][f"{role}.{name}"] = parameter.grad.full_tensor().clone()

        worker.optimizer.register_step_pre_hook(recording)
        found["metrics"][role] = update(rank, role, batch, 1)
    return found


@pytest.fixture(scope="module", params=["qwen3", "llama", "gemma3"])
def model_path(request, tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    architecture = copy.deepcopy(ARCHITECTURES[request.param])
    architecture.tie_word_embeddings = request.param == "qwen3"
    random_model(architecture, "sdpa").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def one_rank(model_path) -> dict:
    return run_ranks(1, gradients, model_path, cfg=settings())[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_do_not_depend_on_the_layout(model_path, one_rank, name):
    ranks, axes = LAYOUTS[name]
    results = run_ranks(ranks, gradients, model_path, cfg=settings(**axes))
    for result in results:
        for role, metrics in one_rank["metrics"].items():
            assert result["metrics"][role] == pytest.approx(metrics, rel=1e-5, abs=1e-6)
        assert result["gradients"].keys() == one_rank["gradients"].keys()
        for parameter, expected in one_rank["gradients"].items():
            difference = (result["gradients"][parameter] - expected).abs().max()
            assert difference < 1e-5 * expected.abs().max() + 1e-8, parameter
    mask = make_batch()["mask"]
    for name in ("logprobs", "values"):
        ours, theirs = (assembled([result[name] for result in of], name) for of in (results, [one_rank]))
        difference = np.abs(ours - theirs) * mask
        assert difference.max() < 1e-5, name


def draws(rank: Rank) -> float:
    return float(torch.rand(()))


def test_ranks_with_the_same_share_of_the_data_draw_the_same_numbers():
    first, second, third, fourth = run_ranks(4, draws, cfg=config(context_parallel=2))
    assert first == second != third == fourth


def test_heads_must_be_divisible_by_the_contexts():
    cfg = of_layout(Config(), context_parallel=3)
    with pytest.raises(UserError, match="trainer.context_parallel=3: must divide the attention heads .* it has 4$"):
        check_model_axes(cfg, ARCHITECTURES["llama"])
