"""Keys of `environment.*`, and keys that episodes of several turns do not have."""

from __future__ import annotations

from tests.cpu.unit.config.contradictions import test_contradictions_are_refused_in_one_sentence  # noqa: F401
from trainer.config import compose

CONTRADICTIONS = [
    (["environment.python=python3"], "environment.python=python3: is the interpreter of environment.name"),
    (["environment.name=guess"], "environment.name=guess: must be an import path package.module:Class"),
    (
        ["environment.name=guess:Guess", "algorithm.overlong_buffer=4"],
        "algorithm.overlong_buffer=4: is for one completion",
    ),
]


def test_without_an_environment_its_keys_contradict_nothing():
    compose(["algorithm.overlong_buffer=4", "environment.max_turns=3"])
