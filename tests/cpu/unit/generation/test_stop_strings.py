from __future__ import annotations

import numpy as np
import pytest

from trainer.agents.call_tree import cut_at
from trainer.generation.engine import Completion


@pytest.mark.parametrize(
    "text, stops, kept, shown",
    [
        ("abcdef", ["d"], "abcd", "abc"),
        ("abcdef", ["ef", "bc"], "abc", "a"),
        ("abcdef", ["x"], "abcdef", "abcdef"),
        ("abcdef", ["a"], "a", ""),
        ("aéb", ["é"], "aé", "a"),
    ],
)
def test_a_stop_ends_a_completion_at_the_token_that_completes_it(tokenizer, text, stops, kept, shown):
    tokens = tokenizer.encode(text)
    completion = Completion(tokens, np.arange(len(tokens)), "length", (3, 5), ((3, 2), (5, len(tokens) - 2)))
    cut, said, _ = cut_at(completion, stops, tokenizer.decode)
    count = len(tokenizer.encode(kept))
    assert (tokenizer.decode(cut.token_ids), said) == (kept, shown)
    assert cut.logprobs.tolist() == list(range(count))
    assert cut.finish_reason == ("length" if kept == text else "stop")
    spans = cut.version_spans or [(cut.weight_versions[0], count)]
    assert sum(size for _, size in spans) == count and cut.weight_versions == (spans[0][0], spans[-1][0])
