"""`model.*`: the model that is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.config.fields import (
    LARGEST_SEED,
    ResumeRule,
    Section,
    choice,
    number,
    open_section,
    setting,
    subsection,
)

_OTHER_MODEL = ResumeRule("never", "the saved weights belong to another model", ("weights", "optimizer"))


@dataclass
class TinyConfig(Section):
    hidden_size: int = number(128, at_least=1, resume=_OTHER_MODEL)
    """Width."""
    intermediate_size: int = number(384, at_least=1, resume=_OTHER_MODEL)
    """Width of the MLP."""
    num_layers: int = number(2, at_least=1, resume=_OTHER_MODEL)
    """Number of blocks."""
    num_heads: int = number(4, at_least=1, resume=_OTHER_MODEL)
    """Number of attention heads."""
    num_kv_heads: int = number(2, at_least=1, resume=_OTHER_MODEL)
    """Number of key and value heads."""
    head_dim: int = number(32, at_least=1, resume=_OTHER_MODEL)
    """Width of a head. vLLM's CPU attention needs a multiple of 32."""
    max_position_embeddings: int = number(4096, at_least=1, resume=_OTHER_MODEL)
    """Length of the longest sequence, in tokens."""
    tie_word_embeddings: bool = setting(True, resume=_OTHER_MODEL)
    """The output head shares the weights of the embedding."""
    # A resume compares the initial weights where a checkpoint depends on them, so the key itself is harmless.
    start_accuracy: float | None = number(0.7, above=0, at_most=1, resume="harmless")
    """The warm start ends when the model answers this share of 128 training prompts exactly, and at the latest after
    `sft.steps`: reinforcement learning needs answers to improve. null: always after `sft.steps`, as in versions
    without this key. A run that such a version began needs null to continue with a reference or adapters."""
    seed: int = number(1, at_least=0, at_most=LARGEST_SEED, resume=_OTHER_MODEL)
    """Seed of the random weights and of the order of the warm start. It is separate from `trainer.seed`, so that runs
    of several seeds start from one model."""


@dataclass
class ModelConfig(Section):
    path: str | None = setting(
        None, resume=ResumeRule("rollouts", "the saved weights belong to that model", ("weights", "optimizer"))
    )
    """Hugging Face id or directory of a causal LM. null: build the built-in Qwen3 of `model.tiny`, warm it up with
    supervised steps (see `sft`) and cache it."""
    tiny: TinyConfig = subsection(TinyConfig)
    """Shape of the built-in model."""
    cache_dir: str | None = setting(None, resume="harmless")
    """Directory of the built-in models that were built and warmed up, one directory per configuration, and of the
    verdicts on models (`check`). null: the
    environment variable TRAINER_CACHE, or `~/.cache/trainer`."""
    attn_implementation: str = choice("sdpa", ("sdpa", "eager", "flash_attention_2"), resume="rollouts")
    """Attention of the trainer's models. `sdpa`: torch's kernels, each packed sequence by itself; a class without them
    that cannot pack has its own attention, and one sequence a row. `flash_attention_2`: the package flash-attn.
    `eager`: plain matrices, whose size is the square of all tokens of a micro-batch."""
    check: str = choice("refuse", ("refuse", "accept"), resume="harmless")
    """What happens if the comparison before the first step finds that the ranks compute something else than the model's
    own class in transformers: `refuse` the run, or `accept` it. That is said at each start and in each checkpoint's
    manifest. The verdict is kept in `cache_dir`."""
    trust_remote_code: bool = setting(False, resume="rollouts")
    """Allow the model directory to run its own Python code."""
    chat_template: str | None = setting(None, resume="rollouts")
    """A Jinja file that replaces the tokenizer's chat template, or the name of one of its templates if there are
    several. null: `tool_use` for chats with tools, and `default` for the others."""
    chat_template_kwargs: dict[str, Any] = open_section(resume="rollouts")
    """Variables of the chat template. Qwen3: `{enable_thinking: false}` lets the model answer without thinking first.
    Exported models keep them in their chat template."""
    tool_format: str = choice("auto", ("auto", "hermes"), resume="rollouts")
    """How environments describe tools. `auto`: the chat template describes them, if it can and if the calls that it
    writes can be read. `hermes`, and `auto` otherwise: as text in the format of Hermes."""
