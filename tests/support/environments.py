"""Environments for tests. What one does is in its row, so that its process needs to know nothing."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.environments import Message, StepResult
from trainer.environments.questions import PythonTool
from trainer.environments.tools import ToolEnvironment
from trainer.seeding import derive_seed


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def first_time(path: str) -> bool:
    """Whether this is the first call with this path, over all processes."""
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Echo:
    """Repeats the reply, with its number; done after `row["turns"]` replies. Each reply earns its length.

    `row["at"]` is a reply number at which the environment does `row["do"]`; `row["once"]`, a path, makes it do so only
    the first time.
    """

    def __init__(self, prefix: str = ""):
        self._prefix = prefix
        self._number = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        self._row, self._seed = row, seed
        self._misbehave()
        return user(f"{self._prefix}{row.get('prompt', '')}{seed if row.get('shows_seed') else ''}")

    def step(self, reply: Message) -> StepResult:
        self._number += 1
        self._misbehave()
        text = f"{self._number}:{reply['content']}"
        if self._row.get("do") == "forget" and not first_time(f"{self._row['once']}.{self._number}"):
            text += " again"
        done = self._number >= self._row.get("turns", 2)
        return StepResult([] if done else user(text), float(len(reply["content"])), done)

    def _misbehave(self) -> None:
        row = self._row
        if self._number != row.get("at", -1) or ("once" in row and not first_time(row["once"])):
            return
        match row["do"]:
            case "raise":
                raise RuntimeError("it broke")
            case "exit":
                raise SystemExit(3)
            case "die":
                os._exit(5)
            case "hang":
                time.sleep(1000)
            case "fork":
                os.fork()

    def close(self) -> None:
        if "closed" in self._row:
            assert first_time(self._row["closed"]), "closed twice"


class AsyncEcho(Echo):
    """The same, with methods that wait.

    For `row["waits"]` seconds, until `row["together"]` calls are under way, and until there is the file `row["until"]`.
    """

    waiting = 0
    arrived: asyncio.Event | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        return super().reset(row, seed)

    async def step(self, reply: Message) -> StepResult:
        if self._row.get("do") == "wait" and self._number == self._row["at"] - 1:
            await asyncio.sleep(1000)
        together, kind = self._row.get("together", 0), type(self)
        if self._number == 0:
            await asyncio.sleep(self._row.get("waits", 0))
        while "until" in self._row and not os.path.exists(self._row["until"]):
            await asyncio.sleep(0.01)
        if together and self._number == 0:
            kind.arrived = kind.arrived or asyncio.Event()
            kind.waiting += 1
            if kind.waiting == together:
                kind.arrived.set()
            await kind.arrived.wait()
        return super().step(reply)

    async def close(self) -> None:
        super().close()


class ThreadedEcho(Echo):
    """The same as `Echo`, in threads. The first replies of `row["together"]` episodes are answered together."""

    thread_safe = True
    met: dict[int, threading.Barrier] = {}

    def step(self, reply: Message) -> StepResult:
        if self._number == 0 and "together" in self._row:
            together = self._row["together"]
            self.met.setdefault(together, threading.Barrier(together)).wait()
        return super().step(reply)


class Wrong:
    """Answers with what is no answer: `row["reset"]` and `row["step"]` as they are."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self._row = row
        return row["reset"]

    def step(self, reply: Message) -> Any:
        return StepResult(**self._row["step"]) if isinstance(self._row["step"], dict) else self._row["step"]

    def close(self) -> None:
        pass


def take_effect(service: str, step_id: str, turn: int) -> bool:
    """Have an effect on a service, a directory that knows ids; return whether this is to wait until it is killed.

    The service refuses what it has done already. In turn 37 the caller waits, as long as there is the file `hold`.
    """
    if not first_time(f"{service}/done {step_id}"):
        Path(f"{service}/refused {step_id} {os.urandom(4).hex()}").touch()
    holds = turn == 37 and os.path.exists(f"{service}/hold")
    if holds:
        Path(f"{service}/waits {step_id}").touch()
    return holds


class Effects:
    """Has an effect on a service in each of its 40 steps. Answers as a hash of row, seed and replies says.

    Args:
        is_slow: the steps of some rows take longer.
    """

    def __init__(self, service: str, is_slow: bool = False):
        self._service, self._is_slow = service, is_slow

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        self._said: list[int | str] = [row["prompt"], seed]
        return user(row["prompt"])

    async def step(self, reply: Message, step_id: str) -> StepResult:
        self._said.append(reply["content"])
        turn = len(self._said) - 2
        if self._is_slow:
            await asyncio.sleep(derive_seed(self._said[0]) % 4 * 0.01)
        while take_effect(self._service, step_id, turn):
            await asyncio.sleep(600)
        number = derive_seed(*self._said)
        return StepResult(user(str(number % 1000)), number % 7 / 7, turn == 40)

    def close(self) -> None:
        pass


class SavedEffects(Effects):
    """The same, with its state in the record: its earlier steps are not made again."""

    def save(self) -> bytes:
        return json.dumps(self._said).encode()

    def load(self, state: bytes) -> None:
        self._said = json.loads(state)


