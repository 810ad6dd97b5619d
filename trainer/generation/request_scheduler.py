"""Which engine generates which requests, and when."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from trainer.generation.engine import Request, Sampling


class RequestScheduler:
    """Shares out requests over engines. Each piece goes to the engine that has the least left to do.

    Args:
        engines: number of engines.
        capacity: most requests that an engine has at a time, unless one piece is larger. None: no limit.
    """

    def __init__(self, engines: int, capacity: int | None):
        self._capacity = capacity
        self._waiting: deque[list[int]] = deque()
        self._planned: list[deque[list[int]]] = [deque() for _ in range(engines)]
        self._costs: dict[int, float] = {}
        self._given: list[list[list[int]]] = [[] for _ in range(engines)]  # pieces that an engine has begun
        self._held: list[set[int]] = [set() for _ in range(engines)]

    def add(self, pieces: Iterable[list[int]], costs: Mapping[int, float], planned: Collection[int] = ()) -> None:
        """Add requests, after those that are there.

        Args:
            pieces: the numbers of requests that one engine generates together; the most expensive ones first.
            costs: of each request, by its number.
            planned: the engines that share the pieces by a plan, whoever is done first. Pieces of one that is lost go
                to any. Empty: all pieces do.
        """
        self._costs.update(costs)
        if not planned:
            self._waiting.extend(pieces)
            return
        engines = sorted(planned)
        loads = {engine: self._load(engine) + sum(map(self._cost, self._planned[engine])) for engine in engines}
        for piece in pieces:
            engine = min(engines, key=lambda engine: loads[engine])
            loads[engine] += self._cost(piece)
            self._planned[engine].append(piece)

    def forget(self, requests: Collection[int]) -> None:
        """Drop waiting requests whose stream is closed. An engine that has begun them completes them."""
        for pieces in (self._waiting, *self._planned, *self._given):
            left = [[number for number in piece if number not in requests] for piece in pieces]
            pieces.clear()
            pieces.extend(piece for piece in left if piece)

    def clear(self) -> None:
        """Forget all requests. The engines have dropped them."""
        for numbers in (self._waiting, self._costs, *self._planned, *self._given, *self._held):
            numbers.clear()

    @property
    def is_waiting(self) -> bool:
        """Whether some requests have not been given to an engine."""
        return bool(self._waiting) or any(self._planned)

    def assign(self, engines: Iterable[int]) -> dict[int, list[int]]:
        """Return the requests that `engines` get now. Engines that get nothing are left out."""
        given: dict[int, list[int]] = {}
        able = list(engines)
        for engine in able:
            while self._planned[engine] and self._fits(engine, self._planned[engine][0]):
                self._give(engine, self._planned[engine].popleft(), given)
        while self._waiting:
            able = [engine for engine in able if self._fits(engine, self._waiting[0])]
            if not able:
                break
            engine = min(able, key=self._load)
            self._give(engine, self._waiting.popleft(), given)
        return given

    def takers(self, engines: Iterable[int]) -> list[int]:
        """Return those of `engines` that could take requests which wait."""

        def can_take(engine: int) -> bool:
            first = [*itertools.islice(self._planned[engine], 1), *itertools.islice(self._waiting, 1)]
            return any(self._fits(engine, piece) for piece in first)

        return [engine for engine in engines if can_take(engine)]

    def mark_done(self, engine: int, requests: Iterable[int]) -> None:
        """Note that an engine has generated `requests`."""
        done = self._held[engine].intersection(requests)
        self._held[engine] -= done
        for number in done:
            del self._costs[number]
        if len(self._given[engine]) > 2 * len(self._held[engine]):  # an engine may be busy without end
            self._given[engine] = [piece for piece in self._given[engine] if not self._held[engine].isdisjoint(piece)]

    def has_work(self, engine: int) -> bool:
        """Return whether an engine has requests that it has not generated."""
        return bool(self._held[engine])

    def count(self, engine: int) -> int:
        """Return the number of these requests."""
        return len(self._held[engine])

    def requeue(self, engine: int) -> None:
        """Take the requests that a lost engine has not completed back, to give them to others."""
        left = [[i for i in piece if i in self._held[engine]] for piece in self._given[engine]]
        self._waiting.extendleft(reversed([*(piece for piece in left if piece), *self._planned[engine]]))
        self._planned[engine].clear()
        self._given[engine], self._held[engine] = [], set()

    def replan(self, engines: Collection[int]) -> None:
        """Let any engine take what was planned for others than `engines`: these are lost."""
        for engine, pieces in enumerate(self._planned):
            if pieces and engine not in engines:
                self._waiting.extend(pieces)
                pieces.clear()

    def _give(self, engine: int, piece: list[int], given: dict[int, list[int]]) -> None:
        given.setdefault(engine, []).extend(piece)
        self._given[engine].append(piece)
        self._held[engine].update(piece)

    def _cost(self, piece: Iterable[int]) -> float:
        return math.fsum(self._costs[number] for number in piece)  # whatever their order

    def _load(self, engine: int) -> float:
        return self._cost(self._held[engine])

    def _fits(self, engine: int, piece: Sequence[int]) -> bool:
        held = len(self._held[engine])
        return self._capacity is None or held == 0 or held + len(piece) <= self._capacity


def capacity_of(engines: int, most: int, streaming: bool, device: str, deterministic: bool) -> int | None:
    """Return the most requests that an engine has at a time, unless one piece is larger. None: no limit.

    Args:
        engines: number of engines.
        most: requests that an engine can generate together (`rollout.max_num_seqs`).
        streaming: the engines take further requests while they generate. If not, they get one batch at a time.
        device: of the engines.
        deterministic: time does not decide which requests run together.
    """
    if not streaming:
        return 0
    # On CPU, runs are exact to the last bit in any case: an engine gets all of its requests in one call.
    return most if device == "cuda" and engines > 1 and not deterministic else None


def request_costs(requests: Sequence[Request]) -> list[float]:
    """Return the most tokens that each request can take. A prompt counts once for all its completions."""
    counts: dict[bytes, int] = {}
    for request in requests:
        prompt = request.prompt_token_ids.tobytes()
        counts[prompt] = counts.get(prompt, 0) + 1
    return [r.sampling.max_tokens + len(r.prompt_token_ids) / counts[r.prompt_token_ids.tobytes()] for r in requests]


def by_prompt(requests: Sequence[Request], most: int | None = None) -> list[list[int]]:
    """Return the indices of the requests, those of one prompt together: an engine computes the prompt once.

    The most expensive prompts come first.

    Args:
        most: longest piece; a prompt with more completions is cut.
    """
    prompts: dict[bytes, list[int]] = {}
    for i, request in enumerate(requests):
        prompts.setdefault(request.prompt_token_ids.tobytes(), []).append(i)

    def cost(rows: list[int]) -> int:
        return len(requests[rows[0]].prompt_token_ids) + sum(requests[row].sampling.max_tokens for row in rows)

    longest_first = sorted(prompts.values(), key=lambda rows: (-cost(rows), rows[0]))
    size = most or max(1, len(requests))
    return [rows[start : start + size] for rows in longest_first for start in range(0, len(rows), size)]


def with_some_of(pieces: Iterable[list[int]], wanted: Collection[int]) -> list[list[int]]:
    """Return the pieces that hold a wanted request: whole, because company can change the last bits of log-probs."""
    return [piece for piece in pieces if any(request in wanted for request in piece)]


def by_length(requests: Sequence[Request], engines: int, most: int) -> list[list[int]]:
    """Return batches of at most `most` requests with one sampling and prompts of similar length, the longest first.

    There are as many batches for each of `engines`, and of the same size as far as possible. Which requests share a
    batch does not depend on how fast the engines are, because it can change the last bits of log-probs.
    """
    alike: dict[Sampling, list[int]] = {}
    for i, request in enumerate(requests):
        alike.setdefault(request.sampling, []).append(i)
    batches: list[list[int]] = []
    for indices in alike.values():
        order = sorted(indices, key=lambda i: len(requests[i].prompt_token_ids))
        rounds = -(-len(order) // (engines * most))
        size = -(-len(order) // (engines * rounds))
        batches += [order[start : start + size] for start in range(0, len(order), size)][::-1]
    return batches
