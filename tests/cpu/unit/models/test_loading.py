"""Models are built without weights, split, and filled from their files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    MixtralConfig,
    OPTConfig,
    PhimoeConfig,
    SeedOssConfig,
    Starcoder2Config,
)

from tests.support.architectures import SHAPE, WITH_BUFFERS, random_model
from tests.support.ranks import run_ranks
from tests.support.tables import table
from trainer.config import LM, SCORE, Config, FSDPConfig, LoraConfig, RoleSpec, critic_role, policy_role
from trainer.errors import UserError
from trainer.models.files import resolve_model_path
from trainer.models.loading import _leave_training_mode, empty_module, load_model
from trainer.models.logprobs import token_logprobs
from trainer.models.lora import hugging_face_name
from trainer.models.tiny import TinyShape, build_tiny
from trainer.parallel.packing import Packing
from trainer.workers.rank import Rank

SIZE = TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, seed=3)


@pytest.fixture
def path(tmp_path) -> Path:
    build_tiny(SIZE, str(tmp_path))
    return tmp_path


def full(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach() for name, parameter in module.named_parameters()}


def load(rank: Rank, path: str) -> dict[str, Any]:
    policy = load_model(rank.cfg, path, rank.layout, policy_role(rank.cfg))
    critic = load_model(rank.cfg, path, rank.layout, critic_role(rank.cfg))
    frozen = load_model(rank.cfg, path, rank.layout, RoleSpec("judge", head=SCORE, path_key="judge"))
    return {
        "policy": full(policy),
        "critic": full(critic),
        "frozen": {name: parameter.dtype for name, parameter in frozen.named_parameters()},
        "head": frozen.value_head.weight.full_tensor().float().tolist(),
        "trained": [any(p.requires_grad for p in m.parameters()) for m in (policy, critic, frozen)],
        "dropout": [m.p for m in policy.modules() if isinstance(m, nn.Dropout)]
        + [m.attention_dropout for m in policy.modules() if hasattr(m, "attention_dropout")],
        "shares": [parameter.to_local().numel() / parameter.numel() for parameter in policy.parameters()],
        "frequencies": policy.model.rotary_emb.inv_freq.tolist(),
    }


def refusal(rank: Rank, path: str) -> str:
    try:
        load_model(rank.cfg, path, rank.layout, policy_role(rank.cfg))
    except UserError as error:
        return str(error)
    return ""


def test_weights_are_those_of_the_files_and_the_head_of_a_critic_starts_at_0(path):
    weights = load_file(path / "model.safetensors")
    head = torch.arange(32.0)[None]
    save_file({**weights, "score.weight": head}, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    for result in run_ranks(2, load, str(path), cfg=Config()):
        assert set(result["policy"]) == set(weights)
        for name, tensor in result["policy"].items():
            assert torch.equal(tensor, weights[name]) and tensor.dtype == torch.float32, name
        assert not result["critic"].pop("value_head.weight").any()
        for name, tensor in result["critic"].items():
            assert torch.equal(tensor, weights[name]), name
        assert result["head"] == head.tolist(), "a frozen model has the head of its files"
        assert result["trained"] == [True, True, False]
        assert not any(result["dropout"]), "old and new log-probs of the same weights must be equal"
        assert sum(result["shares"]) <= len(result["shares"]) / 2 + 1
        assert result["frequencies"][0] == 1.0, "buffers are not in the files"


def load_all(rank: Rank, path: str) -> list[dict[str, torch.Tensor]]:
    """Return what each role has of the state of the model in `path`, by the names in its files."""
    lora = policy_role(rank.cfg)
    lora = dataclasses.replace(lora, lora=LoraConfig(rank=2, target_modules=["o_proj"]))
    offloaded = dataclasses.replace(policy_role(rank.cfg), sharding=FSDPConfig(cpu_offload=True))
    frozen = RoleSpec("judge", head=LM, path_key="judge")
    states = []
    for spec in (policy_role(rank.cfg), lora, offloaded, frozen, critic_role(rank.cfg)):
        module = load_model(rank.cfg, path, rank.layout, spec)
        state = {hugging_face_name(name): tensor for name, tensor in module.state_dict().items()}
        state = {name: tensor for name, tensor in state.items() if name not in (None, "value_head.weight")}
        states.append({name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()})
        if spec.trained:
            assert all(parameter.requires_grad for parameter in module.parameters()) or spec.has_adapters
    return states


@pytest.mark.parametrize(("family", "ranks"), [("deepseek_v32", 1), ("ernie4_5_moe", 2), ("gemma4", 2)])
def test_each_role_has_the_weights_and_buffers_that_transformers_loads(tmp_path, family, ranks):
    """Straight from safetensors, and scattered from rank 0 where transformers converts experts."""
    random_model(WITH_BUFFERS[family], "sdpa").save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for policy, *others, critic in run_ranks(ranks, load_all, str(tmp_path), cfg=Config()):
        for state in (policy, *others):
            assert set(state) == set(expected)
        assert set(critic) == set(expected) - {"lm_head.weight"}
        for state in (policy, *others, critic):
            assert [name for name in state if not torch.equal(state[name], expected[name])] == []


def test_a_model_in_another_format_is_loaded_on_rank_0_and_scattered(path):
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(weights, path / "pytorch_model.bin")
    result = run_ranks(2, load_policy, str(path), cfg=Config())[1]
    assert set(result) == set(weights) and all(torch.equal(result[name], weights[name]) for name in weights)


def load_policy(rank: Rank, path: str) -> dict[str, torch.Tensor]:
    return full(load_model(rank.cfg, path, rank.layout, policy_role(rank.cfg)))


def refusals(rank: Rank, paths: list[str]) -> list[str]:
    return [refusal(rank, path) for path in paths]


def test_files_that_do_not_fit_are_refused(tmp_path):
    problems = {
        "shape": "the weight model.norm.weight has the shape [31], and config.json describes [32]; the two belong to",
        "header": "its model.safetensors cannot be used (",
    }
    paths = [tmp_path / name for name in problems]
    for path in paths:
        build_tiny(SIZE, str(path))
    weights = load_file(paths[0] / "model.safetensors")
    save_file(
        {**weights, "model.norm.weight": torch.ones(31)}, paths[0] / "model.safetensors", metadata={"format": "pt"}
    )
    (paths[1] / "model.safetensors").write_bytes(b"12345678")
    (sentences,) = run_ranks(1, refusals, [str(path) for path in paths], cfg=Config())
    for path, sentence, problem in zip(paths, sentences, problems.values(), strict=True):
        assert sentence.startswith(f"model.path={path}: {problem}")


NOISY = {
    "a function": SeedOssConfig(**SHAPE, residual_dropout=0.5, attention_dropout=0.5),
    "a number of the module": OPTConfig(
        vocab_size=48,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        dropout=0.5,
        layerdrop=0.5,
    ),
    "two names": Starcoder2Config(**SHAPE, residual_dropout=0.5, embedding_dropout=0.5),
    "random experts": PhimoeConfig(**SHAPE, num_local_experts=4, router_jitter_noise=0.2, input_jitter_noise=0.5),
    "jitter": MixtralConfig(**SHAPE, num_local_experts=4, router_jitter_noise=0.5),
    "modules": GPT2Config(
        vocab_size=48, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5
    ),
}


@table("name", NOISY)
def test_log_probs_are_free_of_noise_and_equal_those_of_the_class(name):
    """Old and new log-probs of the same weights must be equal, also where training mode means random experts."""
    config = NOISY[name]
    before = config.to_dict()
    lm, _ = empty_module(Config(), config, {"cp": 1, "tp": 1}, policy_role(Config()))
    assert config.to_dict() == before, "the config of the files is not changed"
    plain = random_model(config, "eager").eval()
    lm.load_state_dict(plain.state_dict(), assign=True)
    lm.tie_weights()
    ids = torch.arange(12)[None] + 2
    found, again = (token_logprobs(lm, ids, Packing([12], "cpu")) for _ in range(2))
    expected = plain(ids, use_cache=False).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    assert torch.equal(found, again)
    torch.testing.assert_close(found[:, 1:], expected, atol=1e-5, rtol=1e-5)


def test_recurrent_layers_and_foreign_code_keep_training_mode():
    """The ones choose kernels with gradients by it. The others may compute without gradients in `eval()`."""
    lm = random_model(
        Mamba2Config(vocab_size=32, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16), "eager"
    )
    _leave_training_mode(lm)
    assert lm.training
    own = type("Own", (LlamaForCausalLM,), {"__module__": "transformers_modules.own"})(LlamaConfig(**SHAPE))
    _leave_training_mode(own)
    assert own.training


Weights = dict[str, torch.Tensor]


def write(path: Path, weights: Weights, name: str = "model.safetensors") -> None:
    save_file(weights, path / name, metadata={"format": "pt"})


def write_shards(path: Path, weights: Weights, more: Weights | None = None) -> None:
    """Write two shards and their index. `more`: tensors that the second shard has, too."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    half = len(weights) // 2
    shards = [dict(list(weights.items())[:half]), dict(list(weights.items())[half:])]
    for name, tensors in zip(names, (shards[0], shards[1] | (more or {})), strict=True):
        write(path, tensors, name)
    index = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def make_own_head(path: Path, weights: Weights) -> None:
    write(path, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1})


