"""The workers' promises on GPUs: needs torch, transformers, accelerate and pytest, and none of Ray, Hydra or vLLM."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.training import (
    assembled,
    assert_close,
    config,
    load_then_step,
    make_batch,
    save_then_step,
    step_into_nan,
    stream_and_write,
    train_on_axes_of_one_rank,
    train_two_steps,
    train_with_offloading,
    update,
)
from trainer.config import Config, FSDPConfig
from trainer.models.tiny import TinyShape, build_tiny
from trainer.workers.rank import Rank

GPUS = torch.cuda.device_count()
TRIED_ON_CPU = os.environ.get("TRAINER_GPU_CI_DEVICE") == "cpu"
pytestmark = pytest.mark.skipif(GPUS == 0 and not TRIED_ON_CPU, reason="needs a CUDA device")
WORLDS = [n for n in (1, 2, 4) if n <= max(GPUS, 1)]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_path(request, tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    config = TinyShape(hidden_size=64, intermediate_size=128, tie_word_embeddings=request.param, seed=3)
    build_tiny(config, path)
    return path


def in_float32(cfg: Config, **fsdp) -> Config:
    """The same in float32, so that results can be compared closely."""
    cfg.trainer.policy.fsdp = FSDPConfig(**{"param_dtype": "float32", "compile": False, **fsdp})
    return cfg


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    "fsdp",
    [
        {},
        {"cpu_offload": True},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"compile": True},
        {"compile": True, "activation_checkpointing": "selective"},
    ],
    ids=["plain", "offload", "recompute", "selective", "compiled", "compiled-selective"],
)
def test_training_does_not_depend_on_gpus_offload_or_recomputation(model_path, world_size, fsdp):
    expected = run_ranks(1, train_two_steps, model_path, cfg=in_float32(config()))
    results = run_ranks(
        world_size, train_two_steps, model_path, cfg=in_float32(config(max_tokens_per_micro_batch=70), **fsdp)
    )
    for ours, theirs in zip(results[0]["metrics"], expected[0]["metrics"], strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_axes_of_one_rank_change_nothing(model_path, dtype):
    """What context and tensor parallelism call of torch exists and works on CUDA."""
    cfg = config(mini_batch_size=6)
    cfg.trainer.policy.fsdp.param_dtype = dtype
    expected = run_ranks(1, train_two_steps, model_path, cfg=cfg)[0]
    result = run_ranks(1, train_on_axes_of_one_rank, model_path, cfg=cfg)[0]
    for ours, theirs in zip(result["metrics"], expected["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4 if dtype == "float32" else 0.05, abs=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_that_are_computed_once_change_nothing(model_path, dtype):
    """In bfloat16, queries of a completion attend to its prompt with the variable-length kernel."""
    results = []
    for shares in (True, False):
        cfg = config(mini_batch_size=6)
        cfg.trainer.policy.fsdp.param_dtype = dtype
        results.append(run_ranks(1, train_two_steps, model_path, None, shares, cfg=cfg)[0])
    shared, alone = results
    for ours, theirs in zip(shared["metrics"], alone["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4 if dtype == "float32" else 0.05, abs=1e-3)
    difference = np.abs(assembled([shared], "logprobs") - assembled([alone], "logprobs")) * make_batch()["mask"]
    assert difference.max() < (1e-4 if dtype == "float32" else 0.15)


@pytest.mark.parametrize("axes", [{"tensor_parallel_size": 2}, {"context_parallel_size": 2}], ids=str)
@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
def test_axes_of_two_ranks_change_nothing(model_path, axes):
    cfg, split = in_float32(config()), in_float32(config(**axes))
    expected = run_ranks(1, train_two_steps, model_path, cfg=cfg)
    results = run_ranks(2, train_two_steps, model_path, cfg=split)
    for ours, theirs in zip(results[0]["metrics"], expected[0]["metrics"], strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("bfloat16", 0.15)])
def test_logprobs_equal_transformers(model_path, tmp_path, dtype, tolerance):
    cfg = config()
    cfg.trainer.policy.fsdp = FSDPConfig(param_dtype=dtype)
    results = run_ranks(WORLDS[-1], train_two_steps, model_path, str(tmp_path), cfg=cfg)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    from safetensors.torch import load_file

    model.load_state_dict(load_file(f"{tmp_path}/model.safetensors"), strict=False)
    model.tie_weights()
    batch = make_batch()
    ids = torch.from_numpy(batch["input_ids"])
    with torch.no_grad():
        expected = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    difference = np.abs(assembled(results, "logprobs")[:, 1:] - expected.numpy()) * batch["mask"][:, 1:]
    assert difference.max() < tolerance


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_checkpoint_continues_on_as_many_gpus_and_on_one(model_path, tmp_path, world_size):
    cfg = in_float32(config(max_tokens_per_micro_batch=70))
    uninterrupted = run_ranks(world_size, save_then_step, model_path, str(tmp_path), cfg=cfg)[0]
    for resumed_on in {world_size, 1}:
        resumed = run_ranks(resumed_on, load_then_step, model_path, str(tmp_path), cfg=cfg)[0]
        for ours, theirs in zip(resumed, uninterrupted, strict=True):
            assert_close(ours, theirs)


def test_a_nan_stops_every_rank_and_changes_no_weights(model_path):
    for message, untouched in run_ranks(WORLDS[-1], step_into_nan, model_path, cfg=config(mini_batch_size=6)):
        assert "nan" in message and untouched


def test_streamed_and_written_weights_are_the_same(model_path, tmp_path):
    from safetensors.torch import load_file

    streamed = run_ranks(WORLDS[-1], stream_and_write_on_host, model_path, str(tmp_path), cfg=config())
    for name, tensor in load_file(f"{tmp_path}/model.safetensors").items():
        assert torch.equal(tensor, streamed[0][name]), name


def stream_and_write_on_host(rank: Rank, path: str, out: str) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in stream_and_write(rank, path, out).items()}


@pytest.mark.parametrize(
    "fsdp",
    [{}, {"cpu_offload": True}, {"activation_checkpointing": "full"}, {"param_dtype": "bfloat16"}],
    ids=["plain", "offload", "recompute", "bfloat16"],
)
def test_adapters_do_not_depend_on_gpus_offload_or_recomputation(model_path, tmp_path, fsdp):
    pytest.importorskip("peft", reason="adapters need peft")
    from tests.cpu.unit.models.test_lora import lora_config, train

    def config_with(**fsdp) -> Config:
        cfg = in_float32(lora_config())
        cfg.trainer.policy.fsdp = FSDPConfig(**{"param_dtype": "float32", **fsdp})
        return cfg

    expected = run_ranks(1, on_host, train, model_path, str(tmp_path / "a"), cfg=config_with())[0]
    result = run_ranks(WORLDS[-1], on_host, train, model_path, str(tmp_path / "b"), cfg=config_with(**fsdp))[0]
    if "param_dtype" in fsdp:
        assert result["metrics"][1]["grad_norm"] == pytest.approx(expected["metrics"][1]["grad_norm"], rel=0.1)
        return
    for ours, theirs in zip(result["metrics"], expected["metrics"], strict=True):
        assert_close(ours, theirs)


def on_host(rank: Rank, function, *args) -> dict:
    result = function(rank, *args)
    return {**result, "streamed": {name: tensor.cpu() for name, tensor in result["streamed"].items()}}


def update_compiled(rank: Rank, path: str) -> tuple[dict[str, float], int]:
    rank.build(roles(rank.cfg, ["policy"]), path)
    return update(rank, "policy", make_batch(), 1), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_compiled_blocks_agree_in_bfloat16(model_path, mode):
    """With the variable-length attention inside of the graph, and one graph for all micro-batches."""
    cfg = config(max_tokens_per_micro_batch=70, mini_batch_size=6)
    cfg.trainer.policy.fsdp = FSDPConfig(compile=False)
    expected, _ = run_ranks(1, update_compiled, model_path, cfg=cfg)[0]
    cfg.trainer.policy.fsdp = FSDPConfig(activation_checkpointing=mode)  # compile: null
    ours, graphs = run_ranks(1, update_compiled, model_path, cfg=cfg)[0]
    assert graphs == (0 if TRIED_ON_CPU else 1)
    assert ours["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    assert ours["loss"] == pytest.approx(expected["loss"], abs=0.01)


def operators_of_an_update(rank: Rank, path: str) -> set[str]:
    """Return the names of the operators that ran on this rank, those of compiled graphs included."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    update(rank, "policy", make_batch(), 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        update(rank, "policy", make_batch(), 2)
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("compiled", [False, None], ids=["eager", "default"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_half_precision_takes_the_variable_length_kernel(model_path, dtype, compiled):
    cfg = config(mini_batch_size=6)
    cfg.trainer.policy.fsdp = FSDPConfig(param_dtype=dtype, compile=compiled)
    (found,) = run_ranks(1, operators_of_an_update, model_path, cfg=cfg)
    kernels = {"torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"}
    if dtype == "bfloat16" and not TRIED_ON_CPU:
        assert kernels <= found
        assert not any("scaled_dot_product" in name for name in found)
    else:
        assert not kernels & found
        assert any("scaled_dot_product" in name for name in found)


def allocated_while_offloaded(rank: Rank, path: str, directory: str) -> tuple[dict, int]:
    result = train_with_offloading(rank, path, directory)
    rank.release_memory()
    return result, torch.cuda.memory_allocated()


def test_states_leave_the_gpu_while_engines_generate(model_path, tmp_path):
    results = {}
    for offload in ("none", "optimizer", "all"):
        cfg = in_float32(config(offload=offload))
        directory = str(tmp_path / offload)
        result, allocated = run_ranks(1, allocated_while_offloaded, model_path, directory, cfg=cfg)[0]
        results[offload] = result, allocated, result.pop("held")
        resumed = run_ranks(1, load_then_step, model_path, directory, cfg=in_float32(config()))[0]
        for ours, theirs in zip(resumed, result["metrics"][2:], strict=True):
            assert_close(ours, dict(theirs))
    (plain, most, _), (_, less, _), (offloaded, least, held) = (results[name] for name in ("none", "optimizer", "all"))
    assert held == 0
    assert most > less > least or TRIED_ON_CPU
    for ours, theirs in zip(offloaded["metrics"], plain["metrics"], strict=True):
        assert_close(ours, theirs)
