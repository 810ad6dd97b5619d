"""The turns of an episode: found again after a kill, and dropped from where the episode takes another course."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cpu.unit.journal.test_journal import group
from tests.support.replies import journal_in
from trainer.environments import StepResult
from trainer.environments.turns import EpisodeTurns, reply_name
from trainer.generation.engine import Completion, Request, Sampling
from trainer.journal.journal import Journal

SAID = [
    Completion([5, 6, 2], [-0.1, -1e-9, -3.0], "stop", (3, 4), ((3, 1), (4, 2))),
    Completion([7], [-2.0], "length", 4),
]
ANSWERS = [StepResult([{"role": "user", "content": text}], reward) for text, reward in (("a\ud800", 0.1), ("b", 0.2))]


def request(turn: int) -> Request:
    return Request([1, 2, turn], 9, Sampling(1.0, 1.0, -1, 8, (2,)))


def name(turn: int) -> str:
    return reply_name(str(turn), request(turn))


def turns_in(journal: Journal) -> EpisodeTurns:
    found = journal.replay.take_turns(1, "key")
    return EpisodeTurns("key", found, lambda turn: journal.add(1, {}, "start", None, [turn]))


def found(turns: EpisodeTurns, turn: int) -> Completion | None:
    return asyncio.run(turns.find(name(turn)))


def recorded(root: Path, state: str | None = None) -> EpisodeTurns:
    """Two replies between three answers, as the next process finds them."""
    journal = journal_in(root)
    turns = turns_in(journal)
    for number, (said, answer) in enumerate(zip(SAID, ANSWERS, strict=True)):
        turns.add_answer(number, answer, state)
        assert found(turns, number) is None
        turns.add_reply(name(number), said)
        assert found(turns, number) is said, "another attempt of the episode gets it"
    turns.add_answer(2, StepResult([], done=True), None)
    journal.close()
    return turns_in(journal_in(root))


def bits(completion: Completion | None) -> Any:
    assert completion is not None
    arrays = completion.token_ids, completion.logprobs
    others = completion.finish_reason, completion.weight_versions, completion.version_spans
    return [(one.dtype, one.tobytes()) for one in arrays], others


def test_recorded_replies_come_back_as_they_were_for_the_same_prompts(tmp_path):
    turns = recorded(tmp_path)
    for number, said in enumerate(SAID):
        assert turns.recorded_answer(number) == (ANSWERS[number], None)
        turns.add_answer(number, ANSWERS[number], None)
        assert bits(found(turns, number)) == bits(said)
    assert turns.recorded_answer(2) == (StepResult([], done=True), None)
    turns.end()
    assert (turns.recorded, turns.sampled, turns.dropped) == (2, 0, 0)
    other = turns_in(journal_in(tmp_path))
    assert asyncio.run(other.find(reply_name("0", request(1)))) is None, "another prompt"


def test_turns_are_written_once_if_their_episode_ends_meanwhile(tmp_path):
    journal, turns = journal_in(tmp_path), []
    for key in ("ended", "running"):
        EpisodeTurns(key, add=turns.append).add_reply(name(0), SAID[0])
    journal.add(1, {"ended": group("ended")}, "start", None, turns)
    journal.close()
    replay = journal_in(tmp_path).replay
    assert [len(replay.take_turns(1, key)) for key in ("ended", "running")] == [0, 1]


def test_replies_behind_another_answer_are_dropped(tmp_path):
    turns = recorded(tmp_path)
    turns.add_answer(0, ANSWERS[0], None)
    assert found(turns, 0) is not None
    turns.add_answer(1, StepResult(ANSWERS[1].messages, 0.3), None)  # the same messages, another reward
    assert found(turns, 1) is None
    assert (turns.dropped, turns.diverged, turns.recorded) == (1, "1", 1)


def test_a_reply_that_was_sampled_again_makes_the_recorded_answers_to_it_void(tmp_path):
    turns = recorded(tmp_path, state="eA==")
    assert turns.recorded_answer(1) == (ANSWERS[1], "eA==")
    turns.add_reply(reply_name("0", Request([1], 9, request(0).sampling)), SAID[1])
    assert turns.recorded_answer(1) is None
    turns.end()
    assert (turns.dropped, turns.diverged) == (2, "0")


@pytest.mark.parametrize("damage", [b"", b"\x01"])
def test_turns_of_a_damaged_file_are_sampled_again(tmp_path, caplog, damage):
    recorded(tmp_path)
    (file,) = (tmp_path / "run/.journal").glob("step_1-*.turns")
    file.write_bytes(file.read_bytes()[:-1] + damage)
    assert found(turns_in(journal_in(tmp_path)), 0) is None
    assert file.name in caplog.text


def test_a_full_disk_ends_the_records_of_turns_and_not_the_run(tmp_path, monkeypatch, caplog):
    recorded(tmp_path)
    journal = journal_in(tmp_path)

    def write(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal._files, "write", write)
    turns = turns_in(journal)
    turns.add_reply(name(5), Completion(np.arange(3), np.zeros(3), "stop", 1))
    journal.wait()
    turns.add_reply(name(6), SAID[0])
    journal.close()
    assert "rollouts are not recorded any more" in caplog.text and caplog.text.count("WARNING") == 1
    assert not [*(tmp_path / "run/.journal").glob("*.turns")], "checkpoints need the room more"
