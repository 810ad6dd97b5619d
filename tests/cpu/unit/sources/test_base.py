"""Our sources and evaluators have the methods that the trainer calls."""

from __future__ import annotations

import inspect

import pytest

from trainer.sources.base import EpisodeSource, Evaluation, Evaluator
from trainer.sources.evaluation import LossEvaluator, RolloutEvaluator
from trainer.sources.sampling import SamplingSource
from trainer.sources.supervised import LedgerSource, SupervisedSource


def members(protocol: type) -> dict[str, inspect.Signature | None]:
    """The methods of a protocol with their parameters, and its properties."""
    found = {name: value for name, value in vars(protocol).items() if inspect.isfunction(value)}
    found = {name: value for name, value in found.items() if name not in ("__init__", "__subclasshook__")}
    properties = [name for name, value in vars(protocol).items() if isinstance(value, property)]
    return {name: inspect.signature(value) for name, value in found.items()} | dict.fromkeys(properties)


@pytest.mark.parametrize(
    ("kind", "protocol"),
    [
        (SamplingSource, EpisodeSource),
        (LedgerSource, EpisodeSource),
        (SupervisedSource, EpisodeSource),
        (RolloutEvaluator, Evaluator),
        (LossEvaluator, Evaluator),
    ],
)
def test_ours_have_what_the_trainer_asks_for(kind, protocol):
    expected = members(protocol)
    assert {"next", "publish", "commit", "epoch"} <= set(expected) or "evaluate" in expected
    for name, signature in expected.items():
        if signature is None:
            assert not callable(getattr(kind, name)), name  # a property, or a value of the class
        elif name not in ("__enter__", "__exit__"):
            assert inspect.signature(getattr(kind, name)).parameters.keys() == signature.parameters.keys(), name
        else:
            assert name in dir(kind)


def test_an_evaluation_that_generated_nothing_has_no_episodes():
    assert (Evaluation({"val/loss": 1.0}).greedy, Evaluation({}).sampled) == ((), ())
