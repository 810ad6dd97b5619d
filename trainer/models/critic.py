"""A language model's backbone with a value head."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.models.attention import packing_arguments
from trainer.parallel.packing import Packing


class CriticModel(nn.Module):
    """Computes state values of sequences.

    The backbone has the same attribute name as in the causal LM (usually `model`), so that its parameters have the same
    names as in the safetensors files.

    Args:
        is_score: the value of a token is that of the state after it, as the score of a reward model; else before it.
    """

    def __init__(self, backbone: nn.Module, prefix: str, is_score: bool = False):
        super().__init__()
        self._prefix = prefix
        self._is_score = is_score
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
            `(B, T)`, with T the length of the longest sequence. Entry t is the value of the state before token t, and 0
            at t = 0; or the score of the state after token t.
        """
        arguments = packing_arguments(self.config, packing)
        ids = packing.shard(input_ids)
        hidden = getattr(self, self._prefix)(input_ids=ids, use_cache=False, **arguments).last_hidden_state
        values = packing.gather(self.value_head(hidden).squeeze(-1).float())
        return packing.rows_of(values) if self._is_score else packing.rows_of_next(values)
