"""A validation that a signal has ended, and that the next start does: the checkpoint is as good as any other then."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.buckets import make_bucket, use_s3
from tests.support.fault_proxy import ERROR, PASS, Faults, fault_proxy
from tests.support.jobs import comparable, metrics, wait_until
from tests.support.toy import toy_config, toy_trainer
from trainer.checkpoint import late_validation
from trainer.checkpoint.choice import choose_checkpoint
from trainer.checkpoint.inspection import describe_all
from trainer.checkpoint.manifest import read
from trainer.checkpoint.store import open_store
from trainer.config import Config, SinkConfig
from trainer.jobs import _is_finished
from trainer.process import time_limits
from trainer.process.signals import NoServerStopped, Stopped
from trainer.run.directory import RunDirectory
from trainer.run.run_files import RunFiles
from trainer.sources.base import Evaluation
from trainer.trainer import Trainer


class Killed(Exception):
    pass


class Evaluator:
    """Gives step `best` the best accuracy, writes a file of episodes, and ends as if by a signal in step `waits_in`."""

    def __init__(self, trainer: Trainer, best: int, waits_in: int | None):
        self._trainer = trainer
        self._best = best
        self._waits_in = waits_in

    def evaluate(self, step: int) -> Evaluation:
        if step == self._waits_in:
            self._trainer.stop.ask("SIGTERM")
            raise NoServerStopped("no server")
        folder = Path(self._trainer.cfg.trainer.run_dir, "validation")
        folder.mkdir(exist_ok=True)
        (folder / f"step_{step}.jsonl").write_text("{}\n")
        return Evaluation({"val/accuracy": 0.9 if step == self._best else step / 100})


class Steps:
    """A sink that keeps the steps, and whether each is whole."""

    logged: ClassVar[list[tuple[int, bool]]] = []

    def __init__(self, run_dir, config):
        pass

    def begin(self, rows, step):
        self.logged.clear()
        for row in rows:
            self.log(row["step"], row, {})

    def log(self, step, values, samples):
        self.logged.append((step, {"policy/loss", "val/accuracy"} <= set(values)))

    def close(self, exit_code):
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("toy") / "model"


@pytest.fixture(params=["disk", "s3", "tiers"])
def places(request, tmp_path, s3_url, monkeypatch) -> dict[str, str]:
    if request.param == "disk":
        return {"ckpt_path": str(tmp_path / "store")}
    use_s3(monkeypatch, s3_url)
    cache = {"ckpt_cache_dir": str(tmp_path / "cache")} if request.param == "tiers" else {}
    return {"ckpt_path": make_bucket(f"late-{os.urandom(4).hex()}") + "/run", **cache}


def config(root: Path, **trainer) -> Config:
    return toy_config(root / "run", **{"val_interval": 1, "val_before_train": False, **trainer})


def train(
    cfg: Config, model: Path, best: int = 5, waits_in: int | None = None, validates: bool = True, dies: bool = False
) -> bool:
    """Train to the end, unless the run was finished before; returns whether it was."""
    with RunDirectory(cfg).open() as directory:
        if _is_finished(directory, cfg.total_steps, exported=False):
            return True
        trainer = toy_trainer(cfg, directory, model)
        if validates:
            trainer.evaluator = Evaluator(trainer, best, waits_in)

        def die(*_):
            raise Killed

        if dies:
            directory.add_validation = die
        try:
            with directory.settling():
                trainer.fit()
        finally:
            uploads = directory.checkpoints.store.uploads
            wait_until(lambda: uploads is None or not uploads.waiting())  # a run waits for its newest checkpoint alone
    return False


def test_the_checkpoint_has_its_score_and_carries_the_metrics_also_after_a_kill(tmp_path, model, places):
    """The last step is the best one, and nothing is saved after its validation."""
    cfg = config(tmp_path, ckpt_interval=2, **places)
    with pytest.raises(Stopped):
        train(cfg, model, waits_in=5)
    assert choose_checkpoint(cfg.trainer.ckpt_path, None, best=True)[0].step == 4
    with pytest.raises(Killed):  # the line of the step is complete, and the checkpoint is not
        train(cfg, model, dies=True)
    assert not train(cfg, model)
    logged = metrics(tmp_path / "run")
    for root in (cfg.trainer.ckpt_path, cfg.trainer.ckpt_cache_dir):
        rows = describe_all(open_store(root), "hash") if root else []
        assert [(row["step"], row["score"]) for row in rows] in ([], [(2, 0.02), (4, 0.04), (5, 0.9)])
        assert not root or choose_checkpoint(root, None, best=True)[0].step == 5
    if not open_store(cfg.trainer.ckpt_path).keeps_record:
        assert train(cfg, model)
        return
    for lost in ("run", "cache"):
        shutil.rmtree(tmp_path / lost, ignore_errors=True)
    assert train(cfg, model), "nothing is left to do on a machine with an empty disk"
    assert metrics(tmp_path / "run") == logged and (tmp_path / "run/validation/step_5.jsonl").exists()


@pytest.mark.parametrize("is_added", [True, False])
def test_a_run_that_goes_back_to_the_checkpoint_knows_its_score(tmp_path, model, is_added):
    cfg = config(tmp_path, max_ckpts_to_keep=10)
    with pytest.raises(Stopped):
        train(cfg, model, best=2, waits_in=2)
    assert not train(cfg, model, best=2)
    logged = metrics(tmp_path / "run")
    for step in (4, 5):
        shutil.rmtree(tmp_path / f"run/checkpoints/global_step_{step}")
    lines = [{**row, "policy/loss": row["policy/loss"] + (row["step"] == 4)} for row in logged]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if not is_added:  # the store did not answer, so the run validates once more
        os.remove(tmp_path / "run/checkpoints/global_step_2" / late_validation.NAME)
    cfg.trainer.on_resume_mismatch = "fallback"
    cfg.logger.sink = SinkConfig(name=f"{__name__}:Steps")
    with RunDirectory(cfg).open() as directory:
        trainer = toy_trainer(cfg, directory, model)
        trainer.evaluator = Evaluator(trainer, 2, None)
        with directory.settling():
            trainer.fit()
        assert directory.continued.step == 2, "it resumes from step 3, and goes back"
    assert trainer.state.best == {"step": 2, "val/accuracy": 0.9}
    assert Steps.logged == [(step, True) for step in range(1, 6)]
    assert comparable(metrics(tmp_path / "run")) == comparable(logged)


def test_the_next_start_reaches_a_store_that_did_not_answer(tmp_path, model, s3_url, monkeypatch):
    use_s3(monkeypatch, s3_url)
    bucket = make_bucket(f"late-{os.urandom(4).hex()}") + "/run"
    cfg = config(tmp_path, ckpt_path=bucket, ckpt_cache_dir=str(tmp_path / "cache"))
    with pytest.raises(Stopped):
        train(cfg, model, waits_in=5)
    assert not train(cfg, model)
    remote = read(open_store(bucket).path(5))
    remote.files.storage.delete(late_validation.NAME)  # as if the put had failed
    assert late_validation.read(remote) is None
    assert train(cfg, model) and late_validation.read(remote)["score"] == 0.9


def test_a_store_that_fails_when_the_validation_is_added_does_not_end_the_run(
    tmp_path, model, s3_url, monkeypatch, caplog
):
    faults = Faults()
    monkeypatch.setattr(time_limits, "STORAGE_RETRY_S", 0.1)
    with fault_proxy(s3_url, faults) as url:
        use_s3(monkeypatch, url)
        cfg = config(tmp_path, ckpt_path=make_bucket(f"late-{os.urandom(4).hex()}") + "/run", total_steps=2)
        with pytest.raises(Stopped):
            train(cfg, model, waits_in=2)

        class Failing(Evaluator):
            def evaluate(self, step: int) -> Evaluation:
                faults.plan = lambda method, path: ERROR
                return super().evaluate(step)

        with RunDirectory(cfg).open() as directory:
            trainer = toy_trainer(cfg, directory, model)
            trainer.evaluator = Failing(trainer, 2, None)
            with directory.settling():
                trainer.fit()
            faults.plan = lambda method, path: PASS
        assert "its validation is not added (the object store fails" in caplog.text


def test_a_damaged_file_costs_nothing_that_the_checkpoint_carried_before(tmp_path, model, s3_url, monkeypatch):
    use_s3(monkeypatch, s3_url)
    cfg = config(tmp_path, ckpt_path=make_bucket(f"late-{os.urandom(4).hex()}") + "/run", total_steps=2)
    with pytest.raises(Stopped):
        train(cfg, model, waits_in=2)
    assert not train(cfg, model, best=2)
    assert train(cfg, model, best=2), "and deletes the pieces that no checkpoint names"
    storage = read(open_store(cfg.trainer.ckpt_path).path(2)).files.storage
    storage.put(late_validation.NAME, b"{}")
    shutil.rmtree(tmp_path / "run")
    assert not train(cfg, model, best=2) and metrics(tmp_path / "run")[-1]["val/accuracy"] == 0.9


def test_a_copy_on_a_disk_that_is_validated_there_keeps_what_it_carries(tmp_path, model, s3_url, monkeypatch):
    use_s3(monkeypatch, s3_url)
    store = open_store(make_bucket(f"late-{os.urandom(4).hex()}") + "/run")
    cfg = config(tmp_path, ckpt_path=store.root, total_steps=2)
    with pytest.raises(Stopped):
        train(cfg, model, waits_in=2)
    checkpoint = read(store.path(2))
    content = {"score_metric": "val/accuracy", "score_mode": "max", "score": 0.9}
    checkpoint.files.storage.put(late_validation.NAME, late_validation.dump(content, {}))
    RunFiles(str(tmp_path / "restored"), store).restore(checkpoint)
    assert [row["step"] for row in metrics(tmp_path / "restored")] == [1, 2]


def test_retention_keeps_the_best_checkpoint_that_was_validated_later(tmp_path, model):
    cfg = config(tmp_path, keep_best=1, max_ckpts_to_keep=1, best_metric="val/accuracy")
    with pytest.raises(Stopped):
        train(cfg, model, best=3, waits_in=3)
    cfg.trainer.total_steps, steps = 4, cfg.trainer.total_steps
    train(cfg, model, best=3)
    cfg.trainer.total_steps = steps
    train(cfg, model, best=3)  # keeps step 4, from which it continues, too
    assert open_store(cfg.trainer.ckpt_path).steps() == [3, 4, 5]


def test_a_sink_of_the_users_gets_each_step_once_and_whole(tmp_path, model, monkeypatch):
    monkeypatch.setattr(Steps, "logged", [])
    cfg = config(tmp_path)
    cfg.logger.sink.name = f"{__name__}:Steps"
    with pytest.raises(Stopped):
        train(cfg, model, waits_in=3)
    train(cfg, model)
    assert Steps.logged == [(step, True) for step in range(1, 6)]


def test_a_validation_whose_data_was_removed_is_forgotten_in_one_line(tmp_path, model, caplog):
    cfg = config(tmp_path)
    with pytest.raises(Stopped):
        train(cfg, model, waits_in=5)
    caplog.set_level("INFO")
    assert train(config(tmp_path, val_interval=-1), model)
    assert caplog.text.count("global_step_5 gets no validation: the config does not ask for it any more") == 1
    assert not train(cfg, model, validates=False), "only the data says that there is none"
    assert caplog.text.count("global_step_5 gets no validation: there is no data for it any more") == 1
    assert train(cfg, model) and "val/accuracy" not in metrics(tmp_path / "run")[-1]


def test_a_damaged_file_is_written_again(tmp_path, model, caplog):
    cfg = config(tmp_path)
    with pytest.raises(Stopped):
        train(cfg, model, waits_in=5)
    assert not train(cfg, model)
    file = Path(cfg.trainer.ckpt_path, "global_step_5", late_validation.NAME)
    content = file.read_text()
    file.write_text(content.replace("0.9", "0.8"))
    assert not train(cfg, model) and file.read_text() == content
    assert "validated.json is damaged (its content does not match its own hash)" in caplog.text
