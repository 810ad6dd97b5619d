"""Conversations under published templates that are not stored here, with the published `response_template`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.unit.environments import test_template_tools as same
from tests.support.published_templates import install_templates
from tests.support.tool_templates import make_tokenizer, tokenizer_of
from trainer.config import ModelConfig
from trainer.environments.template_tools import TemplateTools, find_reader

pytestmark = pytest.mark.processes

NATIVE = ["llama3_1", "llama3_2", "gemma4_v5", "qwen3_8", "nemotron_3_nano", "qwen3_vl", "lfm2_2_5"]
"""Templates of tokenizers to which the package that collects them gives a `response_template`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return install_templates(tmp_path_factory.mktemp("published"))


def native_format(name: str, folder: Path) -> tuple[Any, TemplateTools]:
    """A tokenizer with the template of a model, and what reads its replies."""
    tokenizer, published = tokenizer_of(name, folder), make_tokenizer()
    published.chat_template = (folder / f"{name}.jinja").read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder.parents[1]))
        add_response_schema = import_module("trl.chat_template_utils").add_response_schema
        tokenizer.response_template = add_response_schema(published).response_template
    found = find_reader(ModelConfig(path="mine/model"), tokenizer)
    assert isinstance(found, TemplateTools) and found.has_response_template
    return tokenizer, found


@pytest.fixture(scope="module", params=NATIVE)
def known(request, folder) -> tuple[Any, Any]:
    return native_format(request.param, folder)


test_a_prompt = same.test_a_prompt_has_the_tokens_that_the_template_gives
test_a_reply = same.test_what_was_sampled_stays_and_is_followed_by_what_the_template_writes
