"""Which GPUs of ranks each engine shares."""

from __future__ import annotations

import pytest

from trainer.errors import WorkerError
from trainer.generation.lifecycle import Placement, assign_gpus, colocated_ranks, gpus_of


def ranks(**gpus: str) -> list[Placement]:
    """Return where ranks are that have these GPUs: `a="01"` are GPUs 0 and 1 of node a."""
    return [{"host": node, "node": node, "gpus": [gpu]} for node, ids in gpus.items() for gpu in ids]


def names(homes: list) -> list[str | None]:
    return [None if home is None else " ".join(sorted(map("".join, gpus_of(home)))) for home in homes]


def test_an_engine_has_the_gpus_of_neighbours_on_one_node():
    assert names(assign_gpus(ranks(a="0123"), [None, None], 2)) == ["a0 a1", "a2 a3"]
    assert names(assign_gpus(ranks(a="012", b="012"), [None] * 3, 2)) == ["a0 a1", "b0 b1", None]
    assert names(assign_gpus(ranks(b="10", a="0"), [None] * 2, 1)) == ["b1", "b0"]


@pytest.mark.parametrize(
    ("left", "homes"),
    [
        ({"b": "01", "a": "10"}, ["a0 a1", "b0 b1"]),  # other ranks, the same GPUs
        ({"b": "01"}, [None, "b0 b1"]),  # node a is lost
        ({"b": "01", "c": "01"}, ["c0 c1", "b0 b1"]),  # and another has taken its place
        ({"a": "1", "b": "0", "c": "01"}, ["c0 c1", None]),  # a part of the GPUs is of no use
    ],
)
def test_engines_stay_where_ranks_are_and_follow_them_elsewhere(left, homes):
    first = assign_gpus(ranks(a="01", b="01"), [None, None], 2)
    assert names(assign_gpus(ranks(**left), first, 2)) == homes


def test_ranks_in_another_order_are_beside_the_same_engines():
    places = ranks(b="0", a="10")
    assert colocated_ranks([ranks(a="0")], places) == (2,)
    assert colocated_ranks([ranks(a="01"), ranks(b="0")], places) == (0, 1, 2)
    with pytest.raises(WorkerError, match="an engine is on GPU 1 of node b, where no rank can give it weights"):
        colocated_ranks([ranks(b="1")], places)
