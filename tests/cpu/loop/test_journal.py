"""A run whose engines never repeat themselves, killed and continued: the real trainer over a toy learner."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.buckets import make_bucket, s3_server, use_s3
from tests.support.jobs import comparable, metrics
from tests.support.replies import Replies, evaluator_beside, sampling_source
from tests.support.runs import on_prompts
from tests.support.toy import ToyLearner
from trainer.checkpoint.__main__ import main as checkpoint_tool
from trainer.checkpoint.storage import JOURNAL, open_storage, records_in
from trainer.config import Config
from trainer.generation.engine import Completion, Request, by_length
from trainer.generation.transformers_engine import TransformersEngine
from trainer.journal.journal import Journal
from trainer.metrics.timing import Timer
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer
from trainer.process import time_limits
from trainer.run.directory import RunDirectory
from trainer.run.state import StopRequest
from trainer.tasks.base import open_journal
from trainer.trainer import Trainer

STEPS = 6


class Chance(Replies):
    """Engines with other replies each time."""

    synced_bytes = 0

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer, lambda prompt, number, sampling: os.urandom(4).hex()[: 1 + number])
        self.repeats = False

    def start(self, version: int, is_initial: bool) -> None:
        pass

    def sync_weights(self, version: int, running: str) -> None:
        pass


def settings(root: Path, **trainer: Any) -> Config:
    root.mkdir(exist_ok=True)
    return on_prompts(root / "run", root / "prompts.jsonl", 12, total_steps=STEPS, val_interval=1, **trainer)


class Killed(BaseException):
    pass


def run(
    cfg: Config,
    model: str,
    kill_in: int | None = None,
    repeats: bool = False,
    copy_to: Path | None = None,
) -> int:
    """Run to the end, or to a kill at the begin of the update of a step; returns how many completions were generated.

    Args:
        copy_to: gets the files of the moment of the kill; the end of this process writes more.
        repeats: what the engines say of themselves.
    """
    with RunDirectory(cfg).open() as directory:
        tokenizer, timer, learner = load_tokenizer(model), Timer(), ToyLearner()
        journal = open_journal(cfg, model, directory, timer)
        engines = Chance(tokenizer)
        engines.repeats = repeats
        source = sampling_source(cfg, engines, model, journal=journal)
        update = learner.update

        def update_or_die(experience: Any, step: int) -> dict[str, float]:
            if step == kill_in:
                if copy_to is not None:
                    shutil.copytree(cfg.trainer.run_dir, copy_to, ignore=shutil.ignore_patterns(".lock"))
                raise Killed
            return update(experience, step)

        learner.update = update_or_die  # type: ignore[method-assign]
        trainer = Trainer(
            cfg, directory, source, learner, model, tokenizer, timer, StopRequest(None), journal,
            evaluator_beside(source, model),
        )  # fmt: skip
        try:
            trainer.run()
        except Killed:
            directory.checkpoints.wait()
        return len(engines.seeds)


ONE_STEP = 3 * 2 + 2  # two completions for each of three prompts, and a validation of two


def rows_of(root: Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in metrics(root / "run")}


def test_steps_that_are_trained_again_are_as_they_were(tmp_path, model, caplog):
    """With `on_resume_mismatch=stop`, a step that is trained on anything else would end the run."""
    caplog.set_level("INFO")
    cfg = settings(tmp_path)
    assert run(cfg, model, kill_in=4) == 2 + 4 * ONE_STEP - 2, "its initial weights are validated"
    before = rows_of(tmp_path)
    assert {*before} == {0, 1, 2, 3}
    generated = run(cfg, model, kill_in=6)
    assert generated == 2 * ONE_STEP, "the validation of step 4, step 5, and step 6 without it"
    assert "of steps 3 to 4, 8 groups came from the journal and 2 were generated\n" in caplog.text + "\n"
    assert "resume verified: 1 replayed step identical" in caplog.text
    middle = rows_of(tmp_path)
    assert comparable([middle[step] for step in before]) == comparable([*before.values()])
    assert run(cfg, model) == 2, "the validation of step 6"
    after = rows_of(tmp_path)
    assert {*after} == {*range(7)} and comparable([after[s] for s in middle]) == comparable([*middle.values()])
    kept = {int(name.split("-")[0][5:]) for name in os.listdir(tmp_path / "run/.journal")}
    assert kept == {5, 6}, "behind the last commit but one"


def test_a_run_without_a_checkpoint_begins_with_its_records(tmp_path, model):
    cfg = settings(tmp_path)
    run(cfg, model, kill_in=2)
    before = rows_of(tmp_path)
    assert run(cfg, model, kill_in=2) == 0
    assert comparable([*rows_of(tmp_path).values()]) == comparable([*before.values()]) and {*before} == {0, 1}


def test_no_step_trains_on_groups_that_are_not_on_the_disk(tmp_path, model):
    cfg = settings(tmp_path)
    run(cfg, model, kill_in=2, copy_to=tmp_path / "killed")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "killed").rename(tmp_path / "run")
    assert run(cfg, model, kill_in=2) == 0


def test_nothing_comes_back_without_the_journal(tmp_path, model):
    cfg = settings(tmp_path)
    run(cfg, model, kill_in=4)
    cfg.rollout.journal = False
    with pytest.raises(Exception, match="step 3 was not replayed as it had been logged"):
        run(cfg, model, repeats=True)


def test_records_are_not_used_after_steps_that_were_trained_without_the_journal(tmp_path, model, caplog):
    """The weights behind the checkpoint have another history."""
    caplog.set_level("INFO")
    cfg = settings(tmp_path)
    cfg.trainer.ckpt_interval = 4
    run(cfg, model, kill_in=4)
    shutil.copytree(tmp_path / "run/.journal", tmp_path / "records")
    cfg.rollout.journal, cfg.trainer.ckpt_interval, cfg.trainer.on_resume_mismatch = False, 2, "warn"
    run(cfg, model, kill_in=4)
    shutil.rmtree(tmp_path / "run/.journal", ignore_errors=True)
    shutil.copytree(tmp_path / "records", tmp_path / "run/.journal")
    cfg.rollout.journal = True
    caplog.clear()
    assert run(cfg, model, kill_in=4) == 2 * ONE_STEP - 2
    assert (
        "0 groups came from the journal" in caplog.text
        and "not used: 8 of another config, code, history" in caplog.text
    )


def test_a_start_without_the_journal_deletes_the_records_of_steps_that_it_trains_otherwise(tmp_path, model):
    """The log has other steps than these records give, so a comparison with it would end the run."""
    cfg = settings(tmp_path)
    run(cfg, model, kill_in=4)
    cfg.rollout.journal, cfg.trainer.on_resume_mismatch = False, "warn"
    run(cfg, model, kill_in=4)
    cfg.rollout.journal, cfg.trainer.on_resume_mismatch = True, "stop"
    assert run(cfg, model, kill_in=4) == 2 * ONE_STEP - 2


def test_a_step_with_episodes_of_its_own_ends_the_exact_comparison(tmp_path, model, caplog):
    """The records of a step in the middle are lost, and those after it are of other weights."""
    caplog.set_level("INFO")
    cfg = settings(tmp_path)
    run(cfg, model, kill_in=6)
    shutil.rmtree(f"{cfg.trainer.ckpt_path}/global_step_4")
    max((tmp_path / "run/.journal").glob("step_4-*"), key=lambda path: path.stat().st_size).unlink()
    caplog.clear()
    assert run(cfg, model, kill_in=6) == 3 * ONE_STEP - 2, "steps 4 and 5, and step 6 without its validation"
    assert "resume verified: 1 replayed step identical (the first step alone can be compared" in caplog.text


def test_a_changed_key_is_generated_anew_from_the_step_on_at_which_it_acts(tmp_path, model, caplog):
    caplog.set_level("INFO")
    cfg = settings(tmp_path)
    run(cfg, model, kill_in=6)
    for name in ("rate", "heat"):
        shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-{name}"))
    rate = settings(tmp_path.with_name(f"{tmp_path.name}-rate"), allow_config_change=["trainer.policy.optimizer.lr"])
    rate.data = cfg.data
    rate.trainer.policy.optimizer.lr *= 2
    shutil.rmtree(f"{rate.trainer.ckpt_path}/global_step_4")
    assert run(rate, model, kill_in=5) == 2 * ONE_STEP - 2 + 2, "the rollouts of step 3 are those of the old weights"
    heat = settings(tmp_path.with_name(f"{tmp_path.name}-heat"), allow_config_change=["rollout.temperature"])
    heat.data = cfg.data
    heat.rollout.temperature = 0.5
    caplog.clear()
    assert run(heat, model, kill_in=6) == 2 * ONE_STEP - 2 and "of another config" in caplog.text


def test_a_rollback_generates_anew(tmp_path, model):
    cfg = settings(tmp_path)
    run(cfg, model, kill_in=6)
    assert checkpoint_tool(["rollback", str(tmp_path / "run"), "--to", "2"]) == 0
    cfg.trainer.on_resume_mismatch = "warn"
    assert run(cfg, model, kill_in=4) == 2 * ONE_STEP - 2


def test_a_fork_generates_anew(tmp_path, model):
    cfg = settings(tmp_path)
    run(cfg, model, kill_in=4)
    fork = settings(tmp_path / "fork", resume_path=f"{cfg.trainer.ckpt_path}/global_step_2")
    fork.data, fork.trainer.resume_mode = cfg.data, "from_path"
    shutil.copytree(tmp_path / "run/.journal", tmp_path / "fork/run/.journal")
    assert run(fork, model, kill_in=4) == 2 * ONE_STEP - 2
    assert run(fork, model, kill_in=4) == 0, "its own records have the same history again"


def test_a_machine_with_an_empty_disk_brings_the_records_from_the_store(tmp_path, model, monkeypatch, caplog):
    """Without them, the steps are generated again, and nothing else is lost."""
    caplog.set_level("INFO")
    with s3_server() as url:
        use_s3(monkeypatch, url)
        monkeypatch.setattr(time_limits, "LOCK_LEASE_S", 1.0)
        cfg = settings(tmp_path, ckpt_path=make_bucket("records") + "/run")
        store = open_storage(cfg.trainer.ckpt_path)
        run(cfg, model, kill_in=4)
        assert {*records_in(store.names(JOURNAL)).values()} >= {3, 4}
        shutil.rmtree(tmp_path / "run")
        assert run(cfg, model, kill_in=5) == ONE_STEP, "the validation of step 4, and step 5 without it"
        shutil.rmtree(tmp_path / "run")
        for name in store.names(JOURNAL):
            store.delete(f"{JOURNAL}/{name}")
        assert run(cfg, model) == 2 * ONE_STEP
        assert [*rows_of(tmp_path)] == [*range(STEPS + 1)] and {*records_in(store.names(JOURNAL)).values()} <= {5, 6}


class Batches(Chance):
    """The engine of transformers, in this process: batches of up to eight."""

    def __init__(self, model: str, cfg: Config):
        super().__init__(load_tokenizer(model))
        self.repeats = True
        self._engine = TransformersEngine(model, dtype="float32", seed=0, rollout=cfg.rollout, device="cpu")

    async def complete_together(self, requests: Sequence[Request]) -> list[Completion]:
        self.seeds += [request.seed for request in requests]
        completions: dict[int, Completion] = {}
        for batch in by_length(requests, 1, 8):
            completions |= zip(batch, self._engine.generate([requests[place] for place in batch]), strict=True)
        return [completions[place] for place in range(len(requests))]


class ExactLearner(ToyLearner):
    """Its number depends on each bit of the log-probs that it has trained on."""

    def make_experience(self, episodes: Any, step: int) -> Any:
        experience = super().make_experience(episodes, step)
        sums = [sum(float(sample.logprobs.sum(dtype=float)) for sample in episode.samples) for episode in episodes]
        experience.batch["drawn"] = np.asarray(sums)
        return experience


def run_batches(
    cfg: Config, model: str, monkeypatch: pytest.MonkeyPatch, kill_after: int | None = None, most_turns: int = 0
) -> int:
    """Run two steps, or to a kill while the rewards of the first one are computed.

    Args:
        kill_after: number of episodes of the step that are recorded before the kill.
        most_turns: number of replies and answers that are recorded before it.

    Returns:
        how many completions were generated.
    """
    with RunDirectory(cfg).open() as directory, monkeypatch.context() as patch:
        tokenizer, timer = load_tokenizer(model), Timer()
        journal = open_journal(cfg, model, directory, timer)
        engines, add, added, added_turns = Batches(model, cfg), Journal.add, 0, 0

        def add_or_die(
            self: Journal, step: int, groups: Any, history: Any, version: Any = None, turns: Any = ()
        ) -> None:
            nonlocal added, added_turns
            room = len(groups) if kill_after is None else kill_after - added
            kept = turns if kill_after is None or added_turns < most_turns else ()
            add(self, step, dict(list(groups.items())[:room]), history, version, kept)
            added, added_turns = added + len(groups), added_turns + len(turns)
            if room < len(groups):
                self._wait_written()
                raise Killed

        patch.setattr(Journal, "add", add_or_die)
        source = sampling_source(cfg, engines, model, journal=journal)
        trainer = Trainer(
            cfg, directory, source, ExactLearner(), model, tokenizer, timer, StopRequest(None), journal,
            evaluator_beside(source, model),
        )  # fmt: skip
        with pytest.raises(Killed) if kill_after is not None else contextlib.nullcontext():
            trainer.run()
        return len(engines.seeds)


@pytest.mark.parametrize("has_turns", [False, True])
def test_what_is_missing_after_a_kill_in_the_reward_phase_has_the_same_bits(tmp_path, monkeypatch, has_turns):
    """The log-probs of transformers depend on which requests run together: what is recorded runs again as company."""
    model = str(tmp_path / "model")
    build_tiny(TinyShape(hidden_size=384, intermediate_size=1024), model)
    (tmp_path / "model/generation_config.json").write_text(json.dumps({"eos_token_id": [*range(0, 256, 9)]}))
    rows, generated = [], []
    runs = (("whole", None, 0), ("most", 11, 0), ("some", 1, 0), ("turns", 1, 17), ("one file", 1, 17))
    for name, kill_after, turns in runs:
        cfg = settings(tmp_path / name)
        cfg.rollout.engine, cfg.rollout.n, cfg.rollout.max_response_tokens = "transformers", 2, 12
        cfg.trainer.total_steps, cfg.trainer.train_batch_size, cfg.trainer.val_interval = 2, 6, -1
        lines = [json.dumps({"prompt": f"p{i}" * (1 + i), "answer": "x", "turns": 1 + i % 3}) for i in range(12)]
        cfg.data.train_files = [str(tmp_path / "prompts.jsonl")]
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
        if has_turns:
            cfg.environment.name = "tests.support.environments:Echo"
        if kill_after is not None:
            with monkeypatch.context() as patch:
                if name == "one file":  # the first episode ends before its reply is in a file
                    patch.setattr(time_limits, "JOURNAL_FLUSH_S", 60.0)
                run_batches(cfg, model, monkeypatch, kill_after, turns)
        generated.append(run_batches(cfg, model, monkeypatch))
        rows.append(comparable(metrics(tmp_path / name / "run")))
    whole = generated[0]
    assert whole > 24 if has_turns else whole == 24
    assert generated == [whole] * 3 + [whole if has_turns else whole - 12] * 2, "all replies of one turn were recorded"
    assert rows[1:] == [rows[0]] * 4
