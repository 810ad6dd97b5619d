"""Environments of the package verifiers, which runs in a virtual environment of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.verifiers import shared_venv
from trainer.config import EnvironmentConfig
from trainer.environments.preflight import check_environment
from trainer.environments.sessions import EnvironmentPool, Session
from trainer.errors import UserError

pytestmark = pytest.mark.processes

NAME = "trainer.environments.verifiers:Verifiers"
TOOLS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    pass

class Lookup(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def look(self) -> str:
        return "1"

class ToolTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    #ToolTask
    pass

class Tools(vf.Taskset[ToolTask, vf.TasksetConfig]):
    #Tools
    def load(self):
        yield ToolTask(Data(prompt="Look."), self.config.task)

__all__ = ["Tools"]
"""

PHOTOS = """
import verifiers.v1 as vf
from mcp.server.mcpserver import Image

class Photos(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def photo(self, name: str):
        \"\"\"Return a photo.\"\"\"
        return Image(data=b"x", format="png")

if __name__ == "__main__":
    Photos.run()
"""
GUARDED = """
import verifiers.v1 as vf
from photos import Photos

class Data(vf.TaskData):
    pass

class GuardedTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.intercept
    async def refuse(self, request: vf.Request):
        last = request.messages[-1]
        if last.role == "tool" and last.content == "" and "secret" in request.messages[-2].tool_calls[0].arguments:
            messages = [*request.messages[:-1], last.model_copy(update={"content": "Not that one."})]
            return request.model_copy(update={"messages": messages})

class Guarded(vf.Taskset[GuardedTask, vf.TasksetConfig]):
    toolsets = classmethod(lambda cls, config: [Photos(vf.SharedToolsetConfig())])

    def load(self):
        yield GuardedTask(Data(prompt="Look."), self.config.task)

__all__ = ["Guarded"]
"""


@pytest.fixture(scope="module")
def python(shared_directory) -> str:
    return shared_venv(shared_directory)


def config(python: str, **kwargs: object) -> EnvironmentConfig:
    return EnvironmentConfig(name=NAME, kwargs=kwargs, python=python, timeout_s=300.0)


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_tasks_of_verifiers_are_played_at_the_same_time(python):
    sessions = [Session({"task": number}, 1) for number in (1, 2, 7)]
    with EnvironmentPool(config(python, id="guess"), 1000) as pool:
        pool.step_all(sessions)
        first, second, missing = sessions
        assert [message["content"] for message in first.steps[0].messages] == ["Play.", "Guess 1."], first.failure
        assert "the row asks for the task 7; the taskset has 3" in missing.failure
        for session, text in ((first, "It is 1."), (second, "It is 1.")):
            session.replies.append(reply(text))
        pool.step_all(sessions)
        assert first.steps[-1].done and dict(first.steps[-1].rewards) == {"right": 1.0, "short": 0.0}
        assert list(second.steps[-1].messages) == [{"role": "user", "content": "No."}]
        second.replies.append(reply("2"))
        pool.step_all(sessions)
        assert second.reward == 1.5 and second.total("metrics") == {"replies": 2.0}
        for session in sessions:
            session.ended = True
        pool.step_all(sessions)


def test_a_start_that_fails_is_tried_again_in_the_same_process(python, tmp_path, monkeypatch):
    monkeypatch.setenv("FIRST_START", str(tmp_path / "first"))
    session = Session({"task": 1}, 1)
    with EnvironmentPool(config(python, id="guess"), 1000) as pool:
        process = pool._workers[0].process.pid
        pool.step_all([session])
        assert pool._workers[0].process.pid == process
    assert (tmp_path / "first").exists() and session.failures == 1 and not session.failure


