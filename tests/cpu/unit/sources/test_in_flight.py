"""Records of groups in flight: valid if the weights that sampled the group are weights of this run."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer.config import Config
from trainer.data.ledger import SampleIndex
from trainer.episodes import Episode, Sample
from trainer.journal.history import Identity
from trainer.journal.journal import Journal
from trainer.process import time_limits
from trainer.process.signals import SIGNALS
from trainer.sources.ahead import CancelledBatch
from trainer.sources.in_flight import GroupThread, WeightHistories


def journal_in(root: Path) -> Journal:
    return Journal(str(root), Identity("config", "updates"), lambda: None)


def group(token: int) -> list[Episode]:
    sample = Sample(
        np.full(2, token, np.int32), np.ones(2, np.float32), np.zeros(2, np.float32), (3, 4), ((3, 1), (4, 1))
    )
    return [Episode("0:7:0", "0:7", [sample], 0.5)]


@pytest.fixture
def replayed(tmp_path) -> Journal:
    """The journal of a killed run: it had finished the group while it had version 4, in two lives."""
    journal = journal_in(tmp_path)
    journal.start(1, "h2")
    journal.add(6, {"key": group(40)}, "h4", 4)
    journal.add(7, {"key": group(50)}, "h5", 5)
    journal.close()
    journal = journal_in(tmp_path)
    journal.start(2, "h3")
    return journal


def looking(journal: Journal, histories: WeightHistories) -> GroupThread:
    """The thread of a group that looks for its record."""

    def make_group(thread: GroupThread) -> Any:
        found = thread.find(journal, "key")
        return found and found[0]

    source = SimpleNamespace(histories=histories, cfg=Config(), ended=threading.Condition(), make_group=make_group)
    return GroupThread(SampleIndex(0, 0, 7), 9, 3, source)  # type: ignore[arg-type]


def test_a_record_is_valid_once_the_run_has_come_to_its_weights(replayed):
    histories = WeightHistories()
    histories.add(3, "h3")
    thread = looking(replayed, histories)
    assert not thread.has_ended(0.3), "the run may still come to version 4 with the same history"
    histories.add(4, "h4")
    (episode,) = thread.result()  # type: ignore[misc]
    assert episode.samples[0].version_spans == ((3, 1), (4, 1)) and episode.samples[0].token_ids.tolist() == [40, 40]


def test_a_rollback_gives_up_the_records_of_earlier_weights_too(replayed):
    """It changes the history of the checkpoint's weights. The checkpoint also has the histories before these."""
    histories = WeightHistories()
    histories.load_state_dict({"histories": {"4": "h4", "5": "h5"}})
    histories.add(5, "h5")
    assert histories.includes(4, "h4"), "a resume"
    histories.load_state_dict({"histories": {"4": "h4", "5": "h5"}})
    histories.add(5, "rolled back")
    with pytest.raises(AssertionError):
        looking(replayed, histories).result()  # it has found nothing


def test_a_record_of_other_weights_is_not_used(replayed):
    """Another record of the group may still be valid."""
    histories = WeightHistories()
    for version, history in ((3, "h3"), (4, "other"), (5, "h5")):
        histories.add(version, history)
    (episode,) = looking(replayed, histories).result()  # type: ignore[misc]
    assert episode.samples[0].token_ids.tolist() == [50, 50]
    histories.add(5, "other")
    with pytest.raises(AssertionError):
        looking(replayed, histories).result()  # it has found nothing


def test_a_group_that_the_next_step_needs_waits_for_no_later_weights(replayed):
    histories = WeightHistories()
    histories.add(3, "h3")
    thread = looking(replayed, histories)
    thread.is_needed = True
    with pytest.raises(AssertionError):
        thread.result()


def test_a_thread_that_waits_for_a_group_says_for_which_one(replayed):
    histories, names = WeightHistories(), []
    histories.add(3, "h3")
    thread = looking(replayed, histories)
    check_behind, thread.check_behind = thread.check_behind, lambda: (names.append(SIGNALS.waits_for), check_behind())
    wakes = threading.Thread(target=lambda: (thread.has_ended(3 * time_limits.POLL_INTERVAL_S), histories.add(4, "h4")))
    wakes.start()
    thread.result()
    assert {*names} == {"the group of row 7 of epoch 0"} and not SIGNALS.waits_for


def test_a_group_that_waits_can_be_cancelled(replayed, monkeypatch):
    monkeypatch.setattr(time_limits, "POLL_INTERVAL_S", 0.01)
    histories = WeightHistories()
    histories.add(3, "h3")
    thread = looking(replayed, histories)
    thread.cancel()
    with pytest.raises(CancelledBatch):
        thread.result()


def test_the_histories_of_a_checkpoint_are_those_of_a_resumed_run():
    histories, resumed = WeightHistories(), WeightHistories()
    for version in range(1, 6):
        histories.add(version, f"h{version}")
    histories.forget_before(3)
    resumed.load_state_dict(histories.state_dict())
    resumed.add(5, "h5")
    assert resumed.newest == (5, "h5") and resumed.includes(3, "h3") and not resumed.includes(2, "h2")
    resumed.add(4, "another")  # the run has gone back
    assert resumed.newest == (4, "another") and not resumed.includes(5, "h5")
