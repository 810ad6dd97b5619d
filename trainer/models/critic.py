"""A language model's backbone with a value head."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.models.attention import packing_arguments
from trainer.parallel.packing import Packing


class CriticModel(nn.Module):
    """Computes state values of sequences.

    The backbone has the same attribute name as in the causal LM (usually `model`), so that its parameters have the same
    names as in the safetensors files.
    """

    def __init__(self, backbone: nn.Module, prefix: str):
        super().__init__()
        self._prefix = prefix
        setattr(self, prefix, backbone)
        self.value_head = nn.Linear(backbone.config.hidden_size, 1, bias=False)

    @property
    def config(self):
        return getattr(self, self._prefix).config

    def forward(self, input_ids: Tensor, packing: Packing) -> Tensor:
        """Return the values of the states of the B sequences of `packing`.

        Args:
            input_ids: `(1, N)`.

        Returns:
            `(B, T)`, with T the length of the longest sequence. Entry t is the value of the state before token t. It is
            0 at t = 0.
        """
        arguments = packing_arguments(self.config, packing)
        ids = packing.shard(input_ids)
        hidden = getattr(self, self._prefix)(input_ids=ids, use_cache=False, **arguments).last_hidden_state
        return packing.rows_of_next(packing.gather(self.value_head(hidden).squeeze(-1).float()))
