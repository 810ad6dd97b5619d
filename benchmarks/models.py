"""Models with random weights, and tokenizers that are trained on GSM8K, for benchmarks of whole jobs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer.models.tiny import ASSISTANT, CHAT_TEMPLATE, END, PAD, SYSTEM, USER

DATA = os.path.join("..", "shared", "data", "gsm8k", "train.jsonl")


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


def read_questions(file: str) -> list[dict[str, str]]:
    """Return the rows of GSM8K, a JSON Lines file with `question` and `answer`."""
    with open(file, encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]


def make_model(shape: Shape, data: str, path: str) -> int:
    """Write a Qwen3 with random weights, and a tokenizer; returns the number of parameters."""
    tokenizer = _train_tokenizer(shape.vocabulary, data)
    assert len(tokenizer) <= shape.vocabulary, len(tokenizer)
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            dtype="float32",
            **special,
        )
    )
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model.num_parameters()


def _train_tokenizer(size: int, data: str) -> PreTrainedTokenizerFast:
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
