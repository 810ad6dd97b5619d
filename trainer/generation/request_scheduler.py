"""Which engine generates which requests, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from trainer.generation.engine import Request


class RequestScheduler:
    """Shares out requests over engines. Each piece goes to the engine that has the least left to do.

    Args:
        pieces: requests, by their place, that one engine generates together; the most expensive ones first.
        costs: of one request, by its place.
        engines: number of engines.
        capacity: most requests that an engine has at a time, unless one piece is larger. None: no limit.
        planned: the engines that share the pieces by a plan, whoever is done first. Pieces of one that is lost go to
            any. Empty: all pieces do.
    """

    def __init__(
        self,
        pieces: Iterable[list[int]],
        costs: Sequence[float],
        engines: int,
        capacity: int | None,
        planned: Collection[int] = (),
    ):
        self._waiting = deque(pieces)
        self._planned: list[deque[list[int]]] = [deque() for _ in range(engines)]
        self._costs = costs
        if planned:
            self._plan(sorted(planned))
        self._capacity = capacity
        self._given: list[list[list[int]]] = [[] for _ in range(engines)]  # pieces that an engine has begun
        self._held: list[set[int]] = [set() for _ in range(engines)]
        self._load = [0.0] * engines

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
            engine = min(able, key=lambda engine: self._load[engine])
            self._give(engine, self._waiting.popleft(), given)
        return given

    def mark_done(self, engine: int, requests: Iterable[int]) -> bool:
        """Note that an engine has generated `requests`. Return whether it has others left."""
        self._held[engine].difference_update(requests)
        self._load[engine] = sum(self._costs[i] for i in self._held[engine])
        if not self._held[engine]:
            self._given[engine] = []
        return bool(self._held[engine])

    def requeue(self, engine: int) -> None:
        """Take the requests that a lost engine has not completed back, to give them to others."""
        left = [[i for i in piece if i in self._held[engine]] for piece in self._given[engine]]
        self._waiting.extendleft(reversed([*(piece for piece in left if piece), *self._planned[engine]]))
        self._planned[engine].clear()
        self._given[engine], self._held[engine], self._load[engine] = [], set(), 0.0

    def replan(self, engines: Collection[int]) -> None:
        """Let any engine take what was planned for others than `engines`: these are lost."""
        for engine, pieces in enumerate(self._planned):
            if pieces and engine not in engines:
                self._waiting.extend(pieces)
                pieces.clear()

    def _plan(self, engines: list[int]) -> None:
        """Give each piece to the engine that has the least so far."""
        loads = dict.fromkeys(engines, 0.0)
        while self._waiting:
            piece = self._waiting.popleft()
            engine = min(engines, key=lambda engine: loads[engine])
            loads[engine] += sum(self._costs[i] for i in piece)
            self._planned[engine].append(piece)

    def _give(self, engine: int, piece: list[int], given: dict[int, list[int]]) -> None:
        given.setdefault(engine, []).extend(piece)
        self._given[engine].append(piece)
        self._held[engine].update(piece)
        self._load[engine] += sum(self._costs[i] for i in piece)

    def _fits(self, engine: int, piece: Sequence[int]) -> bool:
        held = len(self._held[engine])
        return self._capacity is None or held == 0 or held + len(piece) <= self._capacity


def share_out(
    requests: Sequence[Request],
    max_tokens: int,
    engines: int,
    most: int,
    streaming: bool,
    device: str,
    planned: Collection[int] = (),
) -> RequestScheduler:
    """Return how these requests are shared out over engines.

    Args:
        max_tokens: longest completion.
        engines: number of engines.
        most: requests that an engine can generate together (`rollout.max_num_seqs`).
        streaming: the engines take further requests while they generate. If not, they get one batch at a time.
        device: of the engines.
        planned: see `RequestScheduler`.
    """
    costs = request_costs(requests, max_tokens)
    if not streaming:
        return RequestScheduler(by_length(requests, engines, most), costs, engines, 0, planned)
    # On CPU, runs are exact to the last bit in any case: an engine gets all that it generates at once.
    capacity = most if device == "cuda" and engines > 1 and not planned else None
    return RequestScheduler(by_prompt(requests, max_tokens, capacity), costs, engines, capacity, planned)


def request_costs(requests: Sequence[Request], max_tokens: int) -> list[float]:
    """Return the most tokens that each request can take. A prompt counts once for all its completions."""
    counts: dict[bytes, int] = {}
    for request in requests:
        prompt = request.prompt_token_ids.tobytes()
        counts[prompt] = counts.get(prompt, 0) + 1
    return [max_tokens + len(r.prompt_token_ids) / counts[r.prompt_token_ids.tobytes()] for r in requests]


def by_prompt(requests: Sequence[Request], max_tokens: int, most: int | None = None) -> list[list[int]]:
    """Return the places of the requests, those of one prompt together: an engine computes the prompt once.

    The most expensive prompts come first.

    Args:
        most: longest piece; a prompt with more completions is cut.
    """
    prompts: dict[bytes, list[int]] = {}
    for i, request in enumerate(requests):
        prompts.setdefault(request.prompt_token_ids.tobytes(), []).append(i)
    longest_first = sorted(
        prompts.values(), key=lambda rows: (-len(requests[rows[0]].prompt_token_ids) - len(rows) * max_tokens, rows[0])
    )
    size = most or max(1, len(requests))
    return [rows[start : start + size] for rows in longest_first for start in range(0, len(rows), size)]


def by_length(requests: Sequence[Request], engines: int, most: int) -> list[list[int]]:
    """Return batches of at most `most` requests with prompts of similar length, the longest first.

    There are as many batches for each of `engines`, and of the same size as far as possible. Which requests share a
    batch does not depend on how fast the engines are, because it can change the last bits of log-probs.
    """
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_token_ids))
    if not order:
        return []
    rounds = -(-len(order) // (engines * most))
    size = -(-len(order) // (engines * rounds))
    return [order[start : start + size] for start in range(0, len(order), size)][::-1]