def make_same_head(path: Path, weights: Weights) -> None:
    write(path, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()})


def make_head_alone(path: Path, weights: Weights) -> None:
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    write(path, weights)


def make_names_of_the_backbone(path: Path, weights: Weights) -> None:
    write(path, {name.removeprefix("model."): tensor for name, tensor in weights.items()})


def make_old_file_beside_shards(path: Path, weights: Weights) -> None:
    write_shards(path, {name: tensor + 1 for name, tensor in weights.items()})


def make_shards_beside_another_file(path: Path, weights: Weights) -> None:
    (path / "model.safetensors").rename(path / "old.safetensors")
    write_shards(path, {name: tensor + 1 for name, tensor in weights.items()})


def make_prefix(path: Path, weights: Weights) -> None:
    write(path, {f"_orig_mod.{name}": tensor for name, tensor in weights.items()})


def make_one_missing(path: Path, weights: Weights) -> None:
    weights.pop("model.norm.weight")
    write(path, weights)


def make_no_head(path: Path, weights: Weights) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))


def make_tensor_in_two_shards(path: Path, weights: Weights) -> None:
    (path / "model.safetensors").unlink()
    first = next(iter(weights))
    write_shards(path, weights, {first: weights[first] + 1})


def make_own_head_in_another_format(path: Path, weights: Weights) -> None:
    (path / "model.safetensors").unlink()
    torch.save({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1}, path / "pytorch_model.bin")


