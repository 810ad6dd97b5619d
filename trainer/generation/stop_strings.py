"""Texts that end a completion. Engines know the tokens that end one; texts are cut off afterwards."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence

from trainer.generation.engine import Completion


def cut_at(
    completion: Completion, stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> tuple[Completion, str]:
    """Return a completion up to the token that completes one of `stops`, and its text before that stop.

    Args:
        decode: returns the text of the first tokens of the completion.
    """

    def text(count: int) -> str:
        return decode(completion.token_ids[:count].tolist())

    length = len(completion.token_ids)
    if not any(stop in text(length) for stop in stops):
        return completion, text(length)
    count = bisect.bisect_left(range(length + 1), True, key=lambda count: any(stop in text(count) for stop in stops))
    shown = text(count)
    end = min(shown.find(stop) for stop in stops if stop in shown)
    spans, left = [], count
    for version, size in completion.version_spans:
        spans.append((version, min(size, left)))
        left -= min(size, left)
    spans = [span for span in spans if span[1] > 0]
    kept = dataclasses.replace(
        completion,
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        finish_reason="stop",
        weight_versions=(spans[0][0], spans[-1][0]) if spans else completion.weight_versions,
        version_spans=tuple(spans) if len(spans) > 1 else (),
    )
    return kept, shown[:end]
