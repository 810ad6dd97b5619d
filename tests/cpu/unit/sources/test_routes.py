"""Each row of a mix is run and rewarded as its own source says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.replies import Replies, sampling_source
from tests.support.runs import configured
from trainer.config import Config, DataConfig, EnvironmentConfig, RewardConfig, TinyConfig
from trainer.config.data import SourceConfig
from trainer.environments.episode_runner import EnvironmentRunner, SingleTurnRunner
from trainer.models.tiny import build_tiny
from trainer.models.tokenizer import load_tokenizer
from trainer.sources.routes import make_routes, make_scorers
from trainer.sources.sampling import SamplingSource

ECHO = "tests.support.environments:Echo"
LENGTH = RewardConfig(name="tests.support.named_rewards:length")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyConfig(hidden_size=64, intermediate_size=128), path)
    return path


def mixed(root: Path) -> Config:
    """Single turns with a reward, and two environments, one of which serves two sources."""
    root.mkdir(exist_ok=True)

    def rows(name: str, **columns) -> str:
        lines = [json.dumps({"prompt": f"{name}{i}", "answer": "x", **columns}) for i in range(3)]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
        return str(root / f"{name}.jsonl")

    cfg = configured(root / "run", train_batch_size=8, mini_batch_size=8, val_interval=-1)
    cfg.rollout.n, cfg.rollout.max_response_tokens, cfg.rollout.max_prompt_tokens = 2, 8, 200
    echo, loud = EnvironmentConfig(name=ECHO), EnvironmentConfig(name=ECHO, kwargs={"prefix": "!"}, max_turns=1)
    cfg.data = DataConfig(
        mix={
            "plain": SourceConfig(files=[rows("plain")], reward=LENGTH, weight=2),
            "echo": SourceConfig(files=[rows("echo", turns=2)], environment=echo),
            "again": SourceConfig(files=[rows("again", turns=1)], environment=echo),
            "loud": SourceConfig(files=[rows("loud", turns=3)], environment=loud),
        }
    )
    cfg.logger.samples_interval = 0
    return cfg


def reply(prompt: str, number: int, sampling: object) -> str:
    return "abc"


@contextmanager
def source_of(cfg: Config, model: str) -> Iterator[tuple[SamplingSource, Replies]]:
    engines = Replies(load_tokenizer(model), reply)
    with sampling_source(cfg, engines, model) as source:
        yield source, engines


def test_one_batch_has_rows_of_several_sources_and_environments(tmp_path, model):
    cfg = mixed(tmp_path)
    with source_of(cfg, model) as (source, engines):
        episodes = source.next(1)
        metrics = source.add_metrics(1, {})
        source.commit(1)
        again = source.next(2)
    counts = Counter(episode.source for episode in episodes)
    assert counts.total() == 16 and counts["mix.plain"] == 6 and set(counts.values()) == {6, 4, 2}
    of = {name: [episode for episode in episodes if episode.source == f"mix.{name}"] for name in cfg.data.mix}
    assert all(episode.group.startswith(f"{name}:0:") for name, some in of.items() for episode in some)
    assert {(e.reward, e.turns, e.status) for e in of["plain"]} == {(3.0, 1, "stop")}
    assert {(e.reward, e.turns, e.status) for e in of["echo"]} == {(6.0, 2, "stop")}
    assert {(e.reward, e.turns, e.status) for e in of["again"]} == {(3.0, 1, "stop")}
    assert {(e.reward, e.turns, e.status) for e in of["loud"]} == {(3.0, 1, "turns")}
    assert of["loud"][0].messages[0]["content"].startswith("!loud")
    assert len(engines.samplings) == 4, "two rounds a step, though two runners have several turns"
    assert metrics["data/plain/reward/mean"] == 3.0 and metrics["data/echo/episode/turns/mean"] == 2.0
    assert metrics["data/echo/reward/mean"] == 6.0 and "reward/length/mean" not in metrics
    assert metrics["data/plain/prompts"] == len(of["plain"]) / 2
    assert (metrics["reward/failures"], metrics["environment/failures"]) == (0.0, 0.0)
    assert not {episode.uid for episode in episodes} & {episode.uid for episode in again}


def test_a_mix_of_single_turns_is_one_round(tmp_path, model):
    cfg = mixed(tmp_path)
    for source_config in cfg.data.mix.values():
        source_config.environment, source_config.reward = EnvironmentConfig(), LENGTH
    with source_of(cfg, model) as (source, engines):
        source.next(1)
    assert len(engines.samplings) == 1


def test_sources_with_the_same_settings_share_processes(tmp_path, model):
    cfg = mixed(tmp_path)
    cfg.data.mix["other"] = SourceConfig(files=["x"], reward=LENGTH)
    made = []
    sources = [f"mix.{name}" for name in cfg.data.mix]
    scorers = make_scorers(cfg, sources, lambda own: made.append(own) or object())
    routes = make_routes(cfg, scorers, load_tokenizer(model))
    assert routes["mix.echo"].episodes is routes["mix.again"].episodes is not routes["mix.loud"].episodes
    assert routes["mix.plain"].episodes is routes["mix.other"].episodes
    assert isinstance(routes["mix.plain"].episodes, SingleTurnRunner)
    assert isinstance(routes["mix.loud"].episodes, EnvironmentRunner)
    assert routes["mix.plain"].scorer is routes["mix.other"].scorer
    assert len(made) == 2, "one for the reward of single turns, one for the default of the others"
