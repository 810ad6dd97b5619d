"""A language model's backbone with a value head."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CriticModel(nn.Module):
    """Values of the states of a sequence.

    The backbone sits under the name it has in the causal LM (`model` for most), so that its parameters
    are called what the safetensors files call them.
    """

    def __init__(self, backbone: nn.Module, prefix: str):
        super().__init__()
        self._prefix = prefix
        setattr(self, prefix, backbone)
        self.value_head = nn.Linear(backbone.config.hidden_size, 1, bias=False)

    @property
    def config(self):
        return getattr(self, self._prefix).config

    def gradient_checkpointing_enable(self, options: dict) -> None:
        getattr(self, self._prefix).gradient_checkpointing_enable(options)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Values `(B, T)` for `input_ids (B, T)`: entry t is the value of the state before token t (0 at t = 0)."""
        hidden = getattr(self, self._prefix)(input_ids=input_ids, use_cache=False).last_hidden_state
        values = self.value_head(hidden[:, :-1]).squeeze(-1).float()
        return torch.nn.functional.pad(values, (1, 0))
