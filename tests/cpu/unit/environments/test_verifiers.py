"""Environments of the package verifiers, which runs in a virtual environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.verifiers import make_venv
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


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    return make_venv(tmp_path_factory.mktemp("venv"))


def config(python: str, **kwargs: object) -> EnvironmentConfig:
    return EnvironmentConfig(name=NAME, kwargs=kwargs, python=python, timeout_s=60.0)


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


@pytest.mark.parametrize("owner", ["ToolTask", "Tools"])
def test_a_taskset_with_tools_is_refused_before_the_run(python, owner):
    """Tools of each task, or shared by all tasks."""
    name = f"tools_{owner.lower()}"
    (packages,) = Path(python).parents[1].glob("lib/python*/site-packages")
    lookup = "[Lookup(vf.ToolsetConfig())]"
    source = TOOLS.replace(f"#{owner}", f"toolsets = classmethod(lambda cls, config: {lookup})")
    (packages / f"{name}.py").write_text(source)
    with pytest.raises(UserError, match=f"the tasks of {name} have tools, which only an agent can call"):
        check_environment(config(python, id=name))


def test_a_taskset_that_is_not_installed_is_refused(python):
    with pytest.raises(UserError, match="environment.kwargs: .* taskset 'guessing' not found"):
        check_environment(config(python, id="guessing"))
