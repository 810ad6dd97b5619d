"""Which prompts a step trains on, and the ledger that says which it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from trainer.data.datasets import Prompt
from trainer.errors import UserError
from trainer.keyed import permutation

_FORMAT = 1  # of `state_dict`


@dataclass(frozen=True)
class DrawnPrompt:
    """A prompt as one epoch draws it."""

    uid: str
    """`epoch:index`: its name in everything keyed."""
    prompt: Prompt


class PromptSource:
    """Prompts in epochs, each a permutation keyed by (seed, epoch).

    `take` looks ahead from the committed position and changes nothing; `commit` moves the position once
    the step that trained on the prompts is done. So a prompt in flight when a run dies comes again, and
    none is skipped or trained twice. A batch that reaches the end of an epoch goes on in the next.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int):
        assert prompts
        self.prompts = list(prompts)
        self._seed = seed
        self._consumed = 0  # prompts of committed steps, all epochs together

    @property
    def epoch(self) -> float:
        """Epochs trained, with the fraction of the current one."""
        return self._consumed / len(self.prompts)

    def take(self, count: int, skip: int = 0) -> list[DrawnPrompt]:
        """The next `count` prompts, after the `skip` next ones (which the same step has taken already)."""
        orders: dict[int, np.ndarray] = {}
        drawn = []
        for position in range(self._consumed + skip, self._consumed + skip + count):
            epoch, offset = divmod(position, len(self.prompts))
            if epoch not in orders:
                orders[epoch] = permutation(len(self.prompts), self._seed, "epoch", epoch)
            prompt = self.prompts[orders[epoch][offset]]
            drawn.append(DrawnPrompt(f"{epoch}:{prompt.index}", prompt))
        return drawn

    def commit(self, drawn: Sequence[DrawnPrompt]) -> None:
        """These prompts, the last taken, have been trained on."""
        assert [d.uid for d in drawn] == [d.uid for d in self.take(len(drawn))], "commit what was taken, in order"
        self._consumed += len(drawn)

    def state_dict(self) -> dict[str, Any]:
        epoch, position = divmod(self._consumed, len(self.prompts))
        return {
            "format": _FORMAT,
            "seed": self._seed,
            "num_prompts": len(self.prompts),
            "fingerprint": self._fingerprint,
            "epoch": epoch,
            "position": position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            UserError: it was taken with other prompts or another seed, or is written in another format.
        """
        if state.get("format") != _FORMAT:
            raise UserError(f"data: the checkpoint's place in the data has format {state.get('format')}, this version "
                            f"reads {_FORMAT}; resume with the version that wrote it")  # fmt: skip
        own = self.state_dict()
        for name, key, what in (
            ("seed", "trainer.seed", "the order of the prompts"),
            ("num_prompts", "data", "the number of prompts"),
            ("fingerprint", "data", "the prompts' content"),
        ):
            if state[name] != own[name]:
                raise UserError(f"{key}: {what} is not that of the checkpoint ({name} {own[name]} instead of "
                                f"{state[name]}); resume with the data and seed of the run")  # fmt: skip
        self._consumed = state["epoch"] * len(self.prompts) + state["position"]

    @cached_property
    def _fingerprint(self) -> str:
        """Of what is trained on. Computed once: checkpoints are frequent and data sets large."""
        digest = xxhash.xxh3_128()
        for prompt in self.prompts:
            digest.update(repr((prompt.index, prompt.token_ids, prompt.answer)).encode())
        return digest.hexdigest()
