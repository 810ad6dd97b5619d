"""Which engines may serve, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trainer.generation.lifecycle import Lifecycle, State

ENGINES = st.integers(0, 2)


class Engines(RuleBasedStateMachine):
    """Beside the lifecycle: what each process truly is, as its events alone say."""

    def __init__(self) -> None:
        super().__init__()
        self.lifecycle = Lifecycle(3)
        self.alive = [True] * 3
        self.built = [False] * 3
        self.version = 1
        self.weights = [0] * 3  # the version that each process holds

    @rule(engine=ENGINES)
    def load(self, engine):
        if self.alive[engine] and not self.built[engine]:
            self.lifecycle.load(engine)
            self.built[engine] = True
        else:
            with pytest.raises(AssertionError):
                self.lifecycle.load(engine)

    @rule(engine=ENGINES)
    def refit(self, engine):
        if self.alive[engine] and self.built[engine]:
            self.lifecycle.refit(engine)
            self.weights[engine] = self.version
        else:
            with pytest.raises(AssertionError):
                self.lifecycle.refit(engine)

    @rule()
    def train(self):
        self.version += 1
        self.lifecycle.outdate(self.lifecycle.loaded)

    @rule(engine=ENGINES)
    def die(self, engine):
        if self.alive[engine]:
            self.lifecycle.die(engine)
            self.alive[engine], self.built[engine], self.weights[engine] = False, False, 0
        else:
            with pytest.raises(AssertionError):
                self.lifecycle.die(engine)

    @rule(engine=ENGINES)
    @precondition(lambda self: not all(self.alive))
    def replace(self, engine):
        if self.alive[engine]:
            with pytest.raises(AssertionError):
                self.lifecycle.replace(engine)
        else:
            self.lifecycle.replace(engine)
            self.alive[engine] = True

    @invariant()
    def only_living_engines_with_current_weights_serve(self):
        current = [engine for engine in range(3) if self.alive[engine] and self.weights[engine] == self.version]
        assert self.lifecycle.serving == current

    @invariant()
    def only_built_engines_get_weights(self):
        assert self.lifecycle.loaded == [engine for engine in range(3) if self.alive[engine] and self.built[engine]]
        assert self.lifecycle.within(State.DEAD) == [engine for engine in range(3) if not self.alive[engine]]


TestEngines = Engines.TestCase
TestEngines.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
