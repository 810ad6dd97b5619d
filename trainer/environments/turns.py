"""The turns of an episode: which of them the journal has, and what it gets."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import xxhash

from trainer.environments.base import StepResult
from trainer.generation.engine import Completion, Request
from trainer.journal.turns import TurnRecord


class EpisodeTurns:
    """The replies and the answers of one episode, by turn. They are recorded as they end.

    A recorded reply is used for the same turn after the same prompt. A new environment answers the recorded replies
    again: if an answer differs from the recorded one, the replies behind it are dropped, because they answer something
    else. An attempt of an episode that failed within this process leaves its replies to the next one.

    Args:
        key: of the episode; the same after a kill.
        found: what the journal has, the oldest first.
        add: records a turn.
        is_valid: waits until it is known whether the weights that sampled a turn are weights of this run. None: they
            are.
    """

    def __init__(
        self,
        key: str = "",
        found: Sequence[TurnRecord] = (),
        add: Callable[[TurnRecord], None] = lambda turn: None,
        is_valid: Callable[[TurnRecord], Awaitable[bool]] | None = None,
    ):
        self.key = key
        self._add, self._is_valid = add, is_valid
        self._found: dict[str, list[TurnRecord]] = {}
        for record in found:
            self._found.setdefault(record.name, []).append(record)
        self._completions: dict[str, Completion] = {}
        """Those of this process, and the recorded ones that were used."""
        self.sampled = self.recorded = self.dropped = 0
        """Replies that the engines have given, that the journal had, and that it had for another course of events."""
        self.diverged = ""
        """Names the first turn in which the episode took another course than before the kill."""

    async def find(self, name: str) -> Completion | None:
        """Return the reply that was recorded for a request (see `reply_name`); None: it must be sampled."""
        if name in self._completions:
            return self._completions[name]
        for record in reversed(self._found.pop(name, [])):
            if self._is_valid is None or await self._is_valid(record):
                about = record.about
                spans = tuple((version, count) for version, count in about["spans"])
                versions = (about["versions"][0], about["versions"][1])
                self._completions[name] = Completion(
                    record.token_ids, record.logprobs, about["finish"], versions, spans
                )
                self.recorded += 1
                return self._completions[name]
        return None

    def add_reply(self, name: str, completion: Completion, is_company: bool = False) -> None:
        """Record a reply that was sampled now (`is_company`: see `TurnRecord`)."""
        self._completions[name] = completion
        self.sampled += 1
        if self._found:  # the answers may be to another reply
            self._found = {one: of for one, of in self._found.items() if not one.startswith(_ANSWER)}
        if self._found:
            self.diverged = self.diverged or name.rsplit(" ", 2)[0]
        about = {
            "finish": completion.finish_reason,
            "versions": completion.weight_versions,
            "spans": completion.version_spans,
        }
        self._add(TurnRecord(self.key, name, about, completion.token_ids, completion.logprobs, is_company=is_company))

    def recorded_answer(self, number: int) -> tuple[StepResult, str | None] | None:
        """Return what the journal has as an answer of the environment, and as its state after it; None: no answer."""
        record = self._found.get(f"{_ANSWER}{number}", [None])[-1]
        if record is None:
            return None
        fields = {name: value for name, value in record.about.items() if name != "state"}
        return StepResult(**fields), record.about["state"]

    def add_answer(self, number: int, answer: StepResult, state: str | None) -> None:
        """Record an answer of the environment, or compare it with the recorded one.

        Args:
            number: of the call that it answers: 0 for the first messages, then that of the reply, from 1 on.
            state: what the environment has saved after it.
        """
        name, fields = f"{_ANSWER}{number}", {"state": state}
        fields |= {key: value for key, value in vars(answer).items() if value != _USUAL[key]}
        recorded = self._found.pop(name, [None])[-1]
        if recorded is not None:
            if {**recorded.about, "state": None} == {**json.loads(json.dumps(fields)), "state": None}:
                return
            self.diverged = self.diverged or str(number)
            self._drop()
        self._add(TurnRecord(self.key, name, fields))

    def end(self) -> None:
        """Drop the recorded replies that nobody has asked for."""
        if self._found:
            self.diverged = self.diverged or "the last"
        self._drop()
        self._completions.clear()

    def _drop(self) -> None:
        self.dropped += sum(not name.startswith(_ANSWER) for name in self._found)
        self._found.clear()


_ANSWER = "answer "
_USUAL = vars(StepResult())  # what an answer is where its record does not say it


def reply_name(turn: str, request: Request) -> str:
    """Return the name of the reply to a request within its episode: that of the turn, and what else decides it."""
    prompt: Any = request.prompt_token_ids.data
    return f"{turn} {xxhash.xxh3_128_hexdigest(prompt)} {request.sampling.max_tokens}"
