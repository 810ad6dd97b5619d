"""Environments of the package verifiers, which runs in a virtual environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.test_packaging import tool
from trainer.config import EnvironmentConfig
from trainer.environments.preflight import check_environment
from trainer.environments.sessions import EnvironmentPool, Session
from trainer.errors import UserError

pytestmark = pytest.mark.processes

NAME = "trainer.environments.verifiers:Verifiers"
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
REQUIREMENTS = Path(__file__).with_name("verifiers-requirements.txt")

GUESS = '''
import verifiers.v1 as vf

class Data(vf.TaskData):
    secret: str

class GuessTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task, trace):
        return float(self.data.secret in trace.branches[-1].messages[-1].content)

    @vf.reward(weight=0.5)
    async def short(self, task, trace):
        return float(len(trace.branches[-1].messages[-1].content) < 5)

    @vf.metric
    async def replies(self, task, trace):
        return float(trace.num_turns)

class Guess(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for number in range(3):
            data = Data(prompt=f"Guess {number}.", system_prompt="Play.", secret=str(number))
            yield GuessTask(data, self.config.task)

class GuessConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()

class GuessEnv(vf.Env[GuessConfig]):
    """A user who says no until the number is right."""

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and task.data.secret not in segment.last_reply:
                segment = await interaction.turn("No.")

__all__ = ["Guess", "GuessEnv"]
'''


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    """The interpreter of a virtual environment with verifiers."""
    if UV is None:
        pytest.skip("no uv; `make setup` installs it")
    root = tmp_path_factory.mktemp("venv")
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, root], check=True, timeout=60)
    set_up = tool("install")
    options, environment = set_up.uv_options(set_up.pip_settings([sys.executable, "-m", "pip"]))
    install = [UV, "pip", "install", "--quiet", "--no-deps", *options, "--python", root / "bin/python"]
    done = subprocess.run([*install, "-r", REQUIREMENTS], env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"verifiers cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    (packages,) = root.glob("lib/python*/site-packages")
    (packages / "guess.py").write_text(GUESS)
    return str(root / "bin" / "python")


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


def test_a_taskset_that_is_not_installed_is_refused(python):
    with pytest.raises(UserError, match="environment.kwargs: .* taskset 'guessing' not found"):
        check_environment(config(python, id="guessing"))
