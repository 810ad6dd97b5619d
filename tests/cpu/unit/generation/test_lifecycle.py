"""Which engines may serve, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trainer.generation.lifecycle import GpuMemory, Lifecycle, Phase, State

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
            self.lifecycle.refit(engine, self.version)
            self.weights[engine] = self.version
        else:
            with pytest.raises(AssertionError):
                self.lifecycle.refit(engine, self.version)

    @rule()
    def train(self):
        self.version += 1
        self.lifecycle.mark_stale(self.lifecycle.loaded)

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
        assert all(self.lifecycle.version(engine) == self.version for engine in current)

    @invariant()
    def only_built_engines_get_weights(self):
        assert self.lifecycle.loaded == [engine for engine in range(3) if self.alive[engine] and self.built[engine]]
        assert self.lifecycle.within(State.DEAD) == [engine for engine in range(3) if not self.alive[engine]]


TestEngines = Engines.TestCase
TestEngines.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def test_an_engine_without_weights_of_the_policy_has_no_version():
    lifecycle = Lifecycle(1)
    lifecycle.load(0)
    with pytest.raises(AssertionError, match="has no weights of the policy"):
        lifecycle.version(0)
    lifecycle.refit(0, 3)
    assert lifecycle.version(0) == 3
    lifecycle.die(0)
    with pytest.raises(AssertionError, match="has no weights of the policy"):
        lifecycle.version(0)


ALLOWED = {
    Phase.STARTING: {"sleep": Phase.ASLEEP},
    Phase.ASLEEP: {"sleep": Phase.ASLEEP, "wake": Phase.AWAKE, "start": Phase.STARTING},
    Phase.AWAKE: {"sleep": Phase.ASLEEP},
}


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("move", ["sleep", "wake", "start"])
def test_engines_and_ranks_take_turns_with_shared_memory(phase, move):
    """Engines start while the ranks have left the GPUs, and get weights while they sleep."""
    memory = GpuMemory(shared=True)
    assert memory.phase is Phase.STARTING, "engines measure the free memory before the ranks load"
    memory.phase = phase
    assert (memory.may_start, memory.may_sync) == (phase is not Phase.ASLEEP, phase is Phase.ASLEEP)
    if move in ALLOWED[phase]:
        getattr(memory, move)()
        assert memory.phase is ALLOWED[phase][move]
    else:
        with pytest.raises(AssertionError, match=f"shared memory is {phase.value}"):
            getattr(memory, move)()


def test_engines_with_memory_of_their_own_start_generate_and_sync_at_any_time():
    memory = GpuMemory(shared=False)
    assert memory.may_start and memory.may_sync and memory.is_awake
    with pytest.raises(AssertionError):
        memory.sleep()
