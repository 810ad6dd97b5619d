"""The reaction of a run to a failure of its ranks."""

from __future__ import annotations

import re

import pytest

from tests.support.runs import configured
from trainer.errors import FailureSource, NonFiniteError, NonRetryableError, WorkerError, set_failure_source
from trainer.metrics.advice import Divergence
from trainer.process.failures import INCIDENTS, read_incidents
from trainer.run.recovery import Recovery
from trainer.run.state import StopRequest


@pytest.fixture
def start(tmp_path):
    """Return a function that makes the recovery of a run in `tmp_path`, whose incidents are recorded."""
    INCIDENTS.open(str(tmp_path))
    stop = StopRequest(None)

    def recovery(**trainer) -> tuple[Recovery, StopRequest]:
        return Recovery(configured(tmp_path, **trainer).trainer, stop, "trainer.policy.optimizer"), stop

    yield recovery
    INCIDENTS.close()


def failure(text: str = "rank 1 died") -> WorkerError:
    error = WorkerError(text, cause="killed")
    set_failure_source(error, FailureSource("rank 1", "10.0.0.7"))
    return error


def actions(tmp_path) -> list[tuple[int, str]]:
    return [(incident.step, incident.action) for incident in read_incidents(str(tmp_path))]


def test_a_failure_that_a_restart_cures_is_recorded_once_the_ranks_run(start, tmp_path):
    recovery, _ = start()
    recovery.begin_step(3)
    recovery.accept(failure(), "")
    assert recovery.restarted and actions(tmp_path) == []
    recovery.wait()
    recovery.complete()
    recovery.complete()
    assert actions(tmp_path) == [(3, "restarted the ranks")]


def test_a_failure_during_the_restart_records_the_first_one_as_not_cured(start, tmp_path):
    recovery, _ = start(max_restarts=1)
    recovery.begin_step(3)
    recovery.accept(failure(), "")
    with pytest.raises(WorkerError, match="again"):
        recovery.accept(failure("rank 1 died again"), "")
    assert actions(tmp_path) == [(3, "restarted the ranks without success"), (3, "ended the run")]


def test_a_model_that_cannot_be_loaded_is_no_accident(start, tmp_path):
    recovery, _ = start()
    error = RuntimeError("the model has no weights")
    set_failure_source(error, FailureSource("rank 0"))
    with pytest.raises(RuntimeError, match="no weights"):
        recovery.accept(error, "", is_loaded=False)
    assert not recovery.restarted
    recovery.accept(failure(), "", is_loaded=False)  # a machine that fails is one
    assert recovery.restarted


def test_a_mistake_in_the_user_s_code_ends_the_run_with_its_file_and_line(start, tmp_path):
    (tmp_path / "own_pairs.py").write_text("def draw(row):\n    return row['rejected']\n")
    code = compile((tmp_path / "own_pairs.py").read_text(), str(tmp_path / "own_pairs.py"), "exec")
    given: dict = {}
    exec(code, given)
    recovery, _ = start()
    recovery.begin_step(3)
    place = f"KeyError: 'rejected' \\({tmp_path}/own_pairs.py:2, in draw\\)"
    for ending in (None, f"^step 3 failed again in the same way when it was repeated: {place}$"):
        with pytest.raises(KeyError) as caught:
            given["draw"]({})
        set_failure_source(caught.value, FailureSource("rank 0"))
        if ending is None:
            recovery.accept(caught.value, "")
        else:
            with pytest.raises(NonRetryableError, match=ending):
                recovery.accept(caught.value, "")
    assert re.fullmatch(place, read_incidents(str(tmp_path))[-1].text)


def test_a_run_that_was_asked_to_stop_does_not_restart(start, tmp_path):
    recovery, stop = start()
    stop.ask("SIGTERM")
    with pytest.raises(WorkerError):
        recovery.accept(failure(), "")
    assert not recovery.restarted
    assert actions(tmp_path) == [(0, "ended the run, which was asked to stop")]


@pytest.mark.parametrize(
    ("last_good", "kept"), [("", "there is no checkpoint yet"), ("c/global_step_2", "last good checkpoint is c/glo")]
)
def test_a_loss_that_is_not_finite_again_ends_the_run_with_advice(start, last_good, kept):
    recovery, _ = start()
    recovery.begin_step(3)
    recovery.accept(NonFiniteError("the loss is nan"), last_good)
    with pytest.raises(
        NonRetryableError, match=f"step 3: the loss is nan; .*{kept}.*A lower trainer.policy.optimizer.lr"
    ):
        recovery.accept(NonFiniteError("the loss is nan"), last_good)


@pytest.mark.parametrize(
    ("saved", "advice"),
    [
        ([1, 4, 8], r"`trainer checkpoint rollback \S+ --to 4` goes back"),
        ([8], "no checkpoint is from before that, so start a new run"),
    ],
)
def test_a_diverged_run_is_told_the_newest_checkpoint_before_the_divergence(start, saved, advice):
    recovery, _ = start()
    error = recovery.diverged(Divergence("policy/kl", 1.0, first_step=6, value=9.0), saved)
    with pytest.raises(NonRetryableError, match=advice):
        raise error
