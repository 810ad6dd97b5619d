"""The examples of docs/extending.md run as they stand."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import math
import re
import sqlite3
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.episodes import step_all
from tests.support.jobs import comparable, metrics
from tests.support.pages import commands_of_page, files_of_page
from tests.support.plain_engine import PlainRank, PlainRanks
from tests.support.rewards import reward_pool, score
from tests.support.toy import toy_config, toy_trainer
from trainer.algorithms import Totals
from trainer.cluster.process_cluster import ProcessCluster
from trainer.config import Config, ModelConfig, RolloutConfig, compose
from trainer.config.command_line import unread_words
from trainer.config.engines import find_engine
from trainer.config.rules import SavedRun
from trainer.data.ledger import Ledger, find_curriculum
from trainer.environments import Environment
from trainer.environments.episode_runner import EnvironmentPool, Session
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.files import uris
from trainer.files.uris import StoreSpec
from trainer.generation.engine import Engine, Request, Sampling
from trainer.generation.engine_pool import EnginePool
from trainer.import_utils import import_function, options_of
from trainer.metrics.sinks import find_sink
from trainer.metrics.tracker import Tracker
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer
from trainer.objectives import Outputs, make_objective
from trainer.objectives.batches import build_batch
from trainer.objectives.check import check_functions
from trainer.parallel.batching import take_rows
from trainer.run.directory import RunDirectory
from trainer.run.resume import resume_rules
from trainer.sources.base import EpisodeSource
from trainer.tasks import Metric, Task, TaskSpec, build_task

KL_AND_REWARD = (("policy/kl", None), ("reward/mean", 0.5))
PAGE = (Path(__file__).parents[3] / "docs/extending.md").read_text()


def examples(heading: str) -> list[str]:
    """The Python code of one section, a text for each block."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)


