"""How the calls of environments are made in their process, and which of their answers are refused."""

from __future__ import annotations

import asyncio
import inspect
import json
import queue
import threading
from typing import Any

import pytest

from trainer.environments import StepResult
from trainer.environments.worker import RESERVED, EnvironmentHandler, WrongValueError, largest_message
from trainer.errors import UserError

HERE = __name__
USER = {"role": "user", "content": "hello"}
DEEP = json.loads("[" * 60 + "]" * 60)


class Scripted:
    """Answers `reset` and `step` with what its row says."""

    closed: list[str] = []

    def __init__(self, name: str = "one"):
        self.name = name

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        self.row = row
        return row.get("reset", [USER])

    def step(self, reply: dict[str, Any]) -> Any:
        return StepResult(**self.row["step"]) if isinstance(self.row["step"], dict) else self.row["step"]

    def close(self) -> None:
        self.closed.append(self.name)


class Waiting(Scripted):
    async def step(self, reply: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        return super().step(reply)


class Late(Scripted):
    """Its steps end when `EVENT` is set."""

    thread_safe = True

    def step(self, reply: dict[str, Any]) -> Any:
        BEGUN.put(threading.current_thread())
        EVENT.wait(60)
        return StepResult(done=True)


BEGUN: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
EVENT = threading.Event()


class Earlier:
    def start(self, row: Any, seed: int) -> None: ...


def handler(kind: str = "Scripted", most_characters: int = 1000, **options: Any) -> EnvironmentHandler:
    return EnvironmentHandler(f"{HERE}:{kind}", options, 3.0, most_characters)


def answer(row: dict[str, Any], *calls: str, kind: str = "Scripted", most_characters: int = 1000) -> dict[str, Any]:
    """The answer to the last of `reset` and these further calls."""
    ours = handler(kind, most_characters)
    result = asyncio.run(ours.compute([0, "reset", row, 7]))
    for call in calls:
        result = asyncio.run(
            ours.compute([0, call, *([{"role": "assistant", "content": "x"}] if call == "step" else [])])
        )
    return result


def test_an_answer_has_the_fields_of_a_step():
    step = {"messages": [USER], "reward": 1, "rewards": {"form": 2}, "metrics": {"calls/a": 3}}
    expected = {"messages": [USER], "reward": 1.0, "rewards": {"form": 2.0}, "metrics": {"calls/a": 3.0}, "done": False}
    expected |= {"state": None, "player": "", "player_rewards": {}}
    for kind in ("Scripted", "Waiting"):
        assert answer({"step": step}, "step", kind=kind) == expected
    assert answer({})["messages"] == [USER]


def test_only_an_environment_with_async_methods_runs_beside_others():
    assert handler("Waiting").is_concurrent and not handler("Scripted").is_concurrent
    assert handler().limit_s([0, "reset"]) == 3.0


def test_a_blocking_environment_runs_in_a_thread_and_several_only_if_its_class_allows_it():
    assert handler("Late").is_concurrent and not handler("Scripted").is_concurrent
    EVENT.set()
    answer({}, "step", kind="Late")
    assert BEGUN.get(timeout=60) is not threading.main_thread()


class LateAlone(Late):
    thread_safe = False


@pytest.mark.parametrize("kind", ["Late", "LateAlone"])
def test_an_environment_whose_call_was_given_up_is_not_called_again(monkeypatch, kind):
    """A thread still has it. Where only one call runs at a time, the process must end."""
    monkeypatch.setattr(Scripted, "closed", [])
    EVENT.clear()
    while not BEGUN.empty():  # of steps that ended before
        BEGUN.get()

    async def give_up() -> None:
        ours = handler(kind)
        await ours.compute([0, "reset", {}, 7])
        call = asyncio.ensure_future(ours.compute([0, "step", {}]))
        await asyncio.to_thread(BEGUN.get, timeout=60)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert ours.must_end == (kind == "LateAlone") and ours._environments == {}
        EVENT.set()
        await ours.compute([0, "reset", {}, 7])
        assert (await ours.compute([0, "step", {}]))["done"]
        await ours.compute([0, "close"])
        assert Scripted.closed == ["one"]

    asyncio.run(give_up())


def test_environments_have_their_options_and_are_closed_once():
    Scripted.closed.clear()
    ours = handler(name="two")
    for number in (0, 1):
        asyncio.run(ours.compute([number, "reset", {}, 0]))
    asyncio.run(ours.compute([0, "reset", {}, 0]))  # its episode begins again
    assert Scripted.closed == ["two"]
    for _ in range(2):
        assert asyncio.run(ours.compute([1, "close"])) == {}
    assert Scripted.closed == ["two", "two"]


def test_an_error_in_init_is_not_that_of_the_first_method():
    ours, call = handler(wrong="x"), [0, "reset", {}, 0]
    with pytest.raises(Exception) as raised:
        asyncio.run(ours.compute(call))
    said = ours.describe(raised.value, call)
    assert said.startswith("was not called, because __init__ raised TypeError: ") and "'wrong'" in said
    assert ours.describe(ValueError("no"), call) == "raised ValueError: no"


def test_messages_that_the_policy_cannot_see_are_refused():
    for messages, error in [
        ("x", "TypeError: messages must be a list of dicts with role and content, not 'x'"),
        ([1], "TypeError: messages must be a list of dicts"),
        ([], "ValueError: there is no message"),
        ([{"role": "user"}], "TypeError: a message must have a text content: {'role': 'user'}"),
        ([{"role": 1, "content": "x"}], "TypeError: a message must have a text role"),
        ([{**USER, "content": "\ud800"}], "UnicodeEncodeError: "),
        ([USER] * 1025, "ValueError: there are 1025 messages; a step has at most 1024"),
        ([{**USER, "more": "x" * (1 << 20)}], "ValueError: the messages hold 10486"),
        ([{**USER, "more": DEEP}], "ValueError: the messages are nested too deeply"),
        ([{**USER, "more": {1, 2}}], "TypeError: Object of type set is not JSON serializable"),
    ]:
        with pytest.raises(WrongValueError) as raised:
            answer({"reset": messages})
        at, _, said = str(raised.value).partition("): ")
        line = inspect.getsourcelines(Scripted.reset)[1]
        assert at == f"returned a wrong value (in test_worker.py:{line}"
        assert f"{type(raised.value.__cause__).__name__}: {said}".startswith(error)


def test_steps_that_are_none_are_refused():
    for step, error in [
        (None, r"it must be a trainer.environments.StepResult\(messages, reward, done\), not NoneType"),
        ({"messages": []}, "there is no message, and the episode is not done; return a message, or done=True"),
        ({"messages": [USER], "reward": "nan"}, "reward is a str, which is not a number"),
        ({"done": True, "rewards": {"a b": 1}}, "rewards: returned a term called 'a b'"),
        ({"done": True, "metrics": {"turns": 1}}, "metrics: turns is counted for every environment; choose another"),
    ]:
        assert {"turns", "tokens"} == RESERVED
        with pytest.raises(WrongValueError, match=f": {error}"):
            answer({"step": step}, "step")


def test_the_last_step_needs_no_message():
    assert answer({"step": {"done": True}}, "step")["messages"] == []


def test_contents_are_cut_after_the_characters_that_a_prompt_can_have():
    contents = ["é" * 6, "y" * 10, "z", ""]
    found = answer({"reset": [{**USER, "content": text} for text in contents]}, most_characters=10)["messages"]
    cut = ["é" * 6, "yyyy… (6 more characters)", "… (1 more characters)", ""]
    assert [message["content"] for message in found] == cut


def test_the_largest_answer_fits_into_the_largest_message():
    """A character beyond the basic plane takes 12 bytes of JSON."""
    found = answer({"reset": [{**USER, "content": "\U0001f600" * 1000}]}, most_characters=1000)
    assert len(json.dumps(found)) <= largest_message(1000)


def test_a_class_without_the_methods_of_an_environment_is_refused():
    with pytest.raises(UserError, match="^environment.name=.*:Earlier: the class has no method `reset`"):
        handler("Earlier")
