"""Runs with `rollout.ahead`: killed, forked, extended and continued, over a toy learner whose weights are a number."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.jobs import comparable, metrics
from tests.support.replies import Replies, evaluator_beside, sampling_source
from tests.support.runs import on_prompts
from tests.support.toy import ToyLearner
from trainer.config import Config
from trainer.errors import FailureSource, UserError, WorkerError, set_failure_source
from trainer.generation.engine import Completion, Request
from trainer.metrics.timing import Timer
from trainer.models.tokenizer import load_tokenizer
from trainer.objectives import Experience
from trainer.process.signals import Stopped
from trainer.run.directory import RunDirectory
from trainer.run.state import StopRequest
from trainer.sources.batches import StepBatch
from trainer.sources.sampling import StepInFlight
from trainer.tasks.base import open_journal
from trainer.trainer import Trainer

STEPS = 7


class Learner(ToyLearner):
    """Its number depends on every token that it has trained on, and on their order."""

    def make_experience(self, episodes: Any, step: int) -> Experience:
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
        self.weights, self.version = 0.0, 0
        self.made: list[tuple[int, int]] = []
        """The seed of each completion, and the version of the weights that made it."""
        self.chance: Callable[[], str] = lambda: ""
        self.fail: Callable[[Sequence[Request]], None] = lambda requests: None

    def start(self, version: int, is_initial: bool) -> None:
        self.sync_weights(version, "abort")

    def sync_weights(self, version: int, running: str) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.weights, self.version = self._learner.ranks.number, version

    async def complete_together(self, requests: Sequence[Request]) -> list[Completion]:
        weights, version, completions = self.weights, self.version, []
        self.fail(requests)
        for request in requests:
            await asyncio.sleep(0)
            assert self.version == version, "weights change while a batch is generated"
            prompt = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=True)
            text = f"{zlib.crc32(f'{prompt} {request.seed} {weights}{self.chance()}'.encode()):08x}"
            tokens = self._tokenizer.encode(text[: 1 + request.seed % 8], add_special_tokens=False)
            self.seeds.append(request.seed)
            self.made.append((request.seed, version))
            completions.append(Completion(tokens, [-1.0] * len(tokens), "stop", version))
        return completions


def settings(root: Path, ahead: int = 1, **trainer: Any) -> Config:
    root.mkdir(exist_ok=True, parents=True)
    given = {"total_steps": STEPS, "val_interval": 3, **trainer}
    cfg = on_prompts(root, root.parent / "prompts.jsonl", 10, **given)
    cfg.rollout.ahead = ahead
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
            trainer.run()
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


def versions(root: Path) -> dict[int, int]:
    """The version of the weights that sampled each step."""
    ages = {row["step"]: row.get("rollout/staleness_max", 0.0) for row in metrics(root) if row["step"] > 0}
    return {step: step - int(age) for step, age in ages.items()}


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


@pytest.fixture(scope="module")
def killed(model, tmp_path_factory) -> Callable[[int], Path]:
    """Returns the directory of a run that was killed in step 6, by `rollout.ahead`. It has saved step 4."""
    root = tmp_path_factory.mktemp("killed")

    def find(ahead: int) -> Path:
        directory = root / str(ahead)
        if not directory.exists():
            run(settings(directory, ahead), model, kill_in_update(6))
        return directory

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


def test_it_is_known_how_long_engines_generate_and_wait(tmp_path, model):
    """Engines wait for new weights while ranks train: here for the rest of an update, once the next step is sampled."""

    def slow(trainer: Trainer, engines: Any) -> None:
        update = trainer.learner.update

        def update_later(experience: Any, step: int) -> Any:
            while len(engines.made) < 6 * min(step + 1, 4):
                time.sleep(0.01)
            time.sleep(0.2)
            return update(experience, step)

        trainer.learner.update = update_later  # type: ignore[method-assign]

    run(settings(tmp_path / "run", 1, total_steps=4, val_interval=-1), model, slow)
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(0 < row["time/generation"] < row["time/step"] for row in rows[1:])
    assert all(row["time/wait_weights"] >= 0.2 for row in rows[1:-1]), rows


@pytest.mark.parametrize(
    ("ahead", "steps", "journal"), [(1, [1, 4, 5], True), (1, [2, 7], False), (2, [3, 3, 6], True), (2, [5], False)]
)
def test_a_run_that_died_ends_as_if_it_had_not(tmp_path, model, whole, steps, ahead, journal):
    cfg = settings(tmp_path / "run", ahead)
    cfg.rollout.journal = journal
    for step in steps:
        run(cfg, model, kill_in_update(step))
    assert outcome(tmp_path / "run", run(cfg, model)) == whole(ahead)


def test_a_run_with_every_kind_of_sampling_that_died_ends_as_if_it_had_not(tmp_path, model):
    """Further draws, baselines, and a curriculum whose order depends on the rewards of the steps before."""

    def everything(root: Path) -> Config:
        cfg = settings(root, 2)
        cfg.algorithm.dynamic_sampling, cfg.algorithm.options["max_gen_batches"] = True, 2
        cfg.data.curriculum = "tests.support.curriculum:hardest_first"
        cfg.reward.name = "tests.support.named_rewards:length"
        return cfg

    whole = outcome(tmp_path / "whole", run(everything(tmp_path / "whole"), model, needs_baselines=True))
    assert max(row.get("sampling/batches", 0) for row in whole[0]) > 1 and whole[0][-1]["progress/epoch"] > 2
    for step in (3, 5):
        run(everything(tmp_path / "run"), model, kill_in_update(step), needs_baselines=True)
    trainer = run(everything(tmp_path / "run"), model, needs_baselines=True)
    assert outcome(tmp_path / "run", trainer) == whole


def lost(member: str) -> WorkerError:
    error = WorkerError(f"{member} died", "restart", "killed")
    set_failure_source(error, FailureSource(member, "10.0.0.7"))
    return error


@pytest.mark.parametrize("ahead", [1, 2])
def test_ranks_and_engines_that_die_at_any_time_cost_nothing_but_time(tmp_path, model, whole, ahead):
    """The error of a thread is raised by the training thread, which goes back to the last commit."""
    dead: list[str] = []

    def disturb(trainer: Trainer, engines: Engines) -> None:
        update, calls = trainer.learner.update, iter(range(100))

        def update_or_die(experience: Any, step: int) -> dict[str, float]:
            if step == 5 and dead.count("rank") < 2:
                dead.append("rank")
                raise lost("policy rank 0")
            return update(experience, step)

        def die(requests: Sequence[Request]) -> None:
            if next(calls) in (3, 9):
                dead.append("engine")
                raise lost("engine 0")

        trainer.learner.update = update_or_die  # type: ignore[method-assign]
        engines.fail = die

    trainer = run(settings(tmp_path / "run", ahead, max_restarts=9), model, disturb)
    assert sorted(dead) == ["engine", "engine", "rank", "rank"]
    assert outcome(tmp_path / "run", trainer) == whole(ahead)


@pytest.mark.parametrize("failing", [4, 5])
def test_a_sentence_to_the_user_that_a_thread_raises_ends_the_run_at_its_step(tmp_path, model, whole, failing):
    """The steps before are logged. The save after step 4 needs the batch of step 5."""

    def disturb(trainer: Trainer, engines: Engines) -> None:
        async def refuse(step: StepInFlight) -> StepBatch:
            if step.step == failing:
                raise UserError("reward.max_error_rate: too many have failed")
            return await make(step)

        make = trainer.source._make_batch  # type: ignore[attr-defined]
        trainer.source._make_batch = refuse  # type: ignore[attr-defined]

    with pytest.raises(UserError, match="^reward.max_error_rate: too many have failed$"):
        run(settings(tmp_path / "run"), model, disturb)
    assert comparable(metrics(tmp_path / "run")) == whole(1)[0][:failing]
    assert outcome(tmp_path / "run", run(settings(tmp_path / "run"), model)) == whole(1)


def test_a_save_that_waits_for_a_batch_is_complete_when_another_failure_ends_the_run(tmp_path, model, whole):
    """The rewards of step 6 are still computed when the run fails in step 5. The checkpoint of step 4 needs them."""
    has_rewards = threading.Event()

    def disturb(trainer: Trainer, engines: Engines) -> None:
        make = trainer.source._make_batch  # type: ignore[attr-defined]

        async def make_slowly(step: StepInFlight) -> StepBatch:
            batch = await make(step)
            while step.step == 6 and not has_rewards.is_set():
                await asyncio.sleep(0.01)
            return batch

        def fail(experience: Any, step: int) -> dict[str, float]:
            if step == 5:
                threading.Timer(0.5, has_rewards.set).start()
                raise RuntimeError("a bug")
            return update(experience, step)

        update = trainer.learner.update
        trainer.source._make_batch = make_slowly  # type: ignore[attr-defined]
        trainer.learner.update = fail  # type: ignore[method-assign]

    cfg = settings(tmp_path / "run", 2)
    with pytest.raises(RuntimeError, match="a bug"):
        run(cfg, model, disturb)
    assert (tmp_path / "run/checkpoints/global_step_4").exists()
    assert outcome(tmp_path / "run", run(cfg, model)) == whole(2)


def test_a_run_that_stops_while_a_batch_is_made_ends_at_once_and_continues(tmp_path, model, whole):
    """The engines never answer the requests of the batch ahead."""
    hangs = threading.Event()

    def disturb(trainer: Trainer, engines: Engines) -> None:
        async def hang(step: StepInFlight) -> StepBatch:
            if step.step == 5:
                hangs.set()
                trainer.stop.ask("SIGTERM")
                await asyncio.Event().wait()
            return await make(step)

        make = trainer.source._make_batch  # type: ignore[attr-defined]
        trainer.source._make_batch = hang  # type: ignore[attr-defined]

    cfg = settings(tmp_path / "run", ckpt_interval=100)
    cfg.rollout.engine = "transformers"  # so that the evaluation of step 3 runs beside the batch
    with pytest.raises(Stopped, match="stopped after step 3 of 7"):
        run(cfg, model, disturb)
    assert hangs.is_set()
    assert outcome(tmp_path / "run", run(cfg, model)) == whole(1)


def test_steps_come_back_as_they_were_even_if_engines_never_repeat_themselves(tmp_path, model, caplog):
    """Step 5 from the checkpoint, step 6 from the journal."""

    def disturb(step: int) -> Disturb:
        def change(trainer: Trainer, engines: Engines) -> None:
            engines.repeats, engines.chance = False, lambda: os.urandom(4).hex()
            kill_in_update(step)(trainer, engines)

        return change

    cfg = settings(tmp_path / "run", 1, ckpt_interval=4)
    run(cfg, model, disturb(7))
    before = comparable(metrics(tmp_path / "run"))
    caplog.set_level("INFO")
    run(cfg, model, disturb(100))
    assert comparable(metrics(tmp_path / "run"))[: len(before)] == before
    assert any(line.startswith("resume verified: 2 replayed steps identical") for line in caplog.messages)


@pytest.mark.parametrize("ahead", [1, 2])
def test_records_of_groups_that_the_checkpoint_had_are_not_called_unusable(tmp_path, model, killed, caplog, ahead):
    """Nobody asks for records of these."""
    shutil.copytree(killed(ahead), tmp_path / "run")
    caplog.set_level("INFO")
    run(settings(tmp_path / "run", ahead), model)
    (line,) = [message for message in caplog.messages if "came from the journal" in message]
    assert "not used" not in line


@pytest.mark.parametrize("ahead", [1, 2])
def test_an_edit_of_the_reward_and_a_model_that_has_moved_leave_the_held_batches(
    tmp_path, model, whole, killed, ahead, monkeypatch
):
    """Only weights that are gone could sample them. A comment in the reward changes no number."""
    shutil.copytree(killed(ahead), tmp_path / "run")
    shutil.copytree(model, tmp_path / "model", copy_function=shutil.copy)
    for name in os.listdir(tmp_path / "model"):
        os.utime(tmp_path / "model" / name, (1, 1))
    monkeypatch.setattr("trainer.journal.history.digest_code", lambda path: "edited" if ":" in path else None)
    monkeypatch.setattr("trainer.journal.history.__version__", "99.0")
    trainer = run(settings(tmp_path / "run", ahead), str(tmp_path / "model"))
    assert outcome(tmp_path / "run", trainer) == whole(ahead)


@pytest.mark.parametrize("changed", ["", "rollout.temperature", "baselines"])
def test_a_fork_trains_on_the_held_batches_unless_its_rollouts_differ(tmp_path, model, whole, killed, caplog, changed):
    """An estimator that reads baselines would take those that the parent did not sample for failed ones."""
    parent = f"{killed(2)}/checkpoints/global_step_4"
    cfg = settings(tmp_path / "fork", 2, resume_path=parent)
    cfg.trainer.resume_mode, cfg.rollout.temperature = "from_path", 0.5 if changed == "rollout.temperature" else 1.0
    caplog.set_level("INFO")
    trainer = run(cfg, model, needs_baselines=changed == "baselines")
    told = [line for line in caplog.messages if "generated again" in line]
    if not changed:
        assert outcome(tmp_path / "fork", trainer)[1] == whole(2)[1] and not told
    else:
        assert told == [f"{parent}: its rollouts of steps 5 to 6 are of other {changed}, and are generated again"]
        assert [versions(tmp_path / "fork")[step] for step in (5, 6, 7)] == [5, 5, 5]


def test_an_extended_run_samples_ahead_again_from_the_weights_it_has(tmp_path, model, whole):
    run(settings(tmp_path / "run", 1, total_steps=4), model)
    trainer = run(settings(tmp_path / "run", 1), model)
    assert versions(tmp_path / "run") == {1: 1, 2: 1, 3: 2, 4: 3, 5: 5, 6: 5, 7: 6}
    losses = [[row.get("policy/loss") for row in rows[:5]] for rows in (metrics(tmp_path / "run"), whole(1)[0])]
    assert losses[0] == losses[1] and trainer.state.step == STEPS


PROVEN_KEYS = {"rollout.ahead"}


def comparable_steps(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in row if "staleness" not in name} for row in rows]


@pytest.mark.parametrize(("before", "after"), [(0, 2), (1, 2), (2, 0), (2, 1)])
def test_a_changed_key_acts_from_the_first_step_on_that_the_checkpoint_does_not_hold(
    tmp_path, model, whole, killed, before, after
):
    shutil.copytree(killed(before), tmp_path / "run")
    cfg = settings(tmp_path / "run", after, allow_config_change=["rollout.ahead"])
    rows, _ = outcome(tmp_path / "run", run(cfg, model))
    assert comparable_steps(rows[:6]) == comparable_steps(whole(before)[0][:6]), "step 5 is the same with any key"
    held = {step: max(1, step - before) for step in range(1, 4 + before + 1)}
    fresh = {step: max(5, step - after) for step in range(4 + before + 1, STEPS + 1)}
    assert versions(tmp_path / "run") == held | fresh