LOADED = [
    make_own_head,
    make_same_head,
    make_head_alone,
    make_names_of_the_backbone,
    make_old_file_beside_shards,
    make_shards_beside_another_file,
]
REFUSED = {
    make_prefix: "its files lack the weight model.embed_tokens.weight and 12 more; they have "
    "_orig_mod.model.embed_tokens.weight, which is no weight of Qwen3ForCausalLM",
    make_one_missing: "its files lack the weight model.norm.weight",
    make_no_head: "its files lack the weight lm_head.weight",
    make_tensor_in_two_shards: "its model-00001-of-00002.safetensors and model-00002-of-00002.safetensors both "
    "hold model.embed_tokens.weight; remove one of them",
    make_own_head_in_another_format: "its files have a lm_head.weight that differs from model.embed_tokens.weight, "
    "although its config.json ties the two; set tie_word_embeddings to false there",
}


def load_each(rank: Rank, paths: list[str]) -> list[Weights | str]:
    """Return the state of the model in each directory, or why it is refused."""
    results: list[Weights | str] = []
    for path in paths:
        try:
            module = load_model(rank.cfg, path, rank.layout, policy_role(rank.cfg))
            results.append({name: tensor.full_tensor() for name, tensor in module.state_dict().items()})
        except UserError as error:
            results.append(str(error))
    return results


def test_a_directory_is_read_as_transformers_reads_it_or_refused(tmp_path):
    paths = [tmp_path / make.__name__ for make in (*LOADED, *REFUSED)]
    for make, path in zip((*LOADED, *REFUSED), paths, strict=True):
        build_tiny(SIZE, str(path))
        make(path, load_file(path / "model.safetensors"))
    (results,) = run_ranks(1, load_each, [str(path) for path in paths], cfg=Config())
    for path, result in zip(paths, results[: len(LOADED)], strict=False):
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        assert isinstance(result, dict) and set(result) == set(expected), (path.name, result)
        assert [name for name in result if not torch.equal(result[name], expected[name])] == [], path.name
    for path, result, problem in zip(paths[len(LOADED) :], results[len(LOADED) :], REFUSED.values(), strict=True):
        assert result == f"model.path={path}: {problem}"


def test_a_critic_needs_no_head_of_a_language_model(path):
    make_no_head(path, {})
    make_names_of_the_backbone(path, load_file(path / "model.safetensors"))
    (found,) = run_ranks(1, load_critic, str(path), cfg=Config())
    assert not found.pop("value_head.weight").any()
    for name, tensor in load_file(path / "model.safetensors").items():
        assert torch.equal(found.pop(f"model.{name}"), tensor)
    assert not found


def load_critic(rank: Rank, path: str) -> Weights:
    return full(load_model(rank.cfg, path, rank.layout, critic_role(rank.cfg)))


def test_a_run_as_a_model_leads_to_its_newest_export(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints/global_step_10").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no config.json, .* it is a run: trainer checkpoint export .*run DIRECTORY "):
        resolve_model_path(str(run))
    for step in (9, 10):
        (run / f"exports/global_step_{step}/policy").mkdir(parents=True)
        (run / f"exports/global_step_{step}/policy/config.json").write_text("{}")
    with pytest.raises(UserError, match="; .*/exports/global_step_10/policy has one$"):
        resolve_model_path(str(run))
