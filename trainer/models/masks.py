"""Ask a model which tokens each of its blocks sees, by the masks that its own code asks transformers for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.parallel.shard import transformer_blocks

_RECORDED = "recorded_mask"
_FIRST, _SECOND = 2, 3
"""Lengths of the sequences of the packed row."""
_FAR = 1 << 24
"""A distance between tokens that is longer than any window."""


@dataclass(frozen=True)
class Visible:
    """Which tokens of its row a token of one block sees."""

    is_causal: bool
    """It sees all tokens before it, in its sequence and within `window`, and no others."""
    window: int | None
    """The number of tokens that it sees, itself included. None: all before it."""
    separates: bool
    """It sees none of another sequence of a packed row, whose positions start again."""


class _Mask:
    """Stands for a mask that was asked for."""

    def __init__(self, mask_function: Callable[..., Any], local_size: int | None):
        self._function = mask_function
        self._window = local_size

    def sees(self, query: int, key: int) -> bool:
        return bool(self._function(*(torch.tensor(index) for index in (0, 0, query, key))))

    def shape(self) -> tuple[bool, int | None]:
        """Return `Visible.is_causal` and `Visible.window`."""
        is_causal = self.sees(1, 1) and not self.sees(0, 1)
        if self.sees(_FAR, 0):
            return is_causal, None
        window = self._window
        is_plain = window is not None and not self.sees(window, 0) and (window == 1 or self.sees(window, 1))
        return is_causal and is_plain, window


def visible_tokens(lm: PreTrainedModel) -> list[Visible] | None:
    """Return what a token of each block of `lm` sees. Its parameters may be on the meta device.

    Returns:
        None if the model does not tell: it builds no masks, or hands them to its blocks in its own way.
    """
    packed = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])
    try:
        alone, together = _masks(lm, torch.arange(_FIRST + _SECOND)), _masks(lm, packed)
        return [
            Visible(*mask.shape(), not of_packed.sees(_FIRST + 1, _FIRST - 1))
            for mask, of_packed in zip(alone, together, strict=True)
        ]
    except Exception:  # the code of a model may need more than it gets here
        return None


def _masks(lm: PreTrainedModel, positions: torch.Tensor) -> list[_Mask]:
    """Return the masks that the blocks get for a row of tokens at these positions.

    Raises:
        Exception: the code of the model fails, or a block gets no mask.
    """
    blocks, found = transformer_blocks(lm), {}

    def block_of(number: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = [one for one in (*args, *kwargs.values()) if isinstance(one, _Mask)]
            if len(given) == 1:
                found[number] = given[0]
            return args[0] if args else kwargs["hidden_states"]

        return forward

    with ExitStack() as ends:
        for number, block in enumerate(blocks):
            ends.enter_context(_replaced(block, block_of(number)))
        for module in lm.modules():
            if "rotary" in type(module).__name__.lower():
                ends.enter_context(_replaced(module, lambda x, *_, **__: (x, x)))
        ends.enter_context(_recording(lm.config))
        ends.enter_context(torch.no_grad())
        ids = torch.zeros(1, len(positions), dtype=torch.long)
        lm.base_model(input_ids=ids, position_ids=positions[None], use_cache=False)
    return [found[number] for number in range(len(blocks))]


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def _recording(config: Any) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = _RECORDED
    try:
        yield
    finally:
        config._attn_implementation = before


def _record(*_: Any, mask_function: Callable[..., Any], local_size: int | None = None, **__: Any) -> Any:
    return _Mask(mask_function, local_size)


def _attend(*_: Any, **__: Any) -> Any:
    raise AssertionError("no block runs while its mask is asked for")


ALL_MASK_ATTENTION_FUNCTIONS.register(_RECORDED, _record)
ALL_ATTENTION_FUNCTIONS.register(_RECORDED, _attend)