def overrides(heading: str, number: int = 0) -> list[str]:
    """The overrides of a section's command."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^trainer train (.*)$", section, flags=re.MULTILINE)[number].split()


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_") or name in ("__enter__", "__exit__")}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes an example to a file that can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, code: str) -> None:
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


def test_the_advantage(module):
    module("my_advantages", examples("An advantage")[0])
    cfg = compose(overrides("An advantage"))
    check_functions(cfg)
    median = import_function(cfg.algorithm.advantage_estimator, "algorithm.advantage_estimator")
    rewards, mask = torch.zeros(6, 2), torch.ones(6, 2)
    rewards[:, 1] = torch.tensor([1.0, 2.0, 9.0, 4.0, 4.0, 4.0])
    mask[3:, 0] = 0
    advantages, returns = median(rewards, mask, torch.tensor([0, 0, 0, 1, 1, 1]), **cfg.algorithm.options)
    assert advantages.tolist() == [[-2, -2], [0, 0], [14, 14], [0, 0], [0, 0], [0, 0]]
    assert returns is advantages
    cfg.rollout.n = 1
    with pytest.raises(ValueError, match="rollout.n=1"):
        check_functions(cfg)


def test_the_service_for_metrics(module, tmp_path, caplog):
    module("my_sink", examples("A service for metrics")[0])
    cfg = compose(overrides("A service for metrics"))
    find_sink(*cfg.logger.sinks)

    def stored(step: int, *steps: int, value: float = 0.5) -> list[tuple]:
        tracker = Tracker(str(tmp_path), cfg.logger, {})
        tracker.rewind(step)
        for one in steps:
            tracker.log(one, {"policy/kl": math.nan, "reward/mean": value})
        tracker.close()
        table = sqlite3.connect(tmp_path / "metrics.db").execute("SELECT * FROM metrics ORDER BY step, name")
        return [row for row in table if row[1] != "policy/kl" or row[2] is None]

    assert stored(-1, 1, 2, 3) == [(n, name, v) for n in (1, 2, 3) for name, v in KL_AND_REWARD]
    again = stored(2, 3, 4, value=0.75)
    assert [row[2] for row in again if row[1] == "reward/mean"] == [0.5, 0.5, 0.75, 0.75]
    assert len(again) == 8
    assert "logger.services" not in caplog.text


def test_the_policy_loss(module):
    module("my_losses", examples("A policy loss")[0])
    cfg = compose(overrides("A policy loss"))
    check_functions(cfg)
    smooth = import_function(cfg.algorithm.policy_loss, "algorithm.policy_loss")
    advantages, mask = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    old = torch.full((2, 2), -1.0)

    def value(logprobs: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        options = {"aggregation": "token_mean", "totals": Totals.of(mask), "clip_high": cfg.algorithm.clip_high}
        return smooth(logprobs[rows], old[rows], advantages[rows], mask[rows], **options)[0]

    logprobs = old.clone().requires_grad_()
    value(logprobs).backward()
    torch.testing.assert_close(logprobs.grad, -advantages * mask / 3)  # at ratio 1, that of the plain surrogate
    far = torch.tensor([[5.0, 0.0], [-3.0, 0.0]])
    torch.testing.assert_close(value(far), value(far, slice(0, 1)) + value(far, slice(1, 2)))
    assert float(value(torch.full((2, 2), 5.0))) == pytest.approx(1.3 * float(value(old)))


def test_the_policy_loss_that_reads_a_teacher(module):
    module("distilled", examples("A policy loss")[1])
    cfg = compose(overrides("A policy loss", 1))
    assert [role.name for role in cfg.roles] == ["policy", "reference", "teacher"]
    objective = make_objective(cfg)
    objective.check()
    assert [score.name for score in objective.computes({}, 1)] == ["ref_logprobs", "teacher_logprobs"]
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(2, 3)).astype(np.float32) for name in ("advantages", "teacher_logprobs")}
    batch |= {"input_ids": np.ones((2, 3), np.int64), "lengths": np.full(2, 3), "group_ids": np.zeros(2, np.int64)}
    batch |= {name: np.ones((2, 3), np.float32) for name in ("mask", "old_logprobs")}
    logprobs = torch.ones(2, 3, requires_grad=True)
    mb, totals = take_rows(batch, [0, 1], "cpu"), objective.totals("policy", batch)
    loss, metrics = objective.loss("policy", Outputs(logprobs=logprobs), mb, totals, {"kl_coef": 0.1})
    distance = float(((1 - batch["teacher_logprobs"]) ** 2).mean())
    assert float(metrics["teacher_distance"]) == pytest.approx(distance)
    assert float(loss.detach()) == pytest.approx(0.2 * distance - float(batch["advantages"].mean()), rel=1e-5)


def test_the_policy_loss_with_two_teachers(module, tmp_path):
    files_of_page("docs/distillation.md", tmp_path)
    module("two_teachers", (tmp_path / "two_teachers.py").read_text())
    command = commands_of_page("docs/distillation.md", "two_teachers:TASK")
    cfg = compose(command.replace("\\\n", "").split()[2:])
    objective = make_objective(cfg)
    objective.check()
    assert {"first_logprobs", "second_logprobs"} < {score.name for score in objective.computes({}, 1)}
    values = {"advantages": 1, "first_logprobs": -3, "second_logprobs": -2, "ref_logprobs": -1, "old_logprobs": -1}
    batch = {name: np.full((2, 3), value, np.float32) for name, value in (values | {"mask": 1}).items()}
    batch |= {"input_ids": np.ones((2, 3), np.int64), "lengths": np.full(2, 3), "group_ids": np.zeros(2, np.int64)}
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    mb, totals = take_rows(batch, [0, 1], "cpu"), objective.totals("policy", batch)
    loss, metrics = objective.loss("policy", Outputs(logprobs=logprobs), mb, totals, {"kl_coef": 0.1})
    assert float(metrics["teachers_kl"]) == pytest.approx(1.5)
    assert float(loss.detach()) == pytest.approx(-(1 - 0.2 * 1.5))


def test_the_advantage_of_a_distillation_reads_a_teacher(module):
    module("distilled", "\n\n".join(examples("A policy loss")[1:]))
    words = [word for word in overrides("A policy loss", 1) if "options" not in word and "policy_loss" not in word]
    cfg = compose([*words, "algorithm.advantage_estimator=distilled:reverse_kl", "algorithm.kl_coef=0"])
    objective = make_objective(cfg)
    objective.check()
    samples = [Sample(np.arange(3), np.array([0, 1, 1], np.float32), np.zeros(3, np.float32), (1, 1))] * 2
    batch = build_batch(samples, ["0", "0"])
    scores = {score.name: score.rows for score in objective.computes(batch, 1)}
    assert scores["old_logprobs"].tolist() == [0, 1], "known before the update, for the rows of the first step too"
    batch |= {
        name: np.full((2, 3), value, np.float32) for name, value in (("old_logprobs", -3), ("teacher_logprobs", -1))
    }
    episodes = [Episode(str(i), "0", [sample], reward=0.0) for i, sample in enumerate(samples)]
    assert objective.experience(episodes, batch).batch["advantages"].tolist() == [[0, 2, 2]] * 2


def test_the_objective(module):
    """Three pairs in one micro-batch, in one for each pair, and in one without rows."""
    module("preference", examples("An objective")[0])
    objective = importlib.import_module("preference").Preference(Config())
    objective.options["beta"] = 0.1
    rng = np.random.default_rng(0)
    samples = [Sample(rng.integers(0, 9, length), np.ones(length, np.float32)) for length in (3, 9, 8, 2, 5, 4)]
    pairs = [Episode(str(i), str(i // 2), [sample], float(i in (0, 3, 4))) for i, sample in enumerate(samples)]
    batch = objective.experience(pairs, build_batch(samples, [pair.group for pair in pairs])).batch
    batch |= {"ref_logprobs": rng.normal(size=batch["mask"].shape).astype(np.float32)}
    logprobs = torch.from_numpy(rng.normal(size=batch["mask"].shape).astype(np.float32))

    def losses(rows: list[int]) -> tuple[float, float]:
        mb = take_rows(batch, rows, "cpu")
        outputs = Outputs(logprobs=logprobs[rows or [0], : mb["mask"].shape[1]])
        loss, metrics = objective.loss("policy", outputs, mb, objective.totals("policy", batch), {})
        return float(loss), float(metrics["accuracy"])

    gains = ((logprobs - torch.from_numpy(batch["ref_logprobs"])) * torch.from_numpy(batch["mask"])).sum(dim=1)
    margins = gains[[0, 3, 4]] - gains[[1, 2, 5]]
    expected = [float(-torch.nn.functional.logsigmoid(0.1 * margins).mean()), float((margins > 0).float().mean())]
    assert losses(list(range(6))) == pytest.approx(expected, rel=1e-5)
    pieces = np.array([losses(rows) for rows in ([0, 1], [2, 3], [4, 5], [])])
    assert pieces.sum(axis=0) == pytest.approx(expected, rel=1e-5) and not pieces[-1].any()

    # As the policy samples them: the reward of one episode failed, and two episodes have the same reward.
    rewards = (1.0, 0.0, None, 1.0, 1.0, 1.0)
    pairs = [dataclasses.replace(pair, reward=reward) for pair, reward in zip(pairs, rewards, strict=True)]
    batch |= objective.experience(pairs, batch).batch
    assert batch["sign"].tolist() == [1, -1, 0, 0, 0, 0] and objective.totals("policy", batch) == 1
    alone = float(-torch.nn.functional.logsigmoid(0.1 * margins[0]))
    assert losses(list(range(6))) == pytest.approx([alone, float(margins[0] > 0)], rel=1e-5)
    pairs[0] = dataclasses.replace(pairs[0], reward=None)
    batch |= objective.experience(pairs, batch).batch
    assert losses(list(range(6))) == (0, 0), "no pair prefers an answer"


def test_the_fields_of_a_kind_of_training_are_all_named():
    section = PAGE.partition("\n## A kind of training\n")[2].partition("\n## ")[0]
    fields = [field.name for kind in (TaskSpec, Task) for field in dataclasses.fields(kind)]
    assert [name for name in (*fields, *Metric._fields) if not re.search(rf"`{name}\b|\b{name}=", section)] == ["cfg"]


def test_the_kind_of_object_store(module):
    module("azure_store", examples("A kind of object store")[0])
    (entry,) = re.findall(r"^az = \"(.*)\"$", PAGE, flags=re.MULTILINE)
    store = importlib.metadata.EntryPoint("az", entry, "trainer.object_stores").load()
    assert isinstance(store, StoreSpec) and store.path == "azure_store:AzureClient"
    assert f'"{uris.ENTRY_POINTS}"' in PAGE


def test_the_reward(module):
    module("my_rewards", examples("A reward")[0])
    name = compose(overrides("A reward")).reward.name
    with reward_pool(name, timeout_s=20.0, num_processes=1) as pool:
        row = {"prompt": "3 + 4", "answer": "7", "max_chars": 10}
        rewards, failures = score(pool, ["7", " " * 20 + "7", "8", "7"], ["7"] * 4, [row, row, row, {}])
    assert (rewards, failures.count) == ([1.0, 0.5, 0.0, 1.0], 0)


def test_the_curriculum(module):
    module("my_data", examples("A curriculum")[0])
    cfg = compose(overrides("A curriculum"))
    hardest_first = find_curriculum(cfg.data.curriculum, "data.curriculum")
    ledger = Ledger(["a", "b", "c"], 1, "prompts", lambda: "rows", curriculum=hardest_first)
    assert [row.index for row in ledger.peek(3)] == [0, 1, 2]
    ledger.commit([ledger.peek(3)[i] for i in range(3)], [0.5, 1.0, 0.25])
    assert [(row.epoch, row.index) for row in ledger.peek(2)] == [(1, 2), (1, 0)]


def test_the_environment(module):
    module("guess", examples("An environment")[0])
    config = compose(overrides("An environment")).environment
    assert set(config.kwargs) <= set(options_of(import_function(config.name, "environment.name").__init__))
    with EnvironmentPool(config, 1000) as pool:
        session = Session({"below": 4}, seed=2)
        step_all(pool, [session])
        assert session.steps[0].messages[0]["content"] == "Guess my number, from 0 to 3."
        number = Random(2).randrange(4)
        for guess in range(number + 1):
            session.replies.append({"role": "assistant", "content": f" {guess}"})
            step_all(pool, [session])
            assert session.steps[-1].done == (guess == number)
        rewards = [step.reward for step in session.steps]
        assert rewards == [0.0] * (number + 1) + [(5 - number) / 5] and not session.failure


def test_the_reward_model(module):
    module("my_task", examples("A reward model")[0])
    config = compose(["trainer.task=my_task:TASK", "model.path=policy", "algorithm.kl_coef=0"])
    assert [role.name for role in config.roles] == ["policy", "judge"]
    learner = SimpleNamespace(last_scores=lambda role, samples: np.asarray([len(role) + sample for sample in samples]))
    scorer = build_task(config).source.keywords["make_scorer"](SimpleNamespace(learner=learner))
    episodes: list[Any] = [SimpleNamespace(episode=SimpleNamespace(samples=[i])) for i in range(3)]

    async def on_ranks(function: Any) -> Any:
        return function()

    async def score() -> list[float]:
        async with scorer.open("training", 2, on_ranks) as scoring:
            second, first = await asyncio.gather(scoring.score(1, episodes[2:]), scoring.score(0, episodes[:2]))
            return [*first.rewards, *second.rewards]

    with scorer:
        assert asyncio.run(score()) == [5, 6, 7]


def test_the_environment_has_every_method_of_the_protocol(module):
    module("guess", examples("An environment")[0])
    assert public(Environment) <= set(dir(import_function("guess:Guess", "environment.name")))


def test_the_engine(module, tmp_path, monkeypatch):
    module("echo_engine", "\n".join(examples("An engine")))
    rollout = RolloutConfig(engine="echo_engine:ENGINE", num_engines=2)
    assert find_engine("echo_engine:ENGINE") == find_engine("echo_engine:EchoEngine")
    cfg = Config(model=ModelConfig(path=str(tmp_path)), rollout=rollout)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=3, stop_token_ids=())
    requests = [Request([5, 6, 7, 8], 1, sampling), Request([9], 2, sampling)]
    with ProcessCluster(cfg, "cpu") as cluster:
        ranks = PlainRanks(cluster.launch_ranks("rank", functools.partial(PlainRank, str(tmp_path)), {}))
        pool = EnginePool(cfg, cluster, ranks, cfg.model.path)
        pool.start(version=1, is_initial=True)
        assert [c.token_ids.tolist() for c in pool.generate(requests)] == [[5, 6, 7], [9]]
        pool.sync_weights(2)
        for completion in pool.generate(requests):
            assert (completion.weight_versions, len(completion.logprobs)) == ((2, 2), len(completion.token_ids))
        pool.shutdown()


def test_the_engine_has_every_method_of_the_protocol(module):
    module("echo_engine", examples("An engine")[0])
    assert public(Engine) <= set(dir(import_function("echo_engine:EchoEngine", "rollout.engine")))


def test_the_source_of_episodes(tmp_path):
    """A run that is stopped and resumed trains on what an uninterrupted run trains on."""
    given: dict[str, Any] = {}
    for code in examples("A source of episodes"):
        exec(code, given)
    assert public(EpisodeSource) - {"parts"} <= set(dir(given["RecordedEpisodes"]))
    make_source = given["build"](Config()).source.keywords["make_source"]
    assert make_source is given["KeepingSource"] and public(EpisodeSource) <= set(dir(make_source))
    episodes = [given["recorded"](i, "0", [i, i], [1, 2], [-0.5, -1.0], 1.0) for i in range(7)]

    def run(root: Path, steps: int) -> SimpleNamespace:
        cfg = toy_config(root, total_steps=steps)
        with RunDirectory(cfg).open() as directory:
            trainer = toy_trainer(cfg, directory, tmp_path / "model")
            trainer.source = given["RecordedEpisodes"](episodes, size=3)
            trainer.run()
        return SimpleNamespace(number=trainer.learner.ranks.number, source=trainer.source)

    whole = run(tmp_path / "whole", 5)
    run(tmp_path / "stopped", 2)
    resumed = run(tmp_path / "stopped", 5)
    assert whole.number == resumed.number > 0
    assert whole.source.position == resumed.source.position == 15
    assert comparable(metrics(tmp_path / "whole")) == comparable(metrics(tmp_path / "stopped"))


def test_a_recorded_episode_learns_from_its_completion_alone():
    given: dict[str, Any] = {}
    exec(examples("A source of episodes")[1], given)
    sample = given["recorded"](0, "a", [7, 8], [9], [-0.25], 1.0).samples[0]
    assert sample.token_ids.tolist() == [7, 8, 9]
    assert sample.mask.tolist() == [0, 0, 1] and sample.mask.dtype == np.float32
    assert sample.logprobs.tolist() == [0, 0, -0.25]


def test_the_kind_of_training(tmp_path, module):
    """It is a task whose source continues where it was committed; a group is a pair."""
    module("preference", examples("An objective")[0])
    module("pairs", examples("A kind of training")[0])
    rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(5)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = overrides("A kind of training")
    names = {"DIRECTORY": str(tmp_path), "[pairs.jsonl]": f"[{tmp_path}/pairs.jsonl]"}
    for name, value in names.items():
        words = [word.replace(name, value) for word in words]
    cfg = compose([*words, "trainer.train_batch_size=2", "trainer.mini_batch_size=2"])
    assert [role.name for role in cfg.roles] == ["policy", "reference"] and cfg.compared_by == (
        "policy/accuracy",
        "max",
    )
    build_tiny(TinyShape.of(cfg.model.tiny), str(tmp_path))
    given: Any = SimpleNamespace(tokenizer=load_tokenizer(str(tmp_path), None, False), path=str(tmp_path))
    source, evaluator = build_task(cfg).source(given)
    assert public(EpisodeSource) <= set(dir(source)) and evaluator is None
    first = source.next(1)
    assert [episode.uid for episode in first] == [episode.uid for episode in source.next(1)]
    assert [(episode.group == first[0].group, episode.reward) for episode in first[:3]] == [
        (True, 1),
        (True, 0),
        (False, 1),
    ]
    source.commit(1)
    state, second = source.state_dict(), source.next(2)
    resumed, _ = build_task(cfg).source(given)
    resumed.load_state_dict(state)
    assert [episode.uid for episode in resumed.next(2)] == [episode.uid for episode in second]
    assert not {episode.group for episode in first} & {episode.group for episode in second}
    assert make_objective(cfg).options == {"beta": 0.2} and cfg.reads("algorithm.options")
    assert not cfg.validates_start and not cfg.reads("algorithm.clip_low") and unread_words(words, cfg) == []
    assert resume_rules(cfg, SavedRun({}, ()))["algorithm.options"].change == "update"
    for wrong, problem in (("bta=0.2", "no such option; did you mean beta"), ("beta=x", "like its default, 0.1")):
        with pytest.raises(UserError, match=f"^algorithm.options.{wrong}: .*{problem}"):
            compose([*words, f"++algorithm.options.{wrong}"])
    build_task(cfg).check_inputs(asks_servers=True)
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "0?", "chosen": "yes"}))
    with pytest.raises(UserError, match="data.train_files: row 1 must have a text rejected; it has prompt, chosen"):
        build_task(cfg).check_inputs(asks_servers=True)
    (tmp_path / "pairs.jsonl").unlink()
    with pytest.raises(UserError, match="data.train_files=.*pairs.jsonl: no such file"):
        build_task(cfg).check_inputs(asks_servers=True)
    assert len(state["fingerprint"]) == 32


def test_the_process_reward_model_pays_each_step_for_what_it_gains():
    """Two completions of two lines; the second token of the first one is no token of the policy."""
    found: dict[str, Any] = {}
    exec(examples("A process reward model")[0], found)
    roles = {one.name: one for one in found["TASK"].roles(Config())}
    assert (roles["prm"].computes, roles["prm"].trained) == ("step_scores", False)
    mask = torch.tensor([[1.0, 0, 1, 1], [1, 1, 1, 0]])
    ids = torch.tensor([[10.0, 10, 5, 6], [5, 10, 6, 0]])
    scores = torch.logit(torch.tensor([[0.25, 0.9, 0.9, 0.75], [0.9, 0.5, 0.25, 0.9]]))
    rewards = torch.zeros(2, 4)
    rewards[0, 3] = 1.0
    advantages, returns = found["process"](rewards, mask, torch.zeros(2), step_scores=scores, input_ids=ids)
    expected = torch.tensor([[1.75, 0, 1.5, 1.5], [0.25, 0.25, -0.25, 0]])
    assert torch.allclose(returns, expected, atol=1e-6)
    assert torch.allclose(advantages, (expected - expected.sum() / 6) * mask, atol=1e-6)