class Paid(ToolEnvironment):
    """Has a tool whose answers are recorded, and another one that changes the environment. Both leave files."""

    instructions = ""
    recorded_tools = ("buy",)

    def __init__(self, service: str):
        self._service = service
        self._notes = 4
        self.tools = (self.buy, self.note)

    def _leave(self, kind: str) -> None:
        Path(f"{self._service}/{kind} {os.urandom(4).hex()}").touch()

    def buy(self, text: str) -> str:
        self._leave("buy")
        return f"bought {text}"

    def note(self, text: str) -> str:
        self._leave("note")
        self._notes += 1
        return f"noted {text}"

    def score(self, answer: str, row: Mapping[str, Any]) -> float:
        self._leave("score")
        return float(self._notes)


class Hashed:
    """Answers as a hash of row, seed and replies says.

    Args:
        crashes: a directory. Where given, each second prompt ends its process at its second call, once.
    """

    def __init__(self, crashes: str | None = None):
        self._crashes = crashes

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        self._said: list[int | str] = [row["prompt"], seed]
        return user(row["prompt"])

    async def step(self, reply: Message) -> StepResult:
        self._said.append(reply["content"])
        drawn = derive_seed(*self._said)
        await asyncio.sleep(drawn % 5 / 1000)
        if (
            self._crashes
            and derive_seed(self._said[0]) % 2 == 0
            and first_time(f"{self._crashes}/{derive_seed(self._said[0])}")
        ):
            os._exit(7)
        return StepResult(user(f"{drawn % 97}"), drawn % 11 / 10, drawn % 4 == 0)

    def close(self) -> None:
        pass


class LongHashed(Hashed):
    """The same, which ends nearly always at the limit of turns."""

    async def step(self, reply: Message) -> StepResult:
        answer = await super().step(reply)
        return StepResult(answer.messages, answer.reward, answer.done and len(self._said) % 13 == 0)


class Dawdling(Hashed):
    """The same, after up to 30 ms, which differ each time."""

    async def step(self, reply: Message) -> StepResult:
        await asyncio.sleep(os.urandom(1)[0] / 255 * 0.03)
        return await super().step(reply)


class Threaded(Hashed):
    """The same, with methods that block, in threads."""

    thread_safe = True

    def step(self, reply: Message) -> StepResult:  # type: ignore[override]
        time.sleep(os.urandom(1)[0] / 255 * 0.03)
        return asyncio.run(super().step(reply))


class Programs(ToolEnvironment):
    """Takes every reply for a call of the tool `python`. Otherwise it answers as `Hashed` does."""

    instructions = ""

    def __init__(self, crashes: str | None = None):
        self._hashed = Hashed(crashes)
        self.tools = (PythonTool(time_s=100.0).python,)

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        self._hashed.reset(row, seed)
        return await super().reset(row, seed)

    async def step(self, reply: Message) -> StepResult:
        answered = await self._hashed.step(reply)
        code = f"import random\nprint({derive_seed(reply['content']) % 89} + random.randrange(10))"
        call = json.dumps({"name": "python", "arguments": {"code": code}})
        made = await super().step({**reply, "content": f"<tool_call>{call}</tool_call>"})
        return StepResult(made.messages, answered.reward, answered.done, metrics=made.metrics)


class Valued:
    """Returns the steps of `row["steps"]`, as the fields of a `StepResult`; the texts in `VALUES` stand for values."""

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        self._steps = [dict(step) for step in row["steps"]]
        return user("?")

    def step(self, reply: Message) -> StepResult:
        given = self._steps.pop(0)
        for name, value in given.items():
            given[name] = {k: _value(v) for k, v in value.items()} if isinstance(value, dict) else _value(value)
        return StepResult([] if not self._steps else user("?"), done=not self._steps, **given)

    def close(self) -> None:
        pass


def _value(name: Any) -> Any:
    from tests.support.bad_rewards import BAD, NUMBERS

    return {**{k: v[0] for k, v in BAD.items()}, **NUMBERS}[name]() if isinstance(name, str) else name


def toss() -> str:
    """Return other digits each time."""
    return os.urandom(4).hex()


class Random(ToolEnvironment):
    """Takes every reply for a call of a tool whose answers, and rewards, are others each time."""

    instructions = ""
    tools = (toss,)

    async def step(self, reply: Message) -> StepResult:
        made = await super().step({**reply, "content": '<tool_call>{"name": "toss"}</tool_call>'})
        chance = os.urandom(2)
        return StepResult(made.messages, chance[0] / 255, done=chance[1] % 3 == 0, metrics=made.metrics)


class Duel:
    """Two players reply in turn, `row["turns"]` times in all, and hear each other. x wins. Each reply earns 0.25.

    With `stops`, a path, the second reply to a row with `stops` waits the first time. What x wins may be a hash.
    """

    players = ("x", "o")

    def __init__(self, stops: str | None = None, is_hashed: bool = False):
        self._stops, self._is_hashed = stops, is_hashed

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        self._row, self._said = row, 0
        return user("x begins")

    def step(self, reply: Message) -> StepResult:
        self._said += 1
        if self._said == 2 and self._stops and self._row.get("stops") and first_time(self._stops):
            time.sleep(60)
        if self._said == self._row["turns"]:
            won = derive_seed(reply["content"]) % 8 / 8 if self._is_hashed else 1.0
            return StepResult([], 0.25, True, player_rewards={"x": won, "o": -won})
        player = self._row.get("player", "xo"[self._said % 2])
        return StepResult(user(f"{player} hears {reply['content']}"), 0.25, player=player)

    def close(self) -> None: ...
