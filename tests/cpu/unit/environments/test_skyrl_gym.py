"""Environments of the package skyrl-gym."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import registry

from trainer.environments.base import Environment, StepResult, check_options
from trainer.environments.skyrl_gym import SkyRLGym
from trainer.environments.worker import EnvironmentHandler
from trainer.errors import UserError

NAME = "trainer.environments.skyrl_gym:SkyRLGym"
ROW = {
    "prompt": [{"role": "user", "content": "What is 3 times 24?"}],
    "reward_spec": {"method": "rule", "ground_truth": "72"},
    "extra_info": {},
}


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_an_environment_of_one_turn():
    environment: Environment = SkyRLGym("gsm8k")
    assert environment.reset(ROW, 1) == ROW["prompt"]
    assert environment.step(reply("it is #### 72")) == StepResult([], 1.0, True)
    environment.close()


def test_an_environment_of_several_turns_gets_the_columns_of_the_row():
    environment = SkyRLGym("gsm8k_multi_turn", max_turns=3)
    environment.reset(ROW, 1)
    first = environment.step(reply("#### 71"))
    assert not first.done and first.reward == pytest.approx(0.2 / 3) and "#### ANSWER" in first.messages[0]["content"]
    last = environment.step(reply("#### 72"))
    assert last == StepResult([], 1.0, True, metrics={"steps": 2.0})


class Multiply(BaseTextEnv):
    """An environment as people write them: registered nowhere."""

    closed = False

    def __init__(self, env_config: Any, extras: dict[str, Any], bonus: float = 0.0):
        super().__init__()
        self.answer, self.bonus, self.max_turns = extras["answer"], bonus, extras["max_turns"]

    def init(self, prompt: list[dict[str, str]]) -> Any:
        return [{"role": "system", "content": "Multiply."}, *prompt], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done = action == self.answer or self.turns == self.max_turns
        observations = [] if done else [{"role": "user", "content": "No."}]
        return BaseTextEnvStepOutput(
            observations=observations, reward=float(action == self.answer) + self.bonus, done=done, metadata={"x": "y"}
        )

    def close(self) -> None:
        Multiply.closed = True


def test_an_environment_by_import_path_in_its_process():
    options = {"id": f"{__name__}:Multiply", "bonus": 0.5, "max_turns": 2}
    handler = EnvironmentHandler(NAME, options, 3.0, 1000)

    def call(*words: Any) -> Any:
        return asyncio.run(handler.compute([0, *words]))

    row = {"prompt": "3*4", "answer": "12"}
    assert [message["content"] for message in call("reset", row, 1)["messages"]] == ["Multiply.", "3*4"]
    assert call("step", reply("11")) == {
        "messages": [{"role": "user", "content": "No."}],
        "reward": 0.5,
        "done": False,
        "rewards": {},
        "metrics": {},
        "state": None,
        "player": "",
        "player_rewards": {},
    }
    assert call("step", reply("12"))["reward"] == 1.5
    call("close")
    assert Multiply.closed


def test_rows_may_name_their_environment():
    environment = SkyRLGym()
    environment.reset({**ROW, "env_class": "gsm8k"}, 1)
    assert environment.step(reply("#### 72")).reward == 1.0


def test_an_environment_that_does_not_exist_is_refused_before_the_start():
    with pytest.raises(UserError, match="skyrl-gym has no environment gsm9k; did you mean gsm8k"):
        check_options(NAME, {"id": "gsm9k"})
    check_options(NAME, {"id": "gsm8k"})
    check_options(NAME, {})


def test_a_row_may_not_name_code_to_import():
    """Data comes from others."""
    with pytest.raises(PermissionError, match="env_class=subprocess:Popen: a row may name .*environment.kwargs.id"):
        SkyRLGym().reset({**ROW, "env_class": "subprocess:Popen"}, 1)


class Configured(Multiply):
    """An environment that reads its settings as SkyRL gives them."""

    def __init__(self, env_config: Any, extras: dict[str, Any]):
        super().__init__(env_config, extras, env_config.bonus + env_config.get("more", 0.0))


def test_an_environment_reads_its_settings_by_name():
    environment = SkyRLGym(f"{__name__}:Configured", max_turns=2, env_config={"bonus": 0.25})
    environment.reset({"prompt": "3*4", "answer": "12"}, 1)
    assert environment.step(reply("12")).reward == 1.25


@pytest.mark.parametrize("name", ["lcb", "searchcode", "text2sql"])
def test_an_environment_that_runs_programs_of_the_policy_is_refused_unless_it_is_allowed(name):
    with pytest.raises(UserError, match=f"{name} runs programs of the policy .*environment.kwargs.allow_code=true"):
        check_options(NAME, {"id": name})
    with pytest.raises(PermissionError, match=name):
        SkyRLGym().reset({**ROW, "env_class": name}, 1)
    check_options(NAME, {"id": name, "allow_code": True})
    with pytest.raises(UserError, match="runs programs of the policy"):
        check_options(NAME, {"id": registry[name].entry_point})
