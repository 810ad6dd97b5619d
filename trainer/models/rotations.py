"""How the longest sequence of a run decides a model's positions: the same way on ranks and in all engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")
"""Names of modules and buffers with a row for each position that a model knows."""
_LOWER = "lower rollout.max_prompt_tokens, rollout.max_response_tokens or environment.max_tokens (sft.max_length)"


def fit_rotations(config: PretrainedConfig, longest: int, setting: str) -> None:
    """Choose the factors of the rotations in `config` by the run's longest sequence, as vLLM does.

    transformers chooses LongRoPE's factors by the longest sequence of a batch, and stretches dynamic rotations by it:
    the log-probs of a sequence would depend on the sequences that are computed with it.

    Args:
        longest: most tokens of a sequence in the run.
        setting: what the user has set, `KEY=VALUE`.

    Raises:
        UserError: the rotations are dynamic, and the longest sequence would stretch them.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or longest
    for rotations in _by_type(getattr(text, "rope_parameters", None)):
        if rotations["rope_type"] == "longrope":
            original = rotations.get("original_max_position_embeddings")
            original = original or getattr(text, "original_max_position_embeddings", None) or positions
            for name in ("factor", "mscale") if longest > original else ():
                if f"long_{name}" in rotations:
                    rotations[f"short_{name}"] = rotations[f"long_{name}"]
        elif "dynamic" in rotations["rope_type"] and longest > positions:
            raise UserError(
                f"{setting}: its rotations are dynamic, which depend on the longest sequence of a batch beyond "
                f"{positions} tokens (max_position_embeddings), and the run has sequences of up to {longest}; {_LOWER}"
            )


def check_position_table(module: nn.Module, longest: int, setting: str) -> None:
    """Refuse a model with a table of positions that has no row for the last tokens of the longest sequence.

    Raises:
        UserError: see above.
    """
    tables = [*module.named_parameters(), *module.named_buffers()]
    for name, table in tables:
        if table.ndim == 2 and any(part in _TABLES for part in name.split(".")):
            owner = module.get_submodule(name.rpartition(".")[0])
            positions = table.shape[0] - getattr(owner, "offset", 0)
            if longest > positions:
                raise UserError(
                    f"{setting}: has a table of {positions} positions, and the run has sequences of up to {longest} "
                    f"tokens; {_LOWER}"
                )


def _by_type(rotations: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of each kind of rotations: of all layers, or of each type of layers."""
    if isinstance(rotations, dict) and "rope_type" in rotations:
        yield rotations
    elif isinstance(rotations, Mapping):
        for of_layers in rotations.values():
            yield from _by_type(of_layers)
