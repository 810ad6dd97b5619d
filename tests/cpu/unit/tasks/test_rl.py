"""What the task `rl` refuses before anything expensive starts, and what it keeps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.runs import configured
from trainer.config import TASKS, Config, DataConfig, EnvironmentConfig, RewardConfig
from trainer.config.command_line import unread_words
from trainer.config.data import SourceConfig, ValSetConfig
from trainer.errors import UserError
from trainer.models.tiny import TinyShape, build_tiny
from trainer.rewards.scorer import RankScorer
from trainer.tasks.rl import build, config_scorer, sample_episodes

pytestmark = pytest.mark.processes  # `check_inputs` tries functions in sandboxes
HERE = __name__
FAILS = "tests.support.named_rewards:broken"
"""A reward in a module that its process imports in a moment."""
SMALL = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1)
TASK = replace(TASKS["rl"], reward_functions=False)


@pytest.fixture
def cfg(tmp_path) -> Config:
    cfg = configured(tmp_path / "run", {"data.synthetic": "reverse_text", "data.train_size": 8, "data.val_size": 4})
    cfg.reward.name = "reverse_text"
    cfg.model.cache_dir = str(tmp_path / "cache")
    return cfg


def test_inputs_that_can_be_used_are_accepted(cfg):
    build(cfg).check_inputs(asks_servers=True)


@pytest.mark.parametrize(
    ("section", "key", "value", "sentence"),
    [
        ("reward", "name", "no.such:reward", "reward.name=no.such:reward"),
        ("data", "curriculum", "no.such:curriculum", "data.curriculum=no.such:curriculum"),
        (
            "data",
            "curriculum",
            "math:sqrt",
            "data.curriculum=math:sqrt: too many positional arguments; it gets prompts, epoch and rewards",
        ),
        ("environment", "name", "no.such:World", "environment.name=no.such:World"),
        ("model", "path", "/no/such/model", "model.path=/no/such/model"),
    ],
)
def test_what_cannot_be_imported_or_read_is_refused_by_its_key(cfg, section, key, value, sentence):
    setattr(getattr(cfg, section), key, value)
    with pytest.raises(UserError) as refused:
        build(cfg).check_inputs(asks_servers=True)
    assert str(refused.value).startswith(sentence)


def test_ranks_cannot_give_rewards_while_they_train(cfg):
    cfg.rollout.ahead = 1
    given = SimpleNamespace(cfg=cfg)
    with pytest.raises(UserError, match="^rollout.ahead=1: the ranks cannot give rewards while they train; choose 0$"):
        sample_episodes(given, make_scorer=lambda given: RankScorer("reward", lambda role, samples: []))


def test_all_that_is_wrong_is_listed_together(cfg):
    cfg.reward.name, cfg.model.path = "no.such:reward", "/no/such/model"
    with pytest.raises(UserError) as refused:
        build(cfg).check_inputs(asks_servers=True)
    first, *others = str(refused.value).splitlines()
    assert first == "the run cannot start:"
    assert [line.strip().partition("=")[0] for line in others] == ["reward.name", "model.path"]


def test_each_source_of_a_mix_is_checked_and_its_keys_are_named(cfg, tmp_path):
    """A source that has no reward of its own has that of the run."""
    cfg.data = DataConfig(
        mix={
            "math": SourceConfig(synthetic="arithmetic", size=4, reward=RewardConfig(name="no.such:reward")),
            "games": SourceConfig(files=["none.jsonl"], environment=EnvironmentConfig(name="no.such:World")),
            "words": SourceConfig(synthetic="reverse_text", size=4, reward=cfg.reward, curriculum="no.such:order"),
        }
    )
    cfg.trainer.val_interval = -1
    with pytest.raises(UserError) as refused:
        build(cfg).check_inputs(asks_servers=True)
    _, *listed = str(refused.value).splitlines()
    assert [line.strip().partition("=")[0] for line in listed] == [
        "data.mix.games.environment.name",
        "data.mix.math.reward.name",
        "data.mix.words.curriculum",
        "data.mix.games.files",
    ]


def test_an_episode_that_the_model_cannot_read_is_refused(cfg, tmp_path):
    cfg.model.path = str(tmp_path / "model")
    build_tiny(replace(SMALL, max_position_embeddings=256), cfg.model.path)
    environment = EnvironmentConfig(name="tests.support.retry:RetryEnv", max_tokens=257)
    cfg.data = DataConfig(mix={"again": SourceConfig(synthetic="arithmetic", size=4, environment=environment)})
    cfg.trainer.val_interval = -1
    with pytest.raises(
        UserError, match=r"^data.mix.again.environment.max_tokens=257: model.path=\S+ reads at most 256 t"
    ):
        build(cfg).check_inputs(asks_servers=True)
    environment.max_tokens = 256
    build(cfg).check_inputs(asks_servers=True)


def test_the_rewards_of_all_sources_are_tried(cfg):
    cfg.data = DataConfig(
        mix={"math": SourceConfig(synthetic="arithmetic", size=4, reward=RewardConfig(name="arithmetic"))}
    )
    cfg.trainer.val_interval = -1
    build(cfg).check_inputs(asks_servers=True)
    cfg.data.mix["bad"] = SourceConfig(synthetic="arithmetic", size=4, reward=RewardConfig(name=FAILS))
    with pytest.raises(UserError, match=f"^data.mix.bad.reward.name={FAILS}: fails for the first 3 rows"):
        build(cfg).check_inputs(asks_servers=True)


def test_a_reward_that_fails_for_the_first_rows_is_refused(cfg):
    cfg.reward.name = FAILS
    with pytest.raises(UserError, match=f"^reward.name={FAILS}: fails for the first 3 rows of the data"):
        build(cfg).check_inputs(asks_servers=True)


def test_the_environments_of_all_sources_are_tried(cfg, tmp_path):
    """Each with the first row of a source that has it. The run's own answers the rows of its validation files."""
    good, bad = (EnvironmentConfig(name=f"tests.support.environments:{name}") for name in ("Echo", "Wrong"))

    def refused(key: str, reason: str) -> None:
        with pytest.raises(UserError, match=f"^{key}=tests.support.environments:Wrong: fails for the .* {reason}"):
            build(cfg).check_inputs(asks_servers=True)

    cfg.environment = bad
    refused("environment.name", "raised KeyError: 'reset'")
    build(cfg).check_inputs(asks_servers=False)  # a report of what a command would do begins no episode
    (tmp_path / "val.jsonl").write_text('{"reset": []}\n')
    mix = {"good": SourceConfig(synthetic="arithmetic", size=4, environment=good)}
    cfg.data = DataConfig(mix=mix, val_files=[str(tmp_path / "val.jsonl")])
    refused("environment.name", "returned a wrong value .*: there is no message")
    cfg.environment = good
    mix["bad"] = SourceConfig(synthetic="arithmetic", size=4, environment=bad)
    refused("data.mix.bad.environment.name", "raised KeyError: 'reset'")
    del mix["bad"]
    cfg.data.val_sets["bad"] = ValSetConfig(synthetic="arithmetic", size=4, environment=bad)
    refused("data.val_sets.bad.environment.name", "raised KeyError: 'reset'")


