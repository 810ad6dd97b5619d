"""Ranks that share the tokens of a micro-batch, or the matrices of a model, compute what one rank computes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, PhiConfig, Qwen3Config

from tests.support.architectures import ARCHITECTURES, SHAPE, VOCABULARY, random_model
from tests.support.ranks import ConnectedRank, local_cluster, run_ranks
from tests.support.roles import roles
from tests.support.training import (
    GROUPS,
    assembled,
    assert_close,
    config,
    load_then_step,
    make_batch,
    save_then_step,
    stream_and_write,
    train_on_axes_of_one_rank,
    train_two_steps,
    update,
)
from trainer.config import Config, FSDPConfig, TrainerConfig
from trainer.config.fields import number
from trainer.config.rules import check_trainer
from trainer.config.trainer import AXES, Axis, axis_sizes
from trainer.errors import UserError
from trainer.models.tiny import TinyShape, build_tiny
from trainer.tasks import build_task
from trainer.tasks.base import make_trainer
from trainer.workers.rank import Rank

pytestmark = pytest.mark.early
LAYOUTS = {
    "2 replicas in 2 contexts each": (4, {"context_parallel_size": 2, "dp_replicate": 2}),
    "more contexts than key and value heads": (4, {"context_parallel_size": 4}),
    "2 replicas on 2 tensor ranks each": (4, {"tensor_parallel_size": 2, "dp_replicate": 2}),
    "2 contexts on 2 tensor ranks each": (4, {"tensor_parallel_size": 2, "context_parallel_size": 2}),
    "the same with recomputation and offload": (4, {"tensor_parallel_size": 2, "context_parallel_size": 2}),
}
BOTH, MANY = "2 contexts on 2 tensor ranks each", "more contexts than key and value heads"
CASES = [
    ("qwen3", "2 replicas in 2 contexts each"),
    ("qwen3", "2 replicas on 2 tensor ranks each"),
    ("qwen3", "the same with recomputation and offload"),
    ("llama", MANY),
    ("gemma3", BOTH),
]


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
    rank.build(roles(rank.cfg, ["policy", "critic"]), path)
    batch = make_batch()
    batch["input_ids"] %= VOCABULARY
    found: dict = {"gradients": {}, "metrics": {}}
    critic = rank.roles["critic"].module
    head = critic.value_head.weight  # it starts at 0, and would give the backbone no gradients
    values = torch.linspace(-1, 1, head.numel()).view(head.shape)
    with torch.no_grad():
        head.copy_(distribute_tensor(values, head.device_mesh, head.placements, src_data_rank=None))
    for role, name in (("policy", "logprobs"), ("critic", "values")):
        rows, values = rank.score(role, name, batch)
        found[name] = {"rows": rows, name: values}  # each role has a plan of its own
    for role in ("policy", "critic"):
        worker = rank.roles[role]

        def recording(*_, worker=worker, role=role) -> None:
            for name, parameter in worker.module.named_parameters():
                found["gradients"][f"{role}.{name}"] = parameter.grad.full_tensor().clone()

        worker.optimizer.register_step_pre_hook(recording)
        found["metrics"][role] = update(rank, role, batch, 1)
    return found


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> Callable[[str], tuple[str, dict]]:
    """The directory of a model, and what one rank computes."""

    @functools.cache
    def compute(architecture: str) -> tuple[str, dict]:
        path = str(tmp_path_factory.mktemp(architecture))
        model = copy.deepcopy(ARCHITECTURES[architecture])
        model.tie_word_embeddings = architecture == "qwen3"
        random_model(model, "sdpa").save_pretrained(path)
        return path, run_ranks(1, gradients, path, cfg=settings())[0]

    return compute


@pytest.mark.parametrize("architecture, layout", CASES)
def test_gradients_do_not_depend_on_the_layout(one_rank, architecture, layout):
    path, expected = one_rank(architecture)
    ranks, axes = LAYOUTS[layout]
    cfg = settings(**axes)
    if "recomputation" in layout:
        options = {"activation_checkpointing": "selective", "cpu_offload": True, "reshard_after_forward": False}
        cfg.trainer.policy.fsdp = FSDPConfig(**options)
    results = run_ranks(ranks, gradients, path, cfg=cfg)
    assert_equal_gradients(results, expected)
    mask = make_batch()["mask"]
    for name in ("logprobs", "values"):
        ours, theirs = (assembled([result[name] for result in of], name) for of in (results, [expected]))
        assert np.abs((ours - theirs) * mask).max() < 1e-5 * max(1, np.abs(theirs * mask).max()), name


def assert_equal_gradients(results: list[dict], expected: dict) -> None:
    for result in results:
        for role, metrics in expected["metrics"].items():
            assert result["metrics"][role] == pytest.approx(metrics, rel=1e-5, abs=1e-6)
        assert result["gradients"].keys() == expected["gradients"].keys()
        for parameter, gradient in expected["gradients"].items():
            difference = (result["gradients"][parameter] - gradient).abs().max()
            assert difference < 1e-5 * gradient.abs().max() + 1e-8, parameter


def tiny(path: Path, tied: bool) -> str:
    """Four heads of queries, keys and values each; layers whose parts no number of ranks divides evenly."""
    build_tiny(
        TinyShape(hidden_size=60, intermediate_size=132, num_kv_heads=4, tie_word_embeddings=tied, seed=3), str(path)
    )
    return str(path)


def test_axes_of_one_rank_change_nothing(tmp_path):
    """As tests/gpu_ci checks it on one GPU."""
    path = tiny(tmp_path, tied=True)
    expected = run_ranks(1, train_two_steps, path, cfg=config())[0]
    result = run_ranks(1, train_on_axes_of_one_rank, path, cfg=config())[0]
    for ours, theirs in zip(result["metrics"], expected["metrics"], strict=True):
        assert_close(ours, theirs)


WHOLE = (1, {})
TWO_SHARES = (2, {})
FOUR_SHARES = (4, {})
TWO_BY_TWO = (4, {"tensor_parallel_size": 2})
TWO_CONTEXTS = (4, {"context_parallel_size": 2})


@pytest.mark.parametrize(
    "tied, saved, resumed",
    [
        (True, TWO_BY_TWO, [FOUR_SHARES, TWO_CONTEXTS, WHOLE]),
        (False, WHOLE, [(4, {"tensor_parallel_size": 2, "context_parallel_size": 2}), TWO_SHARES]),
    ],
    ids=["tensor", "one rank"],
)
def test_a_state_continues_under_any_layout(tied, saved, resumed, tmp_path):
    path, cfg, directory = tiny(tmp_path / "model", tied), config(max_tokens_per_micro_batch=70), str(tmp_path)
    uninterrupted = run_ranks(saved[0], save_then_step, path, directory, cfg=of_layout(cfg, **saved[1]))[0]
    again = run_ranks(saved[0], load_then_step, path, directory, cfg=of_layout(cfg, **saved[1]))[0]
    assert again == uninterrupted
    for ranks, axes in resumed:
        results = run_ranks(ranks, load_then_step, path, directory, cfg=of_layout(cfg, **axes))[0]
        for ours, theirs in zip(results, uninterrupted, strict=True):
            assert_close(ours, theirs)


@dataclasses.dataclass
class TrainerConfigWithCopies(TrainerConfig):
    copies: int = number(1, at_least=1, resume="rounding")
    """Ranks that compute the same, with the same weights."""


class RankWithCopies(ConnectedRank):
    def __init__(self, *args: Any):
        AXES["copies"] = Axis("copies")
        super().__init__(*args)


def run_with_copies(ranks: int, function: Callable[..., Any], *args: Any, cfg: Config) -> list[Any]:
    trainer = TrainerConfigWithCopies(**vars(cfg.trainer), copies=2)
    with local_cluster(ranks, dataclasses.replace(cfg, trainer=trainer), "cpu") as cluster:
        factory = functools.partial(RankWithCopies, cluster.cfg)
        group = cluster.launch_ranks("rank", factory, {"OMP_NUM_THREADS": "1"})
        return group.call("run", cluster.rendezvous_address(group), function, args)


def test_a_new_axis_of_ranks_that_repeat_each_other_is_one_entry_and_one_key(one_rank, tmp_path, monkeypatch):
    """Four ranks are two data-parallel ranks, twice. They train, save and resume as others do."""
    monkeypatch.setitem(AXES, "copies", Axis("copies"))
    path, expected = one_rank("qwen3")
    results = run_with_copies(4, gradients, path, cfg=settings())
    assert_equal_gradients(results, expected)
    rows = [result["logprobs"]["rows"].tolist() for result in results]
    assert rows[0] and rows[2] and not rows[1] and not rows[3], "of two that repeat each other, one answers"

    path, directory = tiny(tmp_path / "model", tied=True), str(tmp_path)
    uninterrupted = run_with_copies(4, save_then_step, path, directory, cfg=config())[0]
    assert run_with_copies(4, load_then_step, path, directory, cfg=config())[0] == uninterrupted
    for ours, theirs in zip(run_ranks(1, load_then_step, path, directory, cfg=config())[0], uninterrupted, strict=True):
        assert_close(ours, theirs)

    trainer = TrainerConfigWithCopies(num_workers=3, copies=2)
    assert axis_sizes(trainer, 4) == {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "copies": 2}
    with pytest.raises(UserError, match="trainer.num_workers=3: must be a multiple of trainer.copies=2"):
        check_trainer(dataclasses.replace(Config(), trainer=trainer))


@pytest.mark.parametrize("tied, tensor", [(True, 2), (False, 4)])
def test_written_and_streamed_weights_do_not_depend_on_the_layout(tmp_path, tied, tensor):
    path = tiny(tmp_path / "model", tied)
    streamed = run_ranks(4, stream_and_write, path, str(tmp_path), cfg=config(tensor_parallel_size=tensor))
    written, start = load_file(f"{tmp_path}/model.safetensors"), load_file(f"{path}/model.safetensors")
    assert set(start) == set(written) == set(streamed[3])
    for name, tensor in written.items():
        assert torch.equal(tensor, start[name].bfloat16()), name
        assert torch.equal(tensor, streamed[3][name]), name


def draws(rank: Rank) -> float:
    return float(torch.rand(()))


def test_ranks_with_the_same_share_of_the_data_draw_the_same_numbers():
    first, second, third, fourth = run_ranks(4, draws, cfg=config(context_parallel_size=2))
    assert first == second != third == fourth


@pytest.mark.parametrize("task", ["rl", "sft"])
def test_a_run_refuses_before_it_starts_ranks(task, tmp_path):
    build_tiny(TinyShape(), str(tmp_path))
    no_cluster: Any = None
    with pytest.raises(
        UserError, match="trainer.tensor_parallel_size=4: must divide the number of key and value heads"
    ):
        cfg = of_layout(Config(), tensor_parallel_size=4, task=task)
        make_trainer(build_task(cfg), no_cluster, None, str(tmp_path), None)


def build(rank: Rank, path: str) -> None:
    rank.build(roles(rank.cfg, ["policy"]), path)


@pytest.mark.parametrize(
    "axes, model, problem",
    [
        (
            {"tensor_parallel_size": 2},
            Qwen3Config(**SHAPE | {"intermediate_size": 65}),
            "trainer.tensor_parallel_size=2: must divide the 65 outputs of layers.0.mlp.gate_proj",
        ),
        (
            {"tensor_parallel_size": 2},
            PhiConfig(vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2),
            "trainer.tensor_parallel_size=2: the output layer of PhiForCausalLM is more than one linear layer "
            "without a bias",
        ),
    ],
    ids=["layer", "head"],
)
def test_what_a_model_cannot_do_is_refused_before_it_is_loaded(axes, model, problem, tmp_path):
    model.architectures = [type(AutoModelForCausalLM.from_config(model)).__name__]
    model.save_pretrained(tmp_path)  # there are no weights to load
    with pytest.raises(UserError, match=f"^{re.escape(problem)}$"):
        run_ranks(2, build, str(tmp_path), cfg=config(**axes))
