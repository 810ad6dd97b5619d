"""Models with random weights, and tokenizers that are trained on questions like those of GSM8K."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer.models.tiny import ASSISTANT, CHAT_TEMPLATE, END, PAD, SYSTEM, USER

_SYLLABLES = [first + last for first in "bdfgklmnprstvz" for last in ("a", "e", "i", "o", "u", "an", "el", "or")]


@dataclass(frozen=True)
class Shape:
    """A Qwen3 with tied embeddings and heads of 64 dimensions."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int


SHAPES = {
    "17M": Shape(8192, 384, 1152, 8, 6, 2),
    "100M": Shape(25600, 768, 2304, 11, 12, 4),
}

SMALL = Shape(vocabulary=1024, hidden=128, intermediate=384, layers=2, heads=2, kv_heads=1)


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the argument `--data`."""
    help_text = "train.jsonl of GSM8K (default: $GSM8K, or made-up questions of the same lengths)"
    parser.add_argument("--data", default=os.environ.get("GSM8K"), help=help_text)


def read_questions(file: str | None) -> list[dict[str, str]]:
    """Return the rows of GSM8K, a JSON Lines file with `question` and `answer`; None: made-up rows of such lengths."""
    if file is None:
        return _made_up_questions(4096)
    with open(file, encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]


def _made_up_questions(count: int) -> list[dict[str, str]]:
    """Return questions and answers of made-up words. A few words are frequent and most are rare, as in English."""
    rng = random.Random(0)
    words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(40_000)]
    weights = list(itertools.accumulate(1 / (rank + 3) for rank in range(len(words))))

    def text() -> str:
        size = min(max(int(rng.lognormvariate(4.0, 0.38)), 15), 180)
        return " ".join(rng.choices(words, cum_weights=weights, k=size))

    return [{"question": f"{text()}?", "answer": f"{text()}\n#### {rng.randint(1, 99)}"} for _ in range(count)]


def sizes_of(shape: Shape) -> dict[str, Any]:
    """Return the sizes of a Qwen3 of a shape, by the names of its config."""
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }


def make_model(shape: Shape, data: str | None, path: str) -> int:
    """Write a Qwen3 with random weights, and a tokenizer; returns the number of parameters."""
    tokenizer = _train_tokenizer(shape.vocabulary, data)
    assert len(tokenizer) <= shape.vocabulary, len(tokenizer)
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes_of(shape), dtype="float32", **special))
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model.num_parameters()


def _train_tokenizer(size: int, data: str | None) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = (f"{row['question']}\n{row['answer']}" for row in read_questions(data))
    special = [AddedToken(token, normalized=False) for token in (PAD, USER, ASSISTANT, SYSTEM, END)]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
