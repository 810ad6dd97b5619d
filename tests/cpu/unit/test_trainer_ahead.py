"""Runs with `rollout.ahead`: killed, forked, extended and continued, over a toy learner whose weights are a number."""

from __future__ import annotations

import json
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.jobs import comparable, metrics
from tests.support.replies import Replies, evaluator_beside, sampling_source
from tests.support.runs import configured
from tests.support.toy import ToyLearner
from trainer.config import Config, DataConfig, RewardConfig, TinyConfig
from trainer.generation.engine import Completion, Request
from trainer.metrics.timing import Timer
from trainer.models.tiny import build_tiny
from trainer.models.tokenizer import load_tokenizer
from trainer.objectives import Experience
from trainer.run.directory import RunDirectory
from trainer.run.stopping import StopRequest
from trainer.tasks.base import open_journal
from trainer.trainer import Trainer

STEPS = 7


class Learner(ToyLearner):
    """Its number depends on every token that it has trained on, and on their order."""

    def score(self, episodes: Any, step: int) -> Experience:
        digest = 0
        for episode in episodes:
            digest = zlib.crc32(f"{episode.uid} {episode.samples[0].token_ids} {episode.reward}".encode(), digest)
        return Experience({"drawn": np.asarray([digest / 2**32])}, {})


class Engines(Replies):
    """Engines whose replies depend on the weights, the prompt and the seed."""

    synced_bytes = 0

    def __init__(self, tokenizer: Any, learner: Learner):
        super().__init__(tokenizer, lambda *_: "")
        self._learner = learner
        self.weights, self.version, self._open = 0.0, 0, 0
        self.made: list[tuple[int, int]] = []
        """The seed of each completion, and the version of the weights that made it."""
        self.fail: Callable[[Sequence[Request]], None] = lambda requests: None

    def start(self, version: int, is_initial: bool, may_defer: bool) -> None:
        self.sync_weights(version, "abort")

    def abort(self) -> None:
        pass

    def sync_weights(self, version: int, running: str) -> None:
        assert self._open == 0, "weights change while a batch is generated"
        assert threading.current_thread() is threading.main_thread()
        self.weights, self.version = self._learner.ranks.number, version

    def stream(self, requests: Sequence[Request]) -> Iterator[dict[int, Completion]]:
        self._open += 1
        try:
            self.fail(requests)
            for index, request in enumerate(requests):
                prompt = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=True)
                text = f"{zlib.crc32(f'{prompt} {request.seed} {self.weights}'.encode()):08x}"
                tokens = self._tokenizer.encode(text[: 1 + request.seed % 8], add_special_tokens=False)
                self.seeds.append(request.seed)
                self.made.append((request.seed, self.version))
                yield {index: Completion(tokens, [-1.0] * len(tokens), "stop", self.version)}
        finally:
            self._open -= 1


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyConfig(hidden_size=64, intermediate_size=128), path)
    return path


def settings(root: Path, ahead: int = 1, **trainer: Any) -> Config:
    root.mkdir(exist_ok=True, parents=True)
    files = [str(root.parent / "prompts.jsonl")]
    Path(files[0]).write_text("\n".join(json.dumps({"prompt": f"p{i}", "answer": "x"}) for i in range(10)))
    given = {"total_steps": STEPS, "ckpt_interval": 2, "val_interval": 3, "on_resume_mismatch": "stop", **trainer}
    cfg = configured(root, train_batch_size=3, resume_mode="latest", max_ckpts_to_keep=9, **given)
    cfg.rollout.n, cfg.rollout.max_response_tokens, cfg.rollout.ahead = 2, 8, ahead
    cfg.data = DataConfig(train_files=files, val_files=files, val_size=2)
    cfg.reward = RewardConfig(name="tests.support.hashed_reward:hashed", num_processes=1)
    cfg.logger.progress = cfg.logger.plot = False
    return cfg


class Killed(BaseException):
    pass


Disturb = Callable[[Trainer, Engines], None]