def call(name: str, /, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_tools_of_tasks_and_of_a_taskset_are_called_and_rewards_are_those_of_verifiers(python):
    """Each task has a basket of its own; the server of prices is shared. Their schemas are in the first message."""
    first, second = sessions = [Session({"task": number}, 1) for number in (0, 1)]
    with EnvironmentPool(config(python, id="shop"), 10_000) as pool:
        pool.step_all(sessions)
        system, user = first.steps[0].messages
        assert (system["without_tools"], user) == ("You shop.", {"role": "user", "content": "Buy a pen."}), first
        names = [tool["function"]["name"] for tool in system["tools"]]
        assert names == ["price", "basket_buy"] and all(name in system["content"] for name in names)
        assert system["tools"][1]["function"]["parameters"]["properties"]["price"]["type"] == "integer"
        first.replies.append(reply("Hm. " + call("price", item="pen")))
        second.replies.append(reply(call("price", item="cup") + call("basket_buy", price=4)))
        pool.step_all(sessions)
        price = {"role": "tool", "tool_call_id": "call_0", "name": "price"}
        assert list(first.steps[-1].messages) == [price | {"content": "3"}], first.failure
        spent = {"role": "tool", "tool_call_id": "call_1", "name": "basket_buy", "content": "spent 4"}
        assert list(second.steps[-1].messages) == [price | {"content": "5"}, spent], second.failure
        first.replies.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "any", "type": "function", "function": {"name": "basket_buy", "arguments": {"price": 3}}}
                ],
            }
        )
        second.replies.append(reply(call("basket_buy", price=6) + call("sell") + call("basket_buy", price="x")))
        pool.step_all(sessions)
        assert [one["content"] for one in first.steps[-1].messages] == ["spent 3"], first.failure
        dear, unknown, wrong = (one["content"] for one in second.steps[-1].messages)
        assert "too expensive" in dear and unknown == "error: unknown tool 'sell'" and "valid integer" in wrong
        first.replies.append(reply("I spent 3."))
        second.replies.append(reply("I spent 4. <tool_call>{broken"))
        pool.step_all(sessions)
        assert first.steps[-1].done and dict(first.steps[-1].rewards) == {"bought": 1.0, "says": 0.5}
        assert second.steps[-1].done and dict(second.steps[-1].rewards) == {"bought": 0.0, "says": 0.5}
        assert first.total("metrics") == second.total("metrics") == {"replies": 3.0}
        for session in sessions:
            session.ended = True
        pool.step_all(sessions)


def install(python: str, name: str, source: str) -> None:
    (packages,) = Path(python).parents[1].glob("lib/python*/site-packages")
    (packages / f"{name}.py").write_text(source)


def test_hooks_of_a_task_deny_calls_and_an_image_ends_the_episode(python):
    install(python, "photos", PHOTOS)
    install(python, "guarded", GUARDED)
    session = Session({"task": 0}, 1)
    with EnvironmentPool(config(python, id="guarded"), 10_000) as pool:
        pool.step_all([session])
        session.replies.append(reply(call("photos_photo", name="secret")))
        pool.step_all([session])
        assert [one["content"] for one in session.steps[-1].messages] == ["Not that one."], session.failure
        session.replies.append(reply(call("photos_photo", name="cat")))
        pool.step_all([session])
    assert "a message of the role tool has image_url, and the policy reads text alone" in session.failure


@pytest.mark.parametrize("owner", ["ToolTask", "Tools"])
def test_tools_in_containers_are_refused_before_the_run(python, owner):
    """Tools of each task, or shared by all tasks."""
    name = f"tools_{owner.lower()}"
    lookup = "[Lookup(vf.ToolsetConfig(runtime={'type': 'docker', 'image': 'python:3.12'}))]"
    install(python, name, TOOLS.replace(f"#{owner}", f"toolsets = classmethod(lambda cls, config: {lookup})"))
    with pytest.raises(UserError, match=f"the tools Lookup of {name} run in a container .runtime docker., which noth"):
        check_environment(config(python, id=name))


def test_tasks_in_containers_are_refused_before_the_run(python):
    install(python, "contained", TOOLS.replace("#ToolTask", "NEEDS_CONTAINER = True"))
    with pytest.raises(UserError, match="the tasks of contained run in a container"):
        check_environment(config(python, id="contained"))


def test_a_taskset_that_is_not_installed_is_refused(python):
    with pytest.raises(UserError, match="environment.kwargs: .* taskset 'guessing' not found"):
        check_environment(config(python, id="guessing"))
