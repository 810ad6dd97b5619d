"""Which prompts a step trains on, and the ledger that says which it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any

import xxhash

from trainer.data.datasets import Prompt
from trainer.documents import Shape, is_count, is_number, mismatch
from trainer.errors import UserError
from trainer.keyed import permutation
from trainer.plugins import user_code

_FORMAT = 1  # of `state_dict`
_PLACE: dict[Any, Shape] = {
    "epoch": is_count,
    "position": is_count,
    "curriculum": (NoneType, {"name": str, "order": (NoneType, [is_count]), "rewards": [(is_number, NoneType)]}),
}


@dataclass(frozen=True)
class DrawnPrompt:
    """A prompt as one epoch draws it."""

    uid: str
    """`epoch:index`: its name in everything keyed."""
    prompt: Prompt


Curriculum = Callable[[Sequence[Prompt], int, Mapping[int, float]], Sequence[int]]
"""(prompts, epoch, rewards) -> places in `prompts`, in the order in which the epoch draws them, none twice; those left
out are not drawn. `rewards` has, by place, the mean reward of a prompt's completions when it was last trained on, of
steps that are committed. Called when the run comes to the epoch, and once more by a restart before that step is
committed: what it returns must depend on what it is given alone."""


def check_ledger(state: dict[str, Any], own: dict[str, Any], what: str) -> None:
    """Is `state`, of a checkpoint, a place in the data of which `own` is one?

    Args:
        what: `prompts` or `examples`.

    Raises:
        UserError: it was taken with other data or another seed, or is written in another format.
    """
    if state.get("format") != own["format"]:
        raise UserError(f"data: the checkpoint's place in the data has format {state.get('format')}, this version "
                        f"reads {own['format']}; resume with the version that wrote it")  # fmt: skip
    for name, key, meaning in (
        ("seed", "trainer.seed", f"the order of the {what}"),
        ("num_prompts", "data", f"the number of {what}"),
        ("fingerprint", "data", f"the {what}' content"),
    ):
        if state.get(name) != own.get(name):
            raise UserError(f"{key}: {meaning} is not that of the checkpoint ({name} {own.get(name)} instead of "
                            f"{state.get(name)}); resume with the data and seed of the run")  # fmt: skip


class PromptSource:
    """Prompts in epochs, each a permutation keyed by (seed, epoch), or what the curriculum makes of it.

    `take` looks ahead from the committed position and changes nothing; `commit` moves the position once
    the step that trained on the prompts is done. So a prompt in flight when a run dies comes again, and
    none is skipped or trained twice. A batch that reaches the end of an epoch goes on in the next.

    Args:
        name: of the curriculum: a run goes on with no other.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, curriculum: Curriculum | None = None, name: str = ""):
        assert prompts
        self.prompts = tuple(prompts)
        self._seed = seed
        self._curriculum = curriculum
        self._name = name
        self._epoch = 0
        self._position = 0  # prompts of this epoch that committed steps have consumed
        self._orders: dict[int, list[int]] = {}
        self._rewards: dict[int, float] = {}
        self._places = {prompt.index: place for place, prompt in enumerate(self.prompts)}

    @property
    def epoch(self) -> float:
        """Epochs trained, with the fraction of the current one."""
        return self._epoch + (self._position / len(self._order(self._epoch)) if self._position else 0)

    def take(self, count: int, skip: int = 0) -> list[DrawnPrompt]:
        """The next `count` prompts, after the `skip` next ones (which the same step has taken already)."""
        return [DrawnPrompt(f"{epoch}:{prompt.index}", prompt) for epoch, _, prompt in self._ahead(skip, skip + count)]

    def commit(self, drawn: Sequence[DrawnPrompt], rewards: Sequence[float] = ()) -> None:
        """These prompts, the last taken, have been trained on.

        Args:
            rewards: of each, the mean over its completions; for the curriculum.
        """
        assert [d.uid for d in drawn] == [d.uid for d in self.take(len(drawn))], "commit what was taken, in order"
        if drawn:
            *_, (self._epoch, last, _) = self._ahead(0, len(drawn))
            self._position = last + 1
        if self._position == len(self._order(self._epoch)):
            self._epoch, self._position = self._epoch + 1, 0
        if self._curriculum is not None:
            self._rewards |= {self._places[d.prompt.index]: r for d, r in zip(drawn, rewards, strict=True)}
        # An epoch that has begun keeps its order; those ahead may look other now.
        self._orders = {self._epoch: self._orders[self._epoch]} if self._position else {}

    def _ahead(self, begin: int, end: int) -> Iterator[tuple[int, int, Prompt]]:
        """Epoch, offset in it, and prompt of the draws `begin` to `end`, counted from the committed position."""
        epoch, offset = self._epoch, self._position + begin
        for _ in range(begin, end):
            while offset >= len(self._order(epoch)):
                epoch, offset = epoch + 1, offset - len(self._order(epoch))
            yield epoch, offset, self.prompts[self._order(epoch)[offset]]
            offset += 1

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            if self._curriculum is None:
                order = permutation(len(self.prompts), self._seed, "epoch", epoch).tolist()
            else:
                with user_code(f"data.curriculum={self._name}: failed for epoch {epoch} ({{}})"):
                    order = [int(place) for place in self._curriculum(self.prompts, epoch, dict(self._rewards))]
                if not order or len(set(order)) < len(order) or not 0 <= min(order) <= max(order) < len(self.prompts):
                    raise UserError(f"data.curriculum: for epoch {epoch} it gave {len(order)} places; it must give "
                                    f"at least one, each once, from 0 to {len(self.prompts) - 1}")  # fmt: skip
            self._orders[epoch] = order
        return self._orders[epoch]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "format": _FORMAT,
            "seed": self._seed,
            "num_prompts": len(self.prompts),
            "fingerprint": self._fingerprint,
            "epoch": self._epoch,
            "position": self._position,
        }
        if self._curriculum is not None:
            state["curriculum"] = {
                "name": self._name,
                "order": self._order(self._epoch) if self._position else None,
                "rewards": [self._rewards.get(place) for place in range(len(self.prompts))],
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            UserError: it was taken with other prompts or another seed, or is written in another format.
        """
        check_ledger(state, self.state_dict(), "prompts")
        problem = self._problem(state)
        if problem is not None:
            raise UserError(f"data: the checkpoint's place in the data is damaged ({problem}); use another checkpoint")
        saved = state.get("curriculum")
        before, now = saved and saved["name"], None if self._curriculum is None else self._name
        if before != now:
            raise UserError(f"data.curriculum={now}: the run was saved with {before}, and its place in the data means "
                            "nothing otherwise; restore the key")  # fmt: skip
        self._epoch, self._position, self._orders = state["epoch"], state["position"], {}
        if saved is not None:
            self._rewards = {place: reward for place, reward in enumerate(saved["rewards"]) if reward is not None}
            if saved["order"] is not None:
                self._orders = {self._epoch: saved["order"]}

    def _problem(self, state: dict[str, Any]) -> str | None:
        """Say why `state` cannot be a place in these prompts; None: it can."""
        problem = mismatch({"curriculum": None, **state}, _PLACE)
        if problem is not None:
            return problem
        count, saved = len(self.prompts), state.get("curriculum")
        if saved is not None and len(saved["rewards"]) != count:
            return f"curriculum.rewards has {len(saved['rewards'])} entries"
        order = range(count) if saved is None or saved["order"] is None else saved["order"]
        if not order or len(set(order)) < len(order) or max(order) >= count:
            return "curriculum.order is no order of the prompts"
        return None if state["position"] < len(order) else f"position is {state['position']}"

    @cached_property
    def _fingerprint(self) -> str:
        """Of what is trained on. Computed once: checkpoints are frequent and data sets large."""
        digest = xxhash.xxh3_128()
        for prompt in self.prompts:
            digest.update(repr((prompt.index, prompt.token_ids, prompt.answer)).encode())
        return digest.hexdigest()
