"""Conversations under published templates that are not stored here, as in `test_model_templates`: by the library
`renderers`, and by the templates with the published `response_template` of their tokenizers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.unit.environments import test_model_templates as same
from tests.cpu.unit.environments.test_rendering import LONG, make_tokenizer
from tests.support.published_templates import install_templates
from trainer.config import ModelConfig
from trainer.environments.rendering import find_renderer
from trainer.environments.template_tools import TemplateTools

pytestmark = pytest.mark.processes

RENDERED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_6": ("qwen3_6", "Qwen/Qwen3.6-35B-A3B", {}),
    "qwen3_8": ("qwen3_8", "Qwen/Qwen3.8-27B", {}),
    "qwen3_vl": ("qwen3_vl", "Qwen/Qwen3-VL-4B-Instruct", {}),
    "nemotron_3_nano": ("nemotron_3_nano", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {}),
    "nemotron_3_super": ("nemotron_3_super", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", {}),
    "nemotron_3_ultra": ("nemotron_3_ultra", "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", {}),
    "nemotron_3_5": ("nemotron_3_5_lightning", "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16", {}),
    "gemma4": ("gemma4", "google/gemma-4-E2B-it", {}),
    "gemma4_v5": ("gemma4_v5", "google/gemma-4-E2B-it", {}),
    "llama3_2": ("llama3_2", "meta-llama/Llama-3.2-1B-Instruct", {}),
}


NATIVE = ["llama3_1", "llama3_2", "gemma4_v5", "qwen3_8", "nemotron_3_nano", "qwen3_vl", "lfm2_2_5"]
"""Templates of tokenizers to which the package that collects them gives a `response_template`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return install_templates(tmp_path_factory.mktemp("published"))


def native_format(name: str, folder: Path) -> tuple[Any, TemplateTools]:
    """A tokenizer with the template of a model, and what reads its replies."""
    tokenizer, published = same.tokenizer_of(name, folder), make_tokenizer()
    published.chat_template = (folder / f"{name}.jinja").read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder.parents[1]))
        add_response_schema = import_module("trl.chat_template_utils").add_response_schema
        tokenizer.response_template = add_response_schema(published).response_template
    found = find_renderer(ModelConfig(path="mine/model"), tokenizer, LONG)
    assert isinstance(found, TemplateTools) and found.has_response_template
    return tokenizer, found


@pytest.fixture(scope="module", params=[*RENDERED, *(f"{name} alone" for name in NATIVE)])
def known(request, folder) -> tuple[Any, Any]:
    if request.param in RENDERED:
        return same.known_format(*RENDERED[request.param], folder)
    return native_format(request.param.removesuffix(" alone"), folder)


test_a_prompt = same.test_a_prompt_has_the_tokens_that_the_template_gives
test_a_reply = same.test_what_was_sampled_stays_and_is_followed_by_what_the_template_writes


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("deepseekv3", "deepseek-ai/DeepSeek-V3"),
        ("qwen3_6", "Qwen/Qwen3.8-27B"),
    ],
    ids=["opens a thought", "of another model"],
)
def test_a_renderer_that_writes_otherwise_is_not_used(folder, name, path):
    assert find_renderer(ModelConfig(path=path), same.tokenizer_of(name, folder), LONG) is None
