"""Records of groups in flight: valid if the weights that sampled the group are weights of this run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from trainer.data.datasets import Prompt
from trainer.data.ledger import SampleIndex
from trainer.environments.episode_runner import RolloutRequest
from trainer.episodes import Episode, Sample
from trainer.generation.engine import Sampling
from trainer.generation.event_loop import Changes
from trainer.journal.history import Identity
from trainer.journal.journal import Journal
from trainer.sources.in_flight import WeightHistories, _FlyingGroup, _GroupInFlight

REQUEST = RolloutRequest(Prompt(7, (1,), "p", "x"), "0:7", 3, 0, Sampling(1.0, 1.0, -1, 8, ()))


def journal_in(root: Path) -> Journal:
    return Journal(str(root), Identity("config", "updates"), lambda: None)


def record_in(journal: Journal, histories: WeightHistories) -> _GroupInFlight:
    rollouts = SimpleNamespace(journal=journal, routes={"": SimpleNamespace(decides="")})
    source = SimpleNamespace(rollouts=rollouts, histories=histories, changes=Changes())
    return _GroupInFlight(source, _FlyingGroup(SampleIndex(0, 0, 7), 9, 3), [REQUEST])  # type: ignore[arg-type]


def histories_of(**histories: str) -> WeightHistories:
    made = WeightHistories()
    for version, history in histories.items():
        made.add(int(version[1:]), history)
    return made


@pytest.fixture
def replayed(tmp_path) -> Journal:
    """The journal of a killed run: it had finished the group while it had version 4, and again with version 5."""
    journal = journal_in(tmp_path)
    journal.start(1, "h2")
    (key,) = record_in(journal, histories_of(v1="h1"))._members
    for token, last_step, history, version in ((40, 6, "h4", 4), (50, 7, "h5", 5)):
        ones = np.ones(2, np.float32)
        sample = Sample(np.full(2, token, np.int32), ones, 0 * ones, (3, 4), ((3, 1), (4, 1)))
        journal.add(last_step, {key: [Episode("0:7:0", "0:7", [sample], 0.5)]}, history, version)
    journal.close()
    journal = journal_in(tmp_path)
    journal.start(2, "h3")
    return journal


def found(record: _GroupInFlight, *later: tuple[int, str], is_needed: bool = False) -> int | None:
    """The tokens of the record that is found; None: none is. `later`: the weights that the run comes to meanwhile."""

    async def find() -> int | None:
        looking = asyncio.ensure_future(record.find())
        for version, history in later:
            await asyncio.sleep(0.01)
            assert not looking.done(), "the run may still come to the weights of a record"
            record._source.histories.add(version, history)
            record._source.changes.notify()
        record._flying.is_needed |= is_needed
        record._source.changes.notify()
        await asyncio.wait_for(looking, 10)
        episodes = record.found
        return int(episodes[0].samples[0].token_ids[0]) if episodes else None

    return asyncio.run(find())


@pytest.mark.parametrize(
    ("now", "later", "is_needed", "token"),
    [
        ({"v3": "h3"}, [(4, "h4")], False, 40),
        ({"v3": "h3"}, [(4, "other"), (5, "h5")], False, 50),
        ({"v3": "h3", "v4": "other", "v5": "other"}, [], False, None),
        ({"v3": "h3"}, [], True, None),
    ],
    ids=["its weights come", "another record", "other weights", "needed now"],
)
def test_a_record_is_valid_once_the_run_has_come_to_its_weights(replayed, now, later, is_needed, token):
    """A group that the next step needs waits for no later weights."""
    assert found(record_in(replayed, histories_of(**now)), *later, is_needed=is_needed) == token


def test_a_rollback_gives_up_the_records_of_earlier_weights_too(replayed):
    """It changes the history of the checkpoint's weights. The checkpoint also has the histories before these."""
    histories = WeightHistories()
    histories.load_state_dict({"histories": {"4": "h4", "5": "h5"}})
    histories.add(5, "h5")
    assert histories.includes(4, "h4"), "a resume"
    histories.load_state_dict({"histories": {"4": "h4", "5": "h5"}})
    histories.add(5, "rolled back")
    assert found(record_in(replayed, histories)) is None


def test_the_histories_of_a_checkpoint_are_those_of_a_resumed_run():
    histories, resumed = histories_of(v1="h1", v2="h2", v3="h3", v4="h4", v5="h5"), WeightHistories()
    histories.forget_before(3)
    resumed.load_state_dict(histories.state_dict())
    resumed.add(5, "h5")
    assert resumed.newest == (5, "h5") and resumed.includes(3, "h3") and not resumed.includes(2, "h2")
    resumed.add(4, "another")  # the run has gone back
    assert resumed.newest == (4, "another") and not resumed.includes(5, "h5")
