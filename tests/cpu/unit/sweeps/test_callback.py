"""What is prepared and refused before the first job of a sweep. `test_sweeps.py` runs whole ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import optuna
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

from trainer.config.command_line import register_plugins
from trainer.config.hydra import conf_dir, register
from trainer.sweeps.callback import SweepCallback

OPTUNA = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3")


def config_of(directory: Path, *words: str, swept: tuple[str, ...] = ("trainer.seed=1,2",)) -> Any:
    """The config of a sweep in `directory`. Hydra's words come before the others."""
    fixed = [word for word in words if not word.startswith("hydra")]
    register()
    register_plugins(list(words))
    own = [f"hydra.sweep.dir={directory}", "hydra.mode=MULTIRUN"]
    with initialize_config_dir(version_base="1.3", config_dir=conf_dir()):
        config = compose("config", overrides=[*words, *own], return_hydra_config=True)
    with open_dict(config):
        config.hydra.overrides.task = [*fixed, *swept]
        config.hydra.overrides.hydra = []
    return config


def refusal(config: Any, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        SweepCallback().on_multirun_start(config)
    assert ended.value.code == 2
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("words", "swept", "sentence"),
    [
        (["trainer.seed=3"], ["trainer.seed=1,2"], "error: trainer.seed: has one value and also several, so jobs"),
        (
            ["hydra.output_subdir=x"],
            ["trainer.seed=1,2"],
            "error: hydra.output_subdir: Hydra would write secrets there",
        ),
        (["trainer.run_dir=here"], ["trainer.seed=1,2"], "error: trainer.run_dir: all jobs of a sweep would share it"),
        (
            [],
            ["+environment.kwargs.api_key=hush-1,hush-2"],
            "error: +environment.kwargs.api_key: the jobs of this sweep would differ only in a secret",
        ),
        (
            [*OPTUNA, "hydra.sweeper.direction=minimize"],
            ["trainer.seed=1,2"],
            "error: hydra.sweeper.direction=minimize: trainer.best_metric=val/accuracy requires maximize",
        ),
        (
            [*OPTUNA, "trainer.task=sft", "trainer.best_metric=val/loss"],
            ["trainer.seed=1,2"],
            "error: trainer.best_metric=val/loss: the sweep would search for the highest value; write -val/loss",
        ),
    ],
)
def test_a_sweep_that_cannot_be_meant_is_refused(words, swept, sentence, tmp_path, capsys):
    found = refusal(config_of(tmp_path, *words, swept=tuple(swept)), capsys)
    assert found.startswith(sentence.replace("+environment", "environment")) and "hush" not in found
    assert os.listdir(tmp_path) == []


def test_only_swept_keys_name_the_directories_of_jobs(tmp_path):
    config = config_of(tmp_path, "trainer.total_steps=3", "trainer.run_dir='x${sweep_suffix:}'")
    SweepCallback().on_multirun_start(config)
    assert config.hydra.overrides.hydra == [
        "hydra.job.config.override_dirname.exclude_keys=[trainer.total_steps,trainer.run_dir]",
        "hydra.output_subdir=null",
    ]
    assert os.stat(tmp_path / "multirun.yaml").st_mode & 0o777 == 0o600, "Hydra writes the whole config there"


def study(directory: Path, *states: str) -> optuna.Study:
    """The study of a sweep whose trials have these states."""
    found = optuna.create_study(study_name="sweep", storage=f"sqlite:///{directory}/optuna.db", direction="maximize")
    for state in states:
        trial = found.ask()
        if state != "RUNNING":
            found.tell(trial, 1.0 if state == "COMPLETE" else None, state=optuna.trial.TrialState[state])
    return found


def optuna_config(directory: Path, *words: str, n_trials: int = 3) -> Any:
    config = config_of(directory, *OPTUNA[:1], *words)
    with open_dict(config):
        config.hydra.sweeper.study_name, config.hydra.sweeper.n_trials = "sweep", n_trials
        config.hydra.sweeper.storage = f"sqlite:///{directory}/optuna.db"
    return config


def test_a_study_continues_with_the_trials_that_are_left_and_repeats_the_killed_one(tmp_path):
    found = study(tmp_path, "COMPLETE", "FAIL", "RUNNING")
    config = optuna_config(tmp_path, "trainer.resume_mode=latest", n_trials=5)
    SweepCallback().on_multirun_start(config)
    assert config.hydra.sweeper.n_trials == 3
    assert [trial.state.name for trial in found.trials] == ["COMPLETE", "FAIL", "WAITING"]


def test_a_study_is_not_continued_by_accident(tmp_path, capsys):
    study(tmp_path, "COMPLETE")
    sentence = f"error: hydra.sweep.dir={tmp_path}: already contains a sweep; continue it with trainer.resume_mode="
    assert refusal(optuna_config(tmp_path), capsys).startswith(sentence)


def test_a_study_whose_trials_have_all_failed_is_refused(tmp_path, capsys):
    study(tmp_path, "FAIL", "FAIL", "FAIL")
    found = refusal(optuna_config(tmp_path, "trainer.resume_mode=latest"), capsys)
    assert found.startswith(f"error: hydra.sweep.dir={tmp_path}: all 3 trials have failed; choose another")


def test_jobs_are_compared_at_the_end_and_a_single_one_is_not(tmp_path, capsys, monkeypatch):
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    for number, accuracy in enumerate((0.25, 0.75)):
        (tmp_path / f"job{number}").mkdir()
        rows = [{"step": step, "val/accuracy": accuracy} for step in (1, 2)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"job{number}/metrics.jsonl").write_text(text)
        SweepCallback().on_multirun_end(config)
        assert (tmp_path / "sweep.png").exists() == (number == 1)
    assert "job0" in capsys.readouterr().out
