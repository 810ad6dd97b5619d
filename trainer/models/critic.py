"""A language model's backbone with a value head."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.models.attention import packing_arguments
from trainer.parallel.packing import Packing


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

    def forward(self, input_ids: Tensor, packing: Packing) -> Tensor:
        """Values of the states of the B sequences of `packing`.

        Args:
            input_ids: `(1, N)`.

        Returns:
            `(B, T)`, T the longest length: entry t is the value of the state before token t, and 0 at t = 0.
        """
        arguments = packing_arguments(self.config, packing)
        hidden = getattr(self, self._prefix)(input_ids=input_ids, use_cache=False, **arguments).last_hidden_state
        return packing.rows_of_next(self.value_head(hidden).squeeze(-1).float())