def test_an_agent_is_imported_and_not_tried(cfg):
    """It would ask the policy, which is not there."""
    cfg.environment = EnvironmentConfig(name="tests.support.agents:OneCall")
    build(cfg).check_inputs(asks_servers=True)
    cfg.environment.kwargs = {"no_such": 1}
    with pytest.raises(UserError, match="^environment.kwargs: tests.support.agents:OneCall: .*no_such"):
        build(cfg).check_inputs(asks_servers=True)


def test_a_server_is_asked_only_when_that_is_wanted(cfg):
    """A report of what a command would do does not cost a request."""
    cfg.reward.name, cfg.reward.url = "remote", "http://127.0.0.1:9/score"
    cfg.reward.timeout_s = 0.2
    build(cfg).check_inputs(asks_servers=False)
    with pytest.raises(UserError, match="^reward.name=remote: fails for the first 3 rows"):
        build(cfg).check_inputs(asks_servers=True)


def test_rewards_are_not_tried_where_an_environment_gives_them(cfg):
    cfg.environment.name, cfg.reward.name = "tests.support.retry:RetryEnv", FAILS
    build(cfg).check_inputs(asks_servers=True)


def test_a_task_without_reward_functions_neither_tries_nor_starts_them(cfg):
    cfg.reward.name = FAILS
    given = SimpleNamespace(cfg=cfg, reward_cache=None)
    assert config_scorer(given) is not None
    cfg.trainer.task = f"{HERE}:TASK"
    build(cfg).check_inputs(asks_servers=True)
    assert config_scorer(given) is None
    assert unread_words(["reward.name=x", "reward.on_failure=zero"], cfg) == ["reward.name"]


@pytest.mark.parametrize("name", ["dynamic_sampling", "options.filter_zero_variance"])
def test_without_any_rewards_prompts_cannot_be_chosen_by_them(cfg, name):
    """Nothing is started. With reward functions, a scorer, an environment or penalties, rewards differ."""
    if name == "dynamic_sampling":
        cfg.algorithm.dynamic_sampling = True
    else:
        cfg.algorithm.options["filter_zero_variance"] = True
    given = SimpleNamespace(cfg=cfg, reward_cache=None)
    assert is_built_on(given)
    cfg.trainer.task = f"{HERE}:TASK"
    with pytest.raises(UserError, match=f"^algorithm.{name}=True: keeps .* trainer.task={HERE}:TASK gives no rewards"):
        sample_episodes(given)
    assert is_built_on(given, make_scorer=lambda given: "a scorer")
    cfg.environment.name = "tests.support.retry:RetryEnv"
    assert is_built_on(given)
    cfg.environment.name, cfg.algorithm.overlong_buffer = None, 2
    if name != "dynamic_sampling":
        assert is_built_on(given)


def is_built_on(given: SimpleNamespace, **others) -> bool:
    """Whether the source goes on to its engines, for which `given` has no cluster."""
    with pytest.raises(AttributeError, match="no attribute 'cluster'"):
        sample_episodes(given, **others)
    return True


def test_a_run_begins_with_its_model_or_with_the_built_in_one_once_that_is_made(cfg):
    """The weights of a run that names a model are the user's."""
    task = build(cfg)
    assert task.start_weights() is None and task.warm_start().cfg.trainer.task == "sft"
    cfg.model.path = "some/model"
    assert build(cfg).start_weights() == "some/model"
