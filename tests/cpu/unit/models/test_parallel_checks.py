"""Models that cannot be split over ranks are refused before they are loaded, with the key and the reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from transformers import GPT2Config, GptOssConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from tests.support.architectures import ARCHITECTURES, SHAPE
from tests.support.tables import table
from trainer.config import TASKS, Config, ModelConfig, RoleSpec, TrainerConfig, policy_role
from trainer.config.tasks import find_task
from trainer.errors import UserError
from trainer.models.checks import check_axes, check_model_axes
from trainer.models.loading import empty_module
from trainer.models.tiny import TinyShape, build_tiny

LLAMA = ARCHITECTURES["llama"]  # 4 heads, 2 of keys and values


def config(tensor: int = 1, context: int = 1) -> Config:
    trainer = dataclasses.replace(Config().trainer, tensor_parallel_size=tensor, context_parallel_size=context)
    return dataclasses.replace(Config(), trainer=trainer)


@table(
    "cfg, model, problem",
    [
        (
            config(context=3),
            LLAMA,
            "context_parallel_size=3: must divide the number of attention heads of the model, 4",
        ),
        (
            config(tensor=2, context=4),
            LLAMA,
            "context_parallel_size=4: must divide the number of attention heads of the model on each rank of "
            "trainer.tensor_parallel_size, 2",
        ),
        (
            config(tensor=3),
            LLAMA,
            "tensor_parallel_size=3: must divide the number of attention heads of the model, 4",
        ),
        (
            config(tensor=4),
            LLAMA,
            "tensor_parallel_size=4: must divide the number of key and value heads of the model, 2",
        ),
        (
            config(tensor=2),
            LlamaConfig(vocab_size=49),
            "tensor_parallel_size=2: must divide the number of tokens in the vocabulary of the model, 49",
        ),
        (
            config(tensor=2),
            GPT2Config(),
            "tensor_parallel_size=2: models of the type gpt2 have no tensor parallel plan in transformers",
        ),
        (
            config(tensor=2),
            Qwen3MoeConfig(),
            "tensor_parallel_size=2: models of the type qwen3_moe need the parallel style moe_tp_experts, which is not "
            "supported",
        ),
    ],
)
def test_what_a_model_cannot_do_is_refused_by_its_config(cfg, model, problem):
    with pytest.raises(UserError) as raised:
        check_model_axes(cfg, model)
    assert str(raised.value) == f"trainer.{problem}"


@table("axes", [(1, 1), (2, 1), (1, 2), (1, 4), (2, 2)])
@table("name", ["llama", "qwen3"])
def test_axes_that_divide_the_heads_are_accepted(name, axes):
    check_model_axes(config(*axes), ARCHITECTURES[name])


def test_context_parallelism_needs_no_plan():
    check_model_axes(config(context=2), GPT2Config())


def test_the_policy_and_a_critic_with_a_path_of_its_own_are_checked(tmp_path):
    policy, critic = str(tmp_path / "policy"), str(tmp_path / "critic")
    build_tiny(TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=4, num_kv_heads=4), policy)
    build_tiny(TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=2), critic)
    cfg = config(context=4)
    cfg.algorithm.advantage_estimator = "gae"
    check_axes(cfg, policy)
    cfg.trainer.critic.path = critic
    with pytest.raises(UserError, match="^trainer.context_parallel_size=4: .* of the critic, 2$"):
        check_axes(cfg, policy)


def test_nothing_is_read_for_a_run_without_axes(tmp_path):
    check_axes(config(), str(tmp_path / "missing"))


def test_every_role_with_weights_of_its_own_is_checked(tmp_path, monkeypatch):
    cfg = config(tensor=4)
    policy, teacher = (write_config(tmp_path / name, heads) for name, heads in (("policy", 4), ("teacher", 2)))
    check_axes(cfg, policy)
    find_task.cache_clear()
    monkeypatch.setitem(TASKS, "rl", dataclasses.replace(TASKS["rl"], roles=lambda cfg: roles(cfg, teacher)))
    problem = "trainer.tensor_parallel_size=4: must divide the number of attention heads of the teacher, 2"
    with pytest.raises(UserError, match=f"^{problem}$"):
        check_axes(cfg, policy)
    (tmp_path / "teacher/config.json").write_text("{}")
    with pytest.raises(UserError, match="^teacher=.*/teacher: its config.json cannot be used"):
        check_axes(cfg, policy)


def roles(cfg: Config, teacher: str) -> tuple[RoleSpec, ...]:
    return policy_role(cfg), RoleSpec("teacher", path=teacher, path_key="teacher")


@pytest.fixture(autouse=True)
def tasks_are_found_anew():
    yield
    find_task.cache_clear()


def write_config(path: Path, heads: int) -> str:
    Qwen3Config(**SHAPE | {"num_attention_heads": heads, "num_key_value_heads": heads}).save_pretrained(path)
    return str(path)


def test_an_attention_that_a_model_lacks_is_refused_unless_it_is_the_default():
    """gpt_oss has eager attention alone, and packed rows. Transformers writes several sentences; the first is shown."""
    config = GptOssConfig(num_hidden_layers=1, hidden_size=64, num_local_experts=2, vocab_size=99)
    sizes, role = {"cp": 1, "tp": 1}, policy_role(Config())
    lm, _ = empty_module(Config(), config, sizes, role)
    assert lm.config._attn_implementation == "packed"
    alone, _ = empty_module(Config(trainer=TrainerConfig(pack=False)), config, sizes, role)
    assert alone.config._attn_implementation == "eager"
    with pytest.raises(UserError, match="^model.path: models of the type gpt_oss cannot be built with model.attn_impl"):
        empty_module(Config(model=ModelConfig(attn_implementation="flash_attention_2")), config, sizes, role)
