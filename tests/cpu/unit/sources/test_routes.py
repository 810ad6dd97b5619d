"""Each row of a mix is run and rewarded as its own source says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.cpu.unit.data.test_records import bits
from tests.support.replies import Replies, journal_in, sampling_source
from tests.support.runs import configured
from trainer.config import Config, DataConfig, EnvironmentConfig, RewardConfig
from trainer.config.data import SourceConfig
from trainer.data.rollout_io import write_rollouts
from trainer.environments.episode_runner import EnvironmentRunner, SingleTurnRunner
from trainer.errors import UserError
from trainer.journal.journal import Journal
from trainer.models.tokenizer import load_tokenizer
from trainer.objectives.batches import batch_of
from trainer.sources.routes import make_routes, make_scorers
from trainer.sources.sampling import SamplingSource

ECHO = "tests.support.environments:Echo"
LENGTH = RewardConfig(name="tests.support.named_rewards:length")


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
    cfg.logger.samples = 0
    return cfg


def reply(prompt: str, number: int, sampling: object) -> str:
    return "abc"


@contextmanager
def source_of(cfg: Config, model: str, journal: Journal | None = None) -> Iterator[tuple[SamplingSource, Replies]]:
    engines = Replies(load_tokenizer(model), reply)
    with sampling_source(cfg, engines, model, journal=journal) as source:
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


def test_mixed_rows_come_back_from_the_journal(tmp_path, model):
    found = []
    for _ in range(2):
        journal = journal_in(tmp_path)
        with source_of(mixed(tmp_path), model, journal) as (source, engines):
            found.append(source.next(1))
            generated = len(engines.seeds)
        journal.close()
    assert generated == 0 and bits(found[0]) == bits(found[1])
    assert [episode.source for episode in found[0]] == [episode.source for episode in found[1]]


@pytest.mark.parametrize("mode", ["plain", "ahead", "in flight", "dynamic sampling"])
def test_rows_of_each_source_come_once_an_epoch_over_a_kill(tmp_path, model, mode):
    def edited() -> Config:
        cfg = mixed(tmp_path)
        match mode:
            case "ahead":
                cfg.rollout.ahead = 1
            case "in flight":
                cfg.rollout.engine, cfg.rollout.in_flight_updates = "vllm", True
            case "dynamic sampling":
                cfg.algorithm.dynamic_sampling, cfg.algorithm.options["max_gen_batches"] = True, 2
        return cfg

    trained: list[str] = []
    saved = None
    for start in range(2):
        with source_of(edited(), model) as (source, _):
            if saved is not None:
                source.load_state_dict(saved)
            source.start(1 + 2 * start, is_initial=start == 0)
            for step in (1 + 2 * start, 2 + 2 * start):
                source.next(step)
                used = source._trained[step].used
                trained += [f"{source.ledger.name_of(row.index)} {row.index.epoch} {row.index.index}" for row in used]
                source.add_metrics(step, {})
                source.commit(step)
            saved = json.loads(json.dumps(source.state_dict()))
            source._cancel()  # the kill: the rows in flight are lost
    assert len(set(trained)) == len(trained)
    counts = Counter(row.partition(" ")[0] for row in trained)
    if mode == "dynamic sampling":  # all completions are the same, so each step looks at twice as many rows
        assert counts.total() == 64
    else:
        assert counts.total() == 32 and counts["plain"] in (12, 13) and min(counts.values()) >= 6
    for name, count in counts.items():
        rows = Counter(row.rpartition(" ")[0] for row in trained if row.startswith(f"{name} "))
        assert sorted(rows.values(), reverse=True)[: count // 3] == [3] * (count // 3), "an epoch is not complete"


def test_a_source_may_choose_its_rows(tmp_path, model):
    cfg = mixed(tmp_path)
    cfg.data.mix["plain"].curriculum = "tests.support.curriculum:hardest_first"
    with source_of(cfg, model) as (source, _):
        rows = [row.index for row in source.ledger.peek(24) if source.ledger.name_of(row) == "plain"]
        assert rows[:3] == [0, 1, 2]


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


def test_recorded_groups_are_a_source_that_says_who_sampled_them(tmp_path, model):
    """A quarter of each step. A resume continues behind the groups that are trained, and compares them all."""
    cfg = mixed(tmp_path)
    with source_of(cfg, model) as (source, _):
        recorded = [episode for episode in source.next(1) if episode.source == "mix.plain"]
    recorded[1] = replace(recorded[1], reward=0.5)
    write_rollouts(str(tmp_path), 3, recorded)
    old = SourceConfig(files=[str(tmp_path / "rollouts/step_3.arrow")], replay=True)
    cfg.data = DataConfig(mix={"old": old, "plain": replace(cfg.data.mix["plain"], weight=3)})

    with source_of(cfg, model) as (source, engines):
        first = source.next(1)
        metrics, replayed = source.add_metrics(1, {}), [one for one in first if one.source == "mix.old"]
        assert len(engines.seeds) == 2 * 6 and metrics["rollout/replayed_frac"] == 0.25
        assert metrics["data/old/prompts"] == 2 and len(replayed) == 4
        by_name = {(one.messages[0]["content"], one.number): one for one in recorded}
        for one in replayed:
            (sample,), (before,) = one.samples, by_name[one.messages[0]["content"], one.number].samples
            assert (sample.sampled_by, sample.is_foreign, sample.weight_versions) == ("old", True, (1, 1))
            assert np.array_equal(sample.logprobs, before.logprobs) and np.array_equal(
                sample.token_ids, before.token_ids
            )
        batch = batch_of(first, 1)
        assert batch["is_stale"].tolist() == batch["is_foreign"].tolist() == [one.source == "mix.old" for one in first]
        source.commit(1)
        state, second = source.state_dict(), source.next(2)
    assert {one.group for one in second if one.source == "mix.old"}.isdisjoint(one.group for one in replayed)
    with source_of(cfg, model) as (source, _):
        source.load_state_dict(state)
        assert [one.uid for one in source.next(2)] == [one.uid for one in second]
    write_rollouts(str(tmp_path), 3, [replace(one, reward=0.0) for one in recorded])
    with source_of(cfg, model) as (source, _), pytest.raises(UserError, match="data.mix.old: the prompts' content"):
        source.load_state_dict(state)
    write_rollouts(
        str(tmp_path), 3, [replace(one, samples=[replace(one.samples[0], logprobs=None)]) for one in recorded]
    )
    with (
        pytest.raises(UserError, match="data.mix.old.files: .*group plain:0:.*has no log-probs"),
        source_of(cfg, model),
    ):
        pass
