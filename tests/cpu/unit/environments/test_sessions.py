"""Environments in processes of their own: what happens to an episode whose environment misbehaves, and to others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tests.support.episodes import step_all
from tests.support.jobs import wait_until
from trainer.config import EnvironmentConfig
from trainer.environments.episode_runner import EnvironmentPool, Session
from trainer.errors import WorkerError
from trainer.process.failures import INCIDENTS, read_incidents
from trainer.sandbox import limits

LIMIT_S = 2.0


@contextmanager
def pool_of(name: str, most_characters: int = 1000, **config: Any) -> Iterator[EnvironmentPool]:
    name = name if ":" in name else f"tests.support.environments:{name}"
    with EnvironmentPool(EnvironmentConfig(name=name, **{"timeout_s": LIMIT_S, **config}), most_characters) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with pool_of("Echo", num_processes=2, kwargs={"prefix": "> "}) as pool:
        yield pool


def play(pool: EnvironmentPool, *rows: dict[str, Any], turns: int = 2) -> list[Session]:
    """Sessions that have got the replies `a`, `bb`, … and are closed."""
    sessions = [Session({"turns": turns, **row}, seed=i) for i, row in enumerate(rows)]
    step_all(pool, sessions)
    for turn in range(turns):
        for session in sessions:
            if not session.ended:
                session.replies.append({"role": "assistant", "content": "abc"[turn] * (turn + 1)})
        step_all(pool, sessions)
    for session in sessions:
        session.ended = True
    step_all(pool, sessions)
    assert all(session.worker is None for session in sessions)
    assert all(not worker.sessions and not worker.calls for worker in pool._workers)
    return sessions


def texts(session: Session) -> list[str]:
    return [message["content"] for step in session.steps for message in step.messages]


def test_environments_answer_replies_and_are_closed(pool, tmp_path):
    first, second = play(
        pool, {"prompt": "x", "shows_seed": True, "closed": f"{tmp_path}/0"}, {"prompt": "y", "closed": f"{tmp_path}/1"}
    )
    assert texts(first) == ["> x0", "1:a"] and texts(second) == ["> y", "1:a"]
    assert [(step.reward, step.done) for step in first.steps] == [(0.0, False), (1.0, False), (2.0, True)]
    assert not first.failure and sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize("do", ["raise", "exit", "die", "hang"])
@pytest.mark.parametrize("at", [0, 2])
def test_an_environment_that_fails_once_is_made_again(pool, do, at, tmp_path):
    """A lost environment gets the same replies. Its episode, and those of the others in its process, stay the same."""
    plain = play(pool, *[{"prompt": str(i)} for i in range(4)])
    sessions = play(
        pool, {"prompt": "0", "do": do, "at": at, "once": f"{tmp_path}/x"}, *[{"prompt": str(i)} for i in range(1, 4)]
    )
    assert (tmp_path / "x").exists()
    assert [session.failure for session in sessions] == [""] * 4
    assert [session.steps for session in sessions] == [session.steps for session in plain]


def test_an_environment_that_fails_again_costs_its_episode_alone(pool):
    for do, status, reason in [
        ("raise", "failed", r"step raised RuntimeError: it broke in \w+\.py:\d+"),
        ("exit", "failed", r"step raised SystemExit: 3 in \w+\.py:\d+"),
        ("die", "failed", r"step ended its process \(exit status 5\)"),
        ("hang", "timeout", "step took longer than environment.timeout_s=2"),
    ]:
        failed, *others = play(pool, {"do": do, "at": 1}, *[{"prompt": str(i)} for i in range(3)])
        assert failed.status == status and re.fullmatch(reason, failed.failure), failed.failure
        assert all(not session.failure and len(session.steps) == 3 for session in others)


def test_an_environment_that_saves_itself_is_loaded_and_makes_no_step_again(tmp_path):
    """Whether it is lost alone, or with the run: then its answers are recorded. The ids of its steps stay the same."""
    with pool_of("SavedEffects", kwargs={"service": str(tmp_path)}) as pool:

        def answer(session: Session, turn: int) -> None:
            session.replies += [{"role": "assistant", "content": str(turn)}] if turn else []
            step_all(pool, [session])

        first, recorded = Session({"prompt": "x"}, 0, "key"), {}
        for turn in range(4):
            answer(first, turn)
            recorded[turn] = first.steps[-1], first.state
            if turn == 2:
                first._lose()
        second = Session({"prompt": "x"}, 0, "key", recorded.get)
        for turn in range(5):
            answer(second, turn)
        assert second.steps[:4] == first.steps and not [*tmp_path.glob("refused *")]
        answer(first, 4)
        assert second.steps == first.steps and not first.failure
        assert len([*tmp_path.glob("done *")]) == 4 and len([*tmp_path.glob("refused *")]) == 1
        for session in (first, second):
            session.ended = True
        step_all(pool, [first, second])


def test_a_tool_that_costs_is_not_called_again_for_a_recorded_answer(tmp_path):
    """Whether its environment is lost alone, or with the run. Another tool is, and the last answer needs none."""
    with pool_of("Paid", kwargs={"service": str(tmp_path)}) as pool:

        def answer(session: Session, text: str) -> None:
            session.replies.append({"role": "assistant", "content": text})
            step_all(pool, [session])

        def count(kind: str) -> int:
            return len([*tmp_path.glob(f"{kind} *")])

        calls = [
            f'<tool_call>{{"name": "{tool}", "arguments": {{"text": "a"}}}}</tool_call>' for tool in ("buy", "note")
        ]
        replies = ["".join(calls), calls[0], calls[0], "done"]
        first, recorded = Session({"prompt": "x"}, 0, "key"), {}
        step_all(pool, [first])
        for turn, text in enumerate(replies):
            recorded[turn] = first.steps[-1], None
            answer(first, text)
            if turn == 1:
                first._lose()
        assert (count("buy"), count("note")) == (3, 2), "for the lost environment it was called again"
        assert first.steps[-1].reward == 5 and first.steps[-1].done and not first.failure
        recorded[4] = first.steps[-1], None
        second = Session({"prompt": "x"}, 0, "key", recorded.get)
        step_all(pool, [second])
        for text in replies:
            answer(second, text)
        assert second.steps == first.steps and second.failure == ""
        assert (count("buy"), count("note"), count("score")) == (3, 3, 1)
        other = Session({"prompt": "x"}, 0, "key", {one: recorded[one] for one in (0, 1)}.get)
        step_all(pool, [other])
        for text in replies[:2]:
            answer(other, text)
        assert (count("buy"), other.steps[2]) == (4, first.steps[2])
        for session in (first, second, other):
            session.ended = True
        step_all(pool, [first, second, other])


def test_environments_are_spread_over_the_processes(pool):
    sessions = [Session({}, seed=i) for i in range(6)]
    step_all(pool, sessions)
    assert sorted(Counter(id(session.worker) for session in sessions).values()) == [3, 3]
    for session in sessions:
        session.ended = True
    step_all(pool, sessions)


def test_an_environment_that_answers_a_repeated_reply_in_another_way_has_failed(pool, tmp_path):
    (tmp_path / "x.1").touch()  # of an earlier process
    session = Session({"turns": 3, "do": "forget", "once": f"{tmp_path}/x"}, seed=0)
    session.replies.append({"role": "assistant", "content": "a"})
    step_all(pool, [session])
    assert texts(session)[-1] == "1:a again"
    session.steps[1] = type(session.steps[1])([{"role": "user", "content": "1:a"}], 1.0)
    session._answered = 0  # it is lost
    step_all(pool, [session])
    assert session.failure.startswith("answered the same replies in another way")


def test_a_process_that_environments_have_forked_does_not_answer():
    with pool_of("Echo", timeout_s=60.0, kwargs={"prefix": "> "}) as pool:  # a fork takes long on a busy machine
        (session,) = play(pool, {"prompt": "x", "do": "fork", "at": 1})
    assert texts(session) == ["> x", "1:a"] and not session.failure


@pytest.mark.parametrize("name", ["AsyncEcho", "ThreadedEcho"])
def test_async_environments_and_those_in_threads_run_at_the_same_time(name):
    with pool_of(name) as pool:
        assert [session.failures for session in play(pool, *[{"together": 3}] * 3)] == [0, 0, 0], "a call waits forever"


@pytest.mark.parametrize(("name", "do"), [("AsyncEcho", "wait"), ("ThreadedEcho", "hang")])
def test_a_call_beside_others_that_takes_too_long_costs_its_episode_alone(name, do):
    """Its process stays, because other environments live in it."""
    with pool_of(name) as pool:
        play(pool, {})
        process = pool._workers[0].process.pid
        late, *others = play(pool, {"do": do, "at": 1}, {}, {})
        assert (late.status, late.failure) == ("timeout", "step took longer than environment.timeout_s=2")
        assert all(not session.failure and len(session.steps) == 3 for session in others)
        assert pool._workers[0].process.pid == process


def test_a_process_with_many_threads_that_hang_is_replaced():
    """Each episode that fails leaves two threads, and 32 are too many. Other episodes lose nothing."""
    with pool_of("ThreadedEcho") as pool:
        good, *late = sessions = [Session({"turns": 2}, 0), *(Session({"do": "hang", "at": 0}, 0) for _ in range(16))]
        good.replies.append({"role": "assistant", "content": "a"})
        step_all(pool, [good])
        process = pool._workers[0].process.pid
        step_all(pool, late)
        assert {session.status for session in late} == {"timeout"}
        assert pool._workers[0].process.pid != process
        good.replies.append({"role": "assistant", "content": "bb"})
        step_all(pool, sessions)
        assert (
            not good.failure
            and texts(good) == ["", "1:a"]
            and [step.done for step in good.steps] == [False, False, True]
        )
        good.ended = True
        step_all(pool, sessions)


@pytest.mark.parametrize("do", ["die", "hang"])
def test_of_several_calls_under_way_in_a_process_that_dies_the_guilty_one_is_found(do, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ASYNC_GRACE_S", 0.5)  # a process that hangs cannot stop the call itself
    INCIDENTS.open(str(tmp_path))
    with pool_of("AsyncEcho") as pool:
        guilty = {"prompt": "1", "do": do, "at": 1, "waits": 0.3}
        sessions = play(pool, *[guilty if i == 1 else {"prompt": str(i), "waits": 0.6} for i in range(4)])
    assert [bool(session.failure) for session in sessions] == [False, True, False, False]
    assert [texts(session) for session in (sessions[0], sessions[3])] == [["0", "1:a"], ["3", "1:a"]]
    INCIDENTS.close()
    roles = {one.role for one in read_incidents(str(tmp_path))}
    assert roles == ({"environment"} if do == "die" else set())


def test_a_process_that_is_stopped_while_it_starts_is_replaced(tmp_path):
    INCIDENTS.open(str(tmp_path))
    with pool_of("Echo", timeout_s=1.0) as pool:
        reaper = psutil.Process(pool._workers[0].process.pid)
        wait_until(lambda: bool(reaper.children()))
        reaper.children()[0].suspend()
        assert texts(*play(pool, {"prompt": "x"})) == ["x", "1:a"]
    INCIDENTS.close()
    assert ["stopped by a signal" in one.text for one in read_incidents(str(tmp_path))] == [True]


GOOD = [{"role": "user", "content": "x"}]


def test_long_answers_are_cut_before_they_reach_the_driver():
    """An answer of many megabytes would take gigabytes there. No token of what is cut fits a prompt."""
    with pool_of("Wrong", most_characters=10, timeout_s=60) as pool:
        messages = [{"role": "user", "content": text, "x": 1} for text in ("é" * 6, "y" * 3_000_000, "z", "")]
        (session,) = play(pool, {"reset": messages, "step": {"messages": GOOD, "done": True}}, turns=1)
    assert not session.failure and list(session.steps[0].messages[0]) == ["role", "content", "x"]
    cut = ["é" * 6, "yyyy… (2,999,996 more characters)", "… (1 more characters)", ""]
    assert texts(session)[:4] == cut and texts(session)[4:] == [GOOD[0]["content"]]


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"reset": []}, "reset returned a wrong value (in environments.py:"),
        ({"reset": GOOD, "step": None}, "step returned a wrong value (in environments.py:"),
    ],
)
def test_what_is_no_answer_fails_its_episode(row, reason):
    """`test_worker.py` has all that is refused."""
    with pool_of("Wrong") as pool:
        (session,) = play(pool, row)
    assert session.status == "failed" and session.failure.startswith(reason)


@pytest.mark.parametrize(
    "code, reason", [("raise ValueError('no')", "ValueError: no"), ("import os; os._exit(4)", "exit status 4")]
)
def test_processes_that_cannot_start_end_the_run(code, reason, tmp_path, monkeypatch):
    (tmp_path / "broken_world.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pool_of("broken_world:World") as pool, pytest.raises(WorkerError, match=reason):
        step_all(pool, [Session({}, 0)])


def test_nothing_is_left_when_the_pool_is_closed():
    with pool_of("Echo", num_processes=2) as pool:
        play(pool, {})
        processes = [psutil.Process(worker.process.pid) for worker in pool._workers]
    assert not any(process.is_running() for process in processes)
