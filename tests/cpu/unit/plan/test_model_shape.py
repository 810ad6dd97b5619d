"""Parameters of models, and the parts of them that ranks have."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import tenacity
from huggingface_hub import constants

from trainer.config import Config, LoraConfig, RoleSpec, critic_role, policy_role
from trainer.errors import UserError
from trainer.models.tiny import TinyShape, build_tiny
from trainer.parallel.axes import AXES
from trainer.plan.model_shape import find_config, shape_of, shipped_file

ALONE = dict.fromkeys(AXES, 1)


def config(path: str | None) -> Config:
    cfg = Config()
    cfg.model.path = path
    return cfg


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496),
    ],
)
def test_shipped_models_have_their_published_sizes(path, parameters):
    shape = shape_of(config(path), policy_role(config(path)), ALONE)
    assert shape.total == shape.trained == shape.numel() == parameters


@pytest.mark.parametrize(
    ("model_type", "counts"),
    [
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}),
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96}),
    ],
)
def test_a_token_passes_through_a_few_experts(save_config, model_type, counts):
    cfg = config(save_config(model_type, **counts))
    shape = shape_of(cfg, policy_role(cfg), ALONE)
    assert shape.of_experts == 4 * 8 * 3 * 64 * 96 and shape.expert_share == 1 / 4
    assert shape.idle() == 0.75 * shape.of_experts
    assert shape.idle(2) == 0.75**2 * shape.of_experts and shape.idle(100) < 1


def test_a_model_without_experts_has_no_idle_numbers():
    shape = shape_of(config(None), policy_role(config(None)), ALONE)
    assert (shape.of_experts, shape.expert_share, shape.idle()) == (0, 1.0, 0)


def test_a_model_that_cannot_be_planned_is_refused_in_one_sentence(save_config):
    cfg = config(save_config("llama4_text"))
    with pytest.raises(
        UserError, match=r"^model\.path\S*: models of the type llama4_text cannot be (planned|built) [^\n]*$"
    ):
        shape_of(cfg, policy_role(cfg), ALONE)


def test_a_model_without_sdpa_is_planned_with_packed_rows(save_config):
    cfg = config(save_config("gpt_oss"))
    assert shape_of(cfg, policy_role(cfg), ALONE).packs
    cfg.trainer.pack = False
    assert not shape_of(cfg, policy_role(cfg), ALONE).packs


@pytest.fixture
def pauses(monkeypatch, tmp_path) -> list[float]:
    """A Hub at an address where nothing listens, an empty cache, and the pauses between attempts, in seconds."""
    pauses: list[float] = []
    monkeypatch.setattr(tenacity.nap, "time", SimpleNamespace(sleep=pauses.append))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return pauses


def test_a_hub_that_does_not_answer_is_asked_three_times_without_a_word(pauses, caplog, capfd):
    cfg = config("nobody/nothing")
    with pytest.raises(UserError, match="model.path=nobody/nothing: no such directory, and the Hub cannot be reached"):
        find_config(cfg, policy_role(cfg))
    assert pauses == [0.5, 1.0]
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_a_model_in_the_cache_needs_no_hub(pauses, tmp_path):
    snapshot = tmp_path / "models--nobody--cached/snapshots" / ("a" * 40)
    refs = tmp_path / "models--nobody--cached/refs"
    snapshot.mkdir(parents=True)
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    values = {"model_type": "qwen3", "hidden_size": 48}
    (snapshot / "config.json").write_text(json.dumps(values))
    cfg = config("nobody/cached")
    assert find_config(cfg, policy_role(cfg)).hidden_size == 48
    assert not pauses


def test_a_model_that_lacks_a_dimension_is_refused(save_config):
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        cfg = config(save_config("qwen3", **{name: 0}))
        with pytest.raises(UserError, match=f"{name} of its config.json must be at least 1"):
            shape_of(cfg, policy_role(cfg), ALONE)


@pytest.mark.parametrize("is_offline", [False, True])
def test_words_that_are_no_id_are_refused(pauses, monkeypatch, is_offline):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    cfg = config("/no/such/directory")
    with pytest.raises(UserError, match="model.path=/no/such/directory: no such directory; name a directory with"):
        find_config(cfg, policy_role(cfg))


def test_a_model_that_is_not_in_the_cache_is_refused_without_the_hub(pauses, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cfg = config("nobody/nothing")
    with pytest.raises(UserError, match="no such directory, and .*; name a directory with"):
        find_config(cfg, policy_role(cfg))
    assert not pauses


def test_a_model_is_found_by_its_usual_names():
    for path, name in (
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen2.5-1.5B-Instruct", "qwen2.5-1.5b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3.1-8b"),
        ("/models/Qwen3-0.6B-Base/", "qwen3-0.6b"),
    ):
        assert shipped_file(path).endswith(f"/{name}.json")
    assert shipped_file("nobody/nothing") is None


def test_a_directory_comes_before_a_shipped_name(tmp_path):
    path = tmp_path / "qwen3-8b"
    cfg = config(str(path))
    build_tiny(TinyShape.of(cfg.model.tiny), str(path))
    assert find_config(cfg, policy_role(cfg)).hidden_size == cfg.model.tiny.hidden_size
    assert find_config(config(None), policy_role(cfg)).vocab_size == find_config(cfg, policy_role(cfg)).vocab_size


def test_shards_of_all_ranks_are_the_model():
    cfg = config("Qwen/Qwen3-0.6B")
    shape = shape_of(cfg, policy_role(cfg), ALONE)
    assert shape.blocks == 28
    assert shape.shard(1) == shape.total
    assert shape.total / 8 <= shape.shard(8) < shape.total / 8 * 1.001
    assert sum(shape.numel(block) for block in range(-1, shape.blocks)) == shape.total


def test_tensor_parallel_ranks_have_a_part_of_each_matrix():
    cfg = config("Qwen/Qwen3-8B")
    cfg.trainer.tensor_parallel_size = 4
    shape = shape_of(cfg, policy_role(cfg), {**ALONE, "tp": 4})
    assert shape.total / 4 <= shape.numel() < shape.total / 4 * 1.001  # the norms are on all ranks
    assert shape.head_rows == 151936 // 4


def test_a_model_that_cannot_be_split_is_refused():
    cfg = config("Qwen/Qwen3-8B")
    cfg.trainer.tensor_parallel_size = 3
    with pytest.raises(UserError, match="tensor_parallel_size=3: must divide the number of attention heads"):
        shape_of(cfg, policy_role(cfg), {**ALONE, "tp": 3})


def test_only_adapters_are_trained_with_lora():
    cfg = config("Qwen/Qwen3-0.6B")
    cfg.trainer.policy.lora = LoraConfig(rank=16)
    shape = shape_of(cfg, policy_role(cfg), ALONE)
    assert 0 < shape.trained < 0.02 * shape.total
    assert shape.total - shape.trained == 596_049_920


def test_a_critic_has_a_value_head():
    cfg = config("Qwen/Qwen3-8B")
    shape = shape_of(cfg, critic_role(cfg), ALONE)
    assert shape.total == 8_190_735_360 - 151936 * 4096 + 4096 and shape.head_rows == 0


def test_another_role_may_have_another_model():
    cfg = config("Qwen/Qwen3-0.6B")
    teacher = RoleSpec("teacher", path="Qwen/Qwen3-8B", path_key="teacher")
    assert shape_of(cfg, teacher, ALONE).total == 8_190_735_360
