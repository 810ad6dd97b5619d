"""Ranks that share the tokens of a micro-batch, or the matrices of a model, compute what one rank computes."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, PhiConfig, PretrainedConfig, Qwen3Config

from tests.support.architectures import ARCHITECTURES, SHAPE, VOCABULARY, random_model
from tests.support.ranks import run_ranks
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
    update,
)
from tests.support.whole_batches import compute_batch
from trainer.config import Config, FSDPConfig, TrainerConfig
from trainer.config.fields import setting
from trainer.config.rules import validate
from trainer.errors import UserError
from trainer.models.tiny import TinyShape, build_tiny
from trainer.parallel.axes import AXES, Axis, axis_sizes
from trainer.parallel.mesh import Layout
from trainer.parallel.rng import seed_rng
from trainer.tasks import build_task
from trainer.tasks.base import make_trainer
from trainer.workers.rank import Rank

pytestmark = pytest.mark.early
TENSOR_REPLICAS = {"tensor_parallel_size": 2, "dp_replicate": 2}
BOTH = {"tensor_parallel_size": 2, "context_parallel_size": 2}
MORE_CONTEXTS_THAN_HEADS = {"context_parallel_size": 4}
RECOMPUTED = FSDPConfig(activation_checkpointing="selective", cpu_offload=True, reshard_after_forward=False)
CASES = [
    ("qwen3", TENSOR_REPLICAS, FSDPConfig()),
    ("qwen3", MORE_CONTEXTS_THAN_HEADS, FSDPConfig()),
    ("gemma3", BOTH, RECOMPUTED),
]


def of_layout(cfg: Config, **axes: int) -> Config:
    return dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, **axes))


def settings(**trainer) -> Config:
    """One optimizer step without clipping."""
    cfg = config(mini_batch_size=GROUPS, max_tokens_per_micro_batch=100, **trainer)
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
        rows, values = compute_batch(rank, role, name, batch)
        found[name] = {"rows": rows, name: values}  # each role has a plan of its own
    for role in ("policy", "critic"):
        worker = rank.roles[role]

        def recording(*_, worker=worker, role=role) -> None:
            for name, parameter in worker.module.named_parameters():
                found["gradients"][f"{role}.{name}"] = parameter.grad.full_tensor().clone()

        worker.optimizers.all[0].register_step_pre_hook(recording)
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


@pytest.mark.parametrize("architecture, axes, fsdp", CASES, ids=["tp and replicas", "cp", "tp, cp and recomputation"])
def test_gradients_do_not_depend_on_the_layout(one_rank, architecture, axes, fsdp):
    path, expected = one_rank(architecture)
    cfg = settings(**axes)
    cfg.trainer.policy.fsdp = fsdp
    results = run_ranks(4, gradients, path, cfg=cfg)
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
    build_tiny(TinyShape(60, 132, num_layers=1, num_kv_heads=4, tie_word_embeddings=tied, seed=3), str(path))
    return str(path)


def test_a_state_continues_under_any_layout(tmp_path):
    """Four ranks save. Under the same layout the result is the same to the last bit.

    On one rank: `test_a_new_axis_of_ranks_that_repeat_each_other_is_one_entry_and_one_key`.
    """
    path, cfg, directory = tiny(tmp_path / "model", tied=False), config(max_tokens_per_micro_batch=100), str(tmp_path)
    cfg.trainer.policy.optimizer.scheduler = "cosine"
    saved = TENSOR_REPLICAS
    uninterrupted = run_ranks(4, save_then_step, path, directory, cfg=of_layout(cfg, **saved))[0]
    for ranks, axes in ((4, saved), (2, {"context_parallel_size": 2})):
        results = run_ranks(ranks, load_then_step, path, directory, cfg=of_layout(cfg, **axes))[0]
        if axes == saved:
            assert results == uninterrupted
        for ours, theirs in zip(results, uninterrupted, strict=True):
            assert_close(ours, theirs)


@dataclasses.dataclass
class TrainerConfigWithCopies(TrainerConfig):
    copies: int = setting(1, at_least=1, resume="rounding")
    """Ranks that compute the same, with the same weights."""

    @property
    def layout(self) -> dict[str, int]:
        return {**super().layout, "copies": self.copies}


def train_with_copies(rank: Rank, gradients_of: str, path: str, directory: str) -> tuple[dict, Any, Any]:
    """On two data-parallel ranks, twice: the gradients, and how a state continues without and with a restart."""
    AXES["copies"] = Axis("copies")
    try:
        rank.layout = Layout(rank.device, axis_sizes(rank.cfg.trainer, rank.world_size))
        seed_rng(rank.layout.dp_rank)  # ranks with the same rows draw the same numbers
        found = gradients(rank, gradients_of)
        rank.cfg = dataclasses.replace(rank.cfg, trainer=TrainerConfigWithCopies(**vars(config().trainer), copies=2))
        return found, save_then_step(rank, path, directory), load_then_step(rank, path, directory)
    finally:
        del AXES["copies"]


def test_a_new_axis_of_ranks_that_repeat_each_other_is_one_entry_and_one_key(one_rank, tmp_path, monkeypatch):
    """Four ranks are two data-parallel ranks, twice. They train, save and resume as others do."""
    model, expected = one_rank("qwen3")
    path, directory = tiny(tmp_path / "model", tied=True), str(tmp_path)
    cfg = settings()
    cfg = dataclasses.replace(cfg, trainer=TrainerConfigWithCopies(**vars(cfg.trainer), copies=2))
    all_results = run_ranks(4, train_with_copies, model, path, directory, cfg=cfg)
    results, saved, resumed = zip(*all_results, strict=True)
    assert_equal_gradients(results, expected)
    rows = [result["logprobs"]["rows"].tolist() for result in results]
    assert rows[0] and rows[2] and not rows[1] and not rows[3], "of two that repeat each other, one answers"
    assert saved == resumed
    for ours, theirs in zip(run_ranks(1, load_then_step, path, directory, cfg=config())[0], saved[0], strict=True):
        assert_close(ours, theirs)

    monkeypatch.setitem(AXES, "copies", Axis("copies"))
    trainer = TrainerConfigWithCopies(num_workers=3, copies=2)
    assert axis_sizes(trainer, 4) == {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "copies": 2}
    with pytest.raises(UserError, match="trainer.num_workers=3: must be a multiple of trainer.copies=2"):
        validate(dataclasses.replace(Config(), trainer=trainer))


@pytest.mark.parametrize("tied, ranks, tensor", [(True, 4, 2), (False, 2, 1)])
def test_written_and_streamed_weights_do_not_depend_on_the_layout(tmp_path, tied, ranks, tensor):
    """They are equal on all ranks, and rounded once."""
    path = tiny(tmp_path / "model", tied)
    streamed = run_ranks(ranks, stream_and_write, path, str(tmp_path), cfg=config(tensor_parallel_size=tensor))
    written, start = load_file(f"{tmp_path}/model.safetensors"), load_file(f"{path}/model.safetensors")
    assert set(start) == set(written) == set(streamed[-1])
    for name, tensor in written.items():
        assert torch.equal(tensor, start[name].bfloat16()), name
        assert torch.equal(tensor, streamed[-1][name]), name


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


def refusals(rank: Rank, paths: list[str]) -> list[str]:
    found = []
    for path in paths:
        with pytest.raises(UserError) as error:
            rank.build(roles(rank.cfg, ["policy"]), path)
        found.append(str(error.value))
    return found


NOT_SPLIT: list[tuple[PretrainedConfig, str]] = [
    (
        Qwen3Config(**SHAPE | {"intermediate_size": 65}),
        "trainer.tensor_parallel_size=2: must divide the 65 outputs of layers.0.mlp.gate_proj",
    ),
    (
        PhiConfig(vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2),
        "trainer.tensor_parallel_size=2: the output layer of PhiForCausalLM is more than one linear layer "
        "without a bias",
    ),
]


def test_what_a_model_cannot_do_is_refused_before_it_is_loaded(tmp_path):
    """A layer that two ranks cannot divide, and an output layer that is not one matrix."""
    for index, (model, _) in enumerate(NOT_SPLIT):
        model.architectures = [type(AutoModelForCausalLM.from_config(model)).__name__]
        model.save_pretrained(tmp_path / str(index))  # there are no weights to load
    paths = [str(tmp_path / str(index)) for index in range(len(NOT_SPLIT))]
    expected = [problem for _, problem in NOT_SPLIT]
    assert run_ranks(2, refusals, paths, cfg=config(tensor_parallel_size=2)) == [expected, expected]
