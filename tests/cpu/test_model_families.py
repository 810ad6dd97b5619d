"""The families of models that can be trained, and what docs/models.md says about the others."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Config,
    GenerationConfig,
    GptOssConfig,
    Llama4Config,
    Mistral3Config,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3Config,
)

from tests.support.architectures import SHAPE
from tests.support.forks import run_forked
from tools.model_families import MARK, read_results
from tools.tiny_families import FAMILIES
from trainer.config import ModelConfig
from trainer.errors import UserError
from trainer.models.files import load_trained_config
from trainer.models.tiny import TinyShape, build_tiny

DOC = Path(__file__).parents[2] / "docs/models.md"
IDS = torch.arange(5, 30)[None]


MEASURED = {
    "transformers": ("gpt_oss",),
    "vllm": ("qwen3_moe",),
}


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.release)])
def test_families_train_export_and_resume_as_transformers_computes_them(tmp_path, engine):
    """One family also with vLLM, whose start takes most of the time of a row: before and after a sync."""
    results = tmp_path / "rows.jsonl"
    words = [f"--engine={engine}", f"--results={results}", *MEASURED[engine]]
    done = run_forked("tools.model_families", words, DOC.parents[1], dict(os.environ), timeout=500)
    assert done.returncode == 0, (done.stdout, done.stderr, results.read_text())
    rows = read_results(results)
    assert set(rows) == set(MEASURED[engine])
    for row in rows.values():
        assert row["engine"] == engine and isinstance(row["sync"], float)
        assert row["resume"] and row["resume on 2"] and row["packs"] and row["passes"] == 0
        assert not any(str(value).startswith("refused") for name, value in row.items() if name != "tp"), row


def test_the_page_has_a_row_for_every_family():
    listed = re.findall(r"^\| `([^`]*)` \|", DOC.read_text().partition(MARK)[2], re.M)
    assert listed == sorted(FAMILIES)


def test_no_number_of_the_page_is_wrong_without_a_cause():
    rows = [line for line in DOC.read_text().splitlines() if line.startswith("| `")]
    assert not [line for line in rows if re.search(r"\*\*\d[^*]*\*\*(?! \[)|fails|differs", line)]


def run_lines(heading: str, source: Path, directory: Path, *changes: tuple[str, str]) -> None:
    """Run the Python of a section of docs/models.md on a model."""
    section = DOC.read_text().partition(f"\n### {heading}\n")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    text = re.sub(
        r"^source, directory = .*$", f"source, directory = {str(source)!r}, {str(directory)!r}", code[1], flags=re.M
    )
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    exec(text, {})


def write_tokenizer(path: Path) -> None:
    build_tiny(TinyShape(hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16), str(path / "tiny"))
    AutoTokenizer.from_pretrained(path / "tiny").save_pretrained(path)
    GenerationConfig(eos_token_id=1).save_pretrained(path)


def logits(path: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model, report = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model.eval()(input_ids=IDS).logits


def quantise(path: Path, config: PretrainedConfig) -> None:
    """Write a model whose files hold experts in MXFP4, or matrices in FP8 with a scale each."""
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    file, mxfp4 = path / "model.safetensors", config.model_type == "gpt_oss"
    weights = load_file(file)
    for name, weight in list(weights.items()):
        if mxfp4 and name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weights.pop(name).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            weights |= {
                f"{name}_blocks": blocks,
                f"{name}_scales": torch.full(blocks.shape[:-1], 122, dtype=torch.uint8),
            }
        elif not mxfp4 and name.endswith("proj.weight"):
            weights[name] = (weight / weight.abs().max() * 448).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = (weight.abs().max().float() / 448).reshape(1, 1)
    save_file(weights, file, metadata={"format": "pt"})
    values = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    if not mxfp4:
        values = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    saved = json.loads((path / "config.json").read_text()) | {"quantization_config": values}
    (path / "config.json").write_text(json.dumps(saved))


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
def test_the_lines_for_a_quantised_model_write_the_weights_that_transformers_reads(tmp_path, method):
    source, full = tmp_path / "source", tmp_path / "full"
    shape, experts = SHAPE | {"intermediate_size": 32}, {"num_local_experts": 2, "num_experts_per_tok": 1}
    quantise(source, GptOssConfig(**shape, **experts) if method == "mxfp4" else Qwen3Config(**shape))
    write_tokenizer(source)
    with pytest.raises(UserError, match=rf"^model.path={source}: its weights are quantised \({method}\); "):
        load_trained_config(ModelConfig(), str(source))
    run_lines(
        "Quantised weights",
        source,
        full,
        ("= Mxfp4Config", f"= {'Mxfp4' if method == 'mxfp4' else 'FineGrainedFP8'}Config"),
    )
    load_trained_config(ModelConfig(), str(full))
    of_full, of_source = (logits(path, torch.bfloat16) for path in (full, source))
    assert torch.equal(of_full, of_source), "without a GPU, transformers computes with the full weights"


TEXT = SHAPE | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
DEEP = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
WITH_IMAGES: dict[str, PretrainedConfig] = {
    "Gemma3ForConditionalGeneration": Gemma3Config(text_config=TEXT, vision_config=VISION | {"image_size": 28}),
    "Mistral3ForConditionalGeneration": Mistral3Config(
        text_config=SHAPE | {"model_type": "ministral3"},
        vision_config=VISION | {"model_type": "pixtral", "image_size": 28},
    ),
    "Qwen3_5ForConditionalGeneration": Qwen3_5Config(
        text_config=SHAPE | LINEAR | {"layer_types": ["linear_attention", "full_attention"]}, vision_config=DEEP
    ),
    "Llama4ForConditionalGeneration": Llama4Config(
        text_config=SHAPE | {"intermediate_size_mlp": 48, "num_local_experts": 2},
        vision_config=VISION | {"image_size": 28, "vision_output_dim": 32, "projector_input_dim": 32},
    ),
}


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_the_lines_for_a_model_of_images_and_text_write_its_text_part(tmp_path, name):
    source, text = tmp_path / "source", tmp_path / "text"
    whole: Any = AutoModelForImageTextToText.from_config(WITH_IMAGES[name], dtype=torch.float32).eval()
    whole.save_pretrained(source)
    write_tokenizer(source)
    with pytest.raises(
        UserError, match=rf"^model.path={source}: {name} reads more than text \(config.json has vision_config\)"
    ):
        load_trained_config(ModelConfig(), str(source))
    changes = []
    if name.startswith("Llama4"):
        lines = DOC.read_text().partition("text = Auto")[2].partition("AutoTokenizer.from")[0]
        changes = [("text = Auto" + lines, "whole.language_model.save_pretrained(directory)\n")]
    run_lines("Models of images and text", source, text, *changes)
    load_trained_config(ModelConfig(), str(text))
    assert torch.allclose(logits(text), whole(input_ids=IDS).logits, atol=1e-5)
    assert (text / "tokenizer.json").exists() and (text / "generation_config.json").exists()