def run(cfg: Config, model: str, disturb: Disturb = lambda trainer, engines: None, **source_options: Any) -> Trainer:
    """Run to the end, or until a `Killed` is raised; returns the trainer."""
    with RunDirectory(cfg).open() as directory:
        tokenizer, timer, learner = load_tokenizer(model), Timer(), Learner()
        engines = Engines(tokenizer, learner)
        journal = open_journal(cfg, model, directory, timer)
        source = sampling_source(cfg, engines, model, journal=journal, timer=timer, **source_options)
        trainer = Trainer(
            cfg, directory, source, learner, model, tokenizer, timer, StopRequest(None), journal,
            evaluator_beside(source, model),
        )  # fmt: skip
        trainer.recovery.wait = lambda: None  # type: ignore[method-assign]
        disturb(trainer, engines)
        try:
            trainer.fit()
        except Killed:
            directory.checkpoints.wait()
        return trainer


def kill_in_update(step: int) -> Disturb:
    def disturb(trainer: Trainer, engines: Engines) -> None:
        update = trainer.learner.update

        def update_or_die(experience: Any, at: int) -> dict[str, float]:
            if at == step:
                raise Killed
            return update(experience, at)

        trainer.learner.update = update_or_die  # type: ignore[method-assign]

    return disturb


def outcome(root: Path, trainer: Trainer) -> tuple[list[dict[str, Any]], float]:
    return comparable(metrics(root)), trainer.learner.ranks.number  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> Callable[[int], tuple[list[dict[str, Any]], float]]:
    """Returns the outcome of an uninterrupted run, by `rollout.ahead`."""
    root = tmp_path_factory.mktemp("whole")
    known: dict[int, tuple[list[dict[str, Any]], float]] = {}

    def find(ahead: int) -> tuple[list[dict[str, Any]], float]:
        if ahead not in known:
            known[ahead] = outcome(root / str(ahead), run(settings(root / str(ahead), ahead), model))
        return known[ahead]

    return find


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_each_step_trains_on_the_weights_of_so_many_steps_before(tmp_path, model, whole, ahead):
    rows = whole(ahead)[0][1:]
    name = "rollout/staleness_"
    if ahead == 0:
        assert not any(key.startswith(name) for row in rows for key in row)
        return
    expected = [min(step - 1, ahead) for step in range(1, STEPS + 1)]
    assert [row[f"{name}max"] for row in rows] == [row[f"{name}mean"] for row in rows] == expected


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_run_that_died_ends_as_if_it_had_not(tmp_path, model, whole, step, ahead):
    cfg = settings(tmp_path / "run", ahead)
    run(cfg, model, kill_in_update(step))
    cfg.rollout.journal = step % 2 == 0
    trainer = run(cfg, model)
    assert outcome(tmp_path / "run", trainer) == whole(ahead)


PROVEN_KEYS = {"rollout.ahead"}


def versions(root: Path) -> dict[int, int]:
    """The version of the weights that sampled each step."""
    ages = {row["step"]: row.get("rollout/staleness_max", 0.0) for row in metrics(root) if row["step"] > 0}
    return {step: step - int(age) for step, age in ages.items()}


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_changed_key_acts_from_the_first_step_on_that_the_checkpoint_does_not_hold(
    tmp_path, model, whole, before, after
):
    run(settings(tmp_path / "run", before), model, kill_in_update(6))
    outcomes = []
    for name in ("first", "second"):
        root = tmp_path / name
        shutil.copytree(tmp_path / "run", root)
        cfg = settings(root, after, allow_config_change=["rollout.ahead"])
        outcomes.append(outcome(root, run(cfg, model)))
    assert outcomes[0] == outcomes[1]
    first = [{name: row[name] for name in row if "staleness" not in name} for row in outcomes[0][0][:6]]
    expected = [{name: row[name] for name in row if "staleness" not in name} for row in whole(before)[0][:6]]
    assert first == expected, "step 5 has episodes of the same weights with any key"
    held = {step: max(1, step - before) for step in range(1, 4 + before + 1)}
    fresh = {step: max(5, step - after) for step in range(4 + before + 1, STEPS + 1)}
    assert versions(tmp_path / "first") == held | fresh
    if before == after:
        assert outcomes[0] == whole(after)
