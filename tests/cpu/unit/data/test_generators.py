"""Generated examples."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.generators import generate
from trainer.errors import UserError


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(["arithmetic", "look_up", "reverse_text"]), train=st.integers(1, 300), val=st.integers(1, 100)
)
def test_generated_splits_do_not_overlap(name, train, val):
    ours, theirs = generate(name, {}, train, "train"), generate(name, {}, val, "val")
    prompts = {e["prompt"] for e in ours}
    assert len(ours) == len(prompts) == train
    assert len({e["prompt"] for e in theirs}) == val
    assert prompts.isdisjoint(e["prompt"] for e in theirs)
    assert generate(name, {}, train, "train") == ours
    assert generate(name, {}, train + 5, "train")[:train] == ours


def test_generated_examples_are_right():
    for example in generate("arithmetic", {"max_value": 30}, 200, "train"):
        a, b = example["prompt"].removesuffix("=").split("+")
        assert max(int(a), int(b)) <= 30
        assert int(example["answer"]) == int(a) + int(b)
    words = generate("reverse_text", {"min_letters": 2, "max_letters": 3}, 200, "val")
    assert {len(e["prompt"]) for e in words} == {2, 3}
    assert all(e["answer"] == e["prompt"][::-1] for e in words)


def test_generated_examples_do_not_change():
    """Runs, caches and reported numbers stand on them."""
    assert [e["prompt"] for e in generate("reverse_text", {}, 3, "train")] == ["rqhzg", "issapnuwwj", "ockbbpsym"]
    assert [e["prompt"] for e in generate("arithmetic", {}, 3, "val")] == ["66+70=", "2+46=", "87+44="]
    (first,) = generate("look_up", {}, 1, "train")
    assert first["table"] == {"xjj": "cyl", "cyl": "37"} and len(first["messages"]) == 4


def test_generators_refuse_impossible_options():
    for name, args, message in [
        ("reverse_text", {"min_letters": 1, "max_letters": 1}, "data.train_size=100: .* only 2. different examples"),
        ("arithmetic", {"max_value": 9}, "data.train_size=100: .* only .. different examples for train"),
        ("arithmetic", {"max_value": -1}, "data.synthetic_args: max_value=-1"),
        ("look_up", {"max_calls": 0}, "data.synthetic_args: max_calls=0"),
        ("reverse_text", {"min_letters": 0}, "data.synthetic_args: min_letters=0"),
        ("reverse_text", {"min_letters": 5, "max_letters": 4}, "data.synthetic_args: min_letters=5 and max_letters=4"),
    ]:
        with pytest.raises(UserError, match=message):
            generate(name, args, 100, "train")
