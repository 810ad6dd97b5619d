"""Texts that are far too long are not tokenised, and all others as ever."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import DataConfig, SFTConfig
from trainer.data import examples, tokens
from trainer.data.datasets import load_prompts
from trainer.data.examples import Stops
from trainer.errors import UserError

LONG = "x" * 5_000_000


class NeverLong:
    """A tokenizer that must not get long texts."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.is_fast = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        assert len(text) < 200_000
        return self._tokenizer.encode(text, **options)

    def __call__(self, text: str, **options: Any) -> Any:
        assert len(text) < 200_000
        return self._tokenizer(text, **options)


def test_no_text_with_so_few_tokens_has_more_characters(tokenizer):
    longest = tokens._longest_token(tokenizer)
    assert longest == len("<|assistant|>")

    @given(
        st.lists(st.sampled_from(["<|assistant|>", "<|end|>", "a", "é", "\U0001f600", " "])).map("".join) | st.text()
    )
    def check(text: str) -> None:
        assert len(text) <= longest * len(tokenizer.encode(text, add_special_tokens=False))

    check()
    assert tokens.max_characters(tokenizer, 10_000) == 130_000
    assert tokens.max_characters(tokenizer, 1) == 65_536, "a tokenizer may leave characters out of a short text"


def test_a_prompt_that_is_far_too_long_is_dropped_without_tokenising_it(tokenizer, tmp_path):
    file = tmp_path / "train.jsonl"
    rows = [{"prompt": LONG, "answer": "1"}, {"prompt": "2", "answer": LONG}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(train_files=[str(file)])
    found = load_prompts(data, "train", NeverLong(tokenizer), 100)
    assert (len(found.prompts), found.dropped, found.prompts[0].index) == (1, 1, 1)
    data.train_size = 1
    with pytest.raises(UserError, match="all 1 train prompts are longer; the shortest has more than 65,536 characters"):
        load_prompts(data, "train", NeverLong(tokenizer), 100)


@pytest.mark.parametrize("example", [{"prompt": LONG, "answer": "1"}, {"prompt": "2", "answer": LONG}])
def test_only_the_beginning_of_a_long_example_is_tokenised(tokenizer, example):
    sft, stops = SFTConfig(max_length=200), Stops(tokenizer, [tokenizer.eos_token_id])
    [cut] = examples.encode(example, NeverLong(tokenizer), None, sft, stops)
    short = {key: value[:1000] for key, value in example.items()}
    [whole] = examples.encode(short, tokenizer, None, sft, stops)
    assert cut.token_ids.tolist() == whole.token_ids.tolist() and len(cut.token_ids) == 200
    assert cut.mask.tolist() == whole.mask.tolist()


class Begins:
    """A tokenizer that writes the start of a text whatever it is asked, as some that are not fast do."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.bos_token, self.bos_token_id = "<|pad|>", tokenizer.convert_tokens_to_ids("<|pad|>")

    def encode(self, text: str, **options: Any) -> list[int]:
        return [self.bos_token_id, *self._tokenizer.encode(text, **options)]


@pytest.mark.parametrize("text", ["<|pad|>ab", "ab", "<|pad|><|pad|>ab"])
def test_the_start_of_a_text_stands_once(tokenizer, text):
    """If template and tokenizer both write it. A text that says it twice keeps both."""
    encoded = tokens.encode(Begins(tokenizer), text, 99)
    expected = text if text.startswith("<|pad|>") else f"<|pad|>{text}"
    more = "<|pad|>" if text.count("<|pad|>") == 2 else ""
    assert tokenizer.decode(encoded) == more + expected
