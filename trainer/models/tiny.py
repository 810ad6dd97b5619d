"""The built-in model: a small Qwen3 with random weights and a byte-level tokenizer, built without a network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer.config import TinyConfig
from trainer.config.trainer import LONGEST_OF_TINY, SEED_OF_TINY

PAD, USER, ASSISTANT, SYSTEM, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class TinyShape:
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32  # vLLM's CPU attention needs a multiple of 32
    max_position_embeddings: int = LONGEST_OF_TINY
    tie_word_embeddings: bool = True
    seed: int = SEED_OF_TINY

    @classmethod
    def of(cls, tiny: TinyConfig | TinyShape) -> TinyShape:
        """Return the shape that `model.tiny` describes: heads of 32 numbers, of which two share keys and values."""
        if isinstance(tiny, TinyShape):
            return tiny
        heads = tiny.hidden_size // 32
        kv_heads = heads if heads % 2 else heads // 2
        return cls(tiny.hidden_size, 3 * tiny.hidden_size, tiny.num_layers, heads, kv_heads)


def build_tiny(shape: TinyShape, path: str) -> None:
    """Write a Hugging Face directory with a randomly initialised Qwen3 in float32 and its tokenizer. The weights depend
    only on `shape`. The caller's random state does not change."""
    tokenizer = _byte_tokenizer(shape.max_position_embeddings)
    qwen3 = tiny_config(shape, tokenizer)
    special = {name: getattr(qwen3, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(shape.seed)  # only the CPU generator, because fork_rng restores no other
        model = Qwen3ForCausalLM(qwen3).float()
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def tiny_config(shape: TinyShape, tokenizer: PreTrainedTokenizerFast | None = None) -> Qwen3Config:
    tokenizer = tokenizer or _byte_tokenizer(shape.max_position_embeddings)
    return Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,  # a multiple of 64 suits matrix kernels and sharding
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=shape.tie_word_embeddings,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte of UTF-8, which can encode any text, and five special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in (PAD, USER, ASSISTANT, SYSTEM, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
