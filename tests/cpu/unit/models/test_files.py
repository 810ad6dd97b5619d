"""Directories of models, as the user names them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.runs import configured
from trainer.config import ModelConfig, compose
from trainer.errors import UserError
from trainer.models.checks import check_trained_models
from trainer.models.export import config_changes
from trainer.models.files import (
    check_torchvision,
    check_trained,
    load_config,
    load_trained_config,
    resolve_model_path,
)
from trainer.models.tiny import TinyShape, build_tiny


def test_a_directory_around_a_model_is_refused_with_the_directory_of_the_model(tmp_path):
    model = tmp_path / "exports/global_step_6/policy"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    assert resolve_model_path(str(model)) == str(model)
    for wrong in (model.parent, model.parent.parent):
        with pytest.raises(UserError, match=f"^model.path={wrong}: .* no Hugging Face model; {model} has one$"):
            resolve_model_path(str(wrong))


def test_a_checkpoint_is_refused_with_the_command_that_exports_it(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=f"trainer checkpoint export {tmp_path} DIRECTORY"):
        resolve_model_path(str(tmp_path))


def test_an_adapter_beside_its_base_is_refused_because_it_would_be_left_out(tmp_path):
    """transformers applies it, with the weights that it has whole."""
    path = str(tmp_path)
    build_tiny(TinyShape(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1, head_dim=16), path)
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(path),
        peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"]),
    )
    model.base_model.model.model.norm.weight.data.fill_(3.0)
    model.save_pretrained(path)
    read = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert any(parameter.min() == 3 for parameter in read.parameters())
    for key in ("model.path", "algorithm.teacher.path"):
        with pytest.raises(UserError, match=f"^{key}={path}: has an adapter .adapter_config.json., which would not be"):
            resolve_model_path(path, key)
    with pytest.raises(UserError, match="modules_to_save: no such key; valid are trainer.policy.lora.rank"):
        compose(["trainer.policy.lora.rank=2", "trainer.policy.lora.modules_to_save=[norm]"])


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("head_dim", 0, "head_dim of its config.json must be at least 1, and is 0"),
        ("num_attention_heads", 0, "num_attention_heads of its config.json must be at least 1, and is 0"),
        ("num_key_value_heads", -1, "num_key_value_heads of its config.json must be at least 1, and is -1"),
        (
            "num_attention_heads",
            "x",
            r"its config.json cannot be used \(Validation error for field 'num_attention_heads': TypeError: "
            r"Field 'num_attention_heads' expected int, got str \(value: 'x'\)\)",
        ),
    ],
)
def test_a_wrong_field_of_a_config_json_is_named(tmp_path, field, value, problem):
    build_tiny(TinyShape(), str(tmp_path))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(UserError, match=rf"^model.path={tmp_path}: {problem}$"):
        load_config(ModelConfig(), str(tmp_path))


def rewrite(path: Path, **fields: object) -> str:
    """Write a model whose config.json has these fields, too."""
    build_tiny(TinyShape(hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16), str(path))
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return str(path)


@pytest.mark.parametrize(
    ("field", "values", "method"),
    [
        *(
            ("quantization_config", {"quant_method": method, "bits": 4}, method)
            for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors", "fp8", "mxfp4", "unheard-of")
        ),
        ("compression_config", {"format": "int-quantized"}, "compression_config"),
    ],
)
def test_a_quantised_model_is_refused_by_its_method(tmp_path, field, values, method):
    path = rewrite(tmp_path, **{field: values})
    sentence = rf"^model.path={path}: its weights are quantised \({method}\); save the model with weights of 16 bits"
    with pytest.raises(UserError, match=sentence):
        load_trained_config(ModelConfig(), path)
    load_config(ModelConfig(), path)  # engines alone can compute with it


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
def test_weights_of_8_bits_are_refused_if_the_config_does_not_say_so(tmp_path, name):
    path = rewrite(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {
        "model.rows": torch.ones(4, dtype=torch.uint8),
        "model.norm.weight": torch.ones(16, dtype=torch.bfloat16),
    }
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_trained_config(ModelConfig(), path)  # a mask has bytes, too
    weights["model.norm.weight"] = torch.ones(16).to(getattr(torch, name))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r": its weights are quantised \(model.norm.weight has the type [FIU]8.*\); "):
        load_trained_config(ModelConfig(), path)


def test_a_model_of_more_than_text_is_refused_by_its_class(tmp_path):
    text = {"model_type": "qwen3", "hidden_size": 32}
    inside = rewrite(tmp_path / "a", model_type="mistral3", architectures=["Mistral3ForAll"], text_config=text)
    parts = "Mistral3ForAll reads more than text (config.json has vision_config), and only text models can be trained; "
    with pytest.raises(UserError) as refused:
        load_trained_config(ModelConfig(), inside)
    assert str(refused.value).startswith(f"model.path={inside}: {parts}")
    beside = rewrite(tmp_path / "b", model_type="phi4_multimodal", architectures=None, num_attention_heads=2)
    with pytest.raises(UserError, match="a model of the type phi4_multimodal .*vision_config and audio_config"):
        load_trained_config(ModelConfig(), beside)


def test_each_model_that_ranks_load_is_checked_under_its_key(tmp_path):
    quantised = rewrite(tmp_path / "quantised", quantization_config={"quant_method": "awq"})
    cfg = configured(tmp_path, {"model.path": quantised, "algorithm.advantage_estimator": "gae"})
    with pytest.raises(UserError, match=f"^model.path={quantised}: its weights"):
        check_trained_models(cfg)
    cfg.model.path, cfg.trainer.critic.path = rewrite(tmp_path / "plain"), quantised
    with pytest.raises(UserError, match=f"^trainer.critic.path={quantised}: its weights"):
        check_trained_models(cfg)
    cfg.model.path = None
    with pytest.raises(UserError, match=f"^trainer.critic.path={quantised}: its weights"):
        check_trained_models(cfg)


@pytest.mark.parametrize(("change", "tied"), [(1.0, False), (0.0, True), (None, True)], ids=["own", "same", "none"])
def test_a_head_that_differs_from_the_embedding_is_not_tied_to_it(tmp_path, change, tied):
    """In what is loaded, and in what is exported."""
    path = rewrite(tmp_path / "model")
    weights = load_file(f"{path}/model.safetensors")
    if change is not None:
        head = weights["model.embed_tokens.weight"].clone()
        head[-1] += change
        save_file({**weights, "lm_head.weight": head}, f"{path}/model.safetensors", metadata={"format": "pt"})
    assert load_config(ModelConfig(), path).tie_word_embeddings is tied
    assert config_changes(ModelConfig(), path) == ({} if tied else {"tie_word_embeddings": False})


def test_a_model_that_vllm_cannot_import_without_torchvision_is_refused_by_name(tmp_path, monkeypatch):
    transformers.Qwen3_5TextConfig().save_pretrained(tmp_path)
    monkeypatch.setattr("trainer.models.files.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"^rollout.engine=vllm: vLLM's class of model.path={tmp_path} \(qwen3_5_text"):
        check_torchvision(ModelConfig(), str(tmp_path))
    monkeypatch.setattr("trainer.models.files.find_spec", lambda name: "a module")
    (tmp_path / "torchvision.py").write_text("")
    (tmp_path / "torchvision-0.dist-info").mkdir()
    (tmp_path / "torchvision-0.dist-info/METADATA").write_text(
        f"Name: torchvision\nVersion: 0+{torch.__version__[-3:]}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    check_torchvision(ModelConfig(), str(tmp_path))
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.delitem(sys.modules, "torchvision")
    importlib.invalidate_caches()
    with pytest.raises(UserError, match="^torchvision: cannot be imported with this torch .*nms does not exist"):
        check_torchvision(ModelConfig(), str(tmp_path))


def test_a_part_for_media_that_is_null_is_none():
    config = transformers.Qwen3Config(vision_config=None)
    check_trained(config, "model.path=x")
    config.vision_config = {"depth": 1}
    with pytest.raises(UserError, match="config.json has vision_config"):
        check_trained(config, "model.path=x")
