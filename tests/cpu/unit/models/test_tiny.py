"""The embedded model: what goes in comes out, the same every time, as Hugging Face's classes see it."""

from __future__ import annotations

import dataclasses
import filecmp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tables import table
from trainer.models.tiny import CHAT_TEMPLATE, TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer

SMALL = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("tiny"))
    build_tiny(SMALL, path)
    return path


@pytest.fixture(scope="module")
def tokenizer(path):
    return load_tokenizer(path)


@settings(deadline=None)  # the machine may be busy
@given(text=st.text())
def test_any_text_survives_encoding_and_decoding(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    if "<|" not in text:
        assert len(ids) == len(text.encode())  # one token a byte
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


@table("text", [" a", "a  b\n\n", "a , b .", "日本語 😀", "\x00\ufeff\u200b", "e\u0301 vs é", "'s don't"])
def test_unusual_text_survives_encoding_and_decoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_chat_template_and_special_tokens(tokenizer):
    chat = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    expected = "<|system|> s <|user|> u <|assistant|> a <|end|> <|user|> u <|assistant|>"
    assert tokenizer.convert_ids_to_tokens(ids) == expected.split()
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token == "<|pad|>"
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_weights_depend_only_on_config_and_seed(path, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_tiny(SMALL, str(tmp_path / "same"))
    assert torch.equal(torch.rand(3), expected)  # the caller's random state is left alone
    build_tiny(dataclasses.replace(SMALL, seed=2), str(tmp_path / "other"))
    files = ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
             "chat_template.jinja"]  # fmt: skip
    assert filecmp.cmpfiles(path, tmp_path / "same", files, shallow=False)[0] == files
    assert not filecmp.cmp(f"{path}/model.safetensors", tmp_path / "other" / "model.safetensors", shallow=False)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_built_in_model(tmp_path, tied):
    config = TinyShape(**{**vars(SMALL), "tie_word_embeddings": tied, "max_position_embeddings": 128})
    build_tiny(config, str(tmp_path))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.dtype == torch.float32
    assert model.config.vocab_size % 64 == 0 and model.config.vocab_size >= len(tokenizer)
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 128
    for saved in (model.config, model.generation_config):
        assert saved.eos_token_id == tokenizer.eos_token_id
        assert saved.pad_token_id == tokenizer.pad_token_id
        assert saved.bos_token_id is None
    ids = torch.tensor([tokenizer.encode("ab", add_special_tokens=False)])
    generated = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert 3 <= generated.shape[1] <= 6
