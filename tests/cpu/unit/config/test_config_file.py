"""`--config FILE`: an experiment of the user's own, and group files beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.forks import run_forked
from tests.support.jobs import environment
from trainer.config import compose
from trainer.errors import UserError

FILE = """\
# An experiment.
defaults:
  - algorithm: mine
  - data: arithmetic
trainer:
  run_name: own
  total_steps: 33
rollout: {n: 3}
reward:
  name: mine:score
"""
GROUP = "clip_high: 0.33\nkl_coef: 0.002\n"


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm/mine.yaml").write_text(GROUP)
    (tmp_path / "own.yaml").write_text(FILE)
    return tmp_path / "own.yaml"


def command(*words: object, cwd: Path, job: str = "train") -> subprocess.CompletedProcess[str]:
    return run_forked("trainer", [job, *map(str, words)], cwd, environment(), timeout=300)


def test_the_file_has_the_meaning_of_its_overrides(file):
    words = ["~algorithm", "algorithm.clip_high=0.33", "algorithm.kl_coef=0.002", "data=arithmetic", "rollout.n=3"]
    own = ["trainer.run_name=own", "trainer.total_steps=33", "reward.name=mine:score"]
    assert compose([], config_file=str(file)) == compose([*words, *own])


def test_the_command_line_wins(file):
    config = compose(["rollout.n=5", "algorithm=dapo", "data.train_size=20"], config_file=str(file))
    assert (config.rollout.n, config.algorithm.clip_high, config.data.train_size) == (5, 0.28, 20)
    assert config.trainer.total_steps == 33 and config.data.synthetic == "arithmetic"
    smoke = compose(["experiment=smoke"], config_file=str(file))
    assert smoke.trainer.total_steps == 2 and smoke.reward.name == "mine:score"


@pytest.mark.parametrize("base", ["- gsm8k_qwen3_0.6b_1gpu", "- experiment: [gsm8k_qwen3_0.6b_1gpu]"])
def test_the_file_builds_on_an_experiment_and_wins_over_it(base, file):
    file.write_text(f"defaults:\n  {base}\n  - override /algorithm: mine\n  - _self_\nrollout: {{n: 3}}\n")
    config = compose([], config_file=str(file))
    assert (config.rollout.n, config.algorithm.clip_high, config.trainer.device) == (3, 0.33, "cuda")
    assert config.data.prompt_key == "question"


def test_files_of_data_choose_the_group_of_files(file):
    file.write_text("data: {train_files: [a.jsonl], val_files: [b.jsonl]}\n")
    assert compose([], config_file=str(file)) == compose(["data.train_files=[a.jsonl]", "data.val_files=[b.jsonl]"])
    file.write_text("defaults: [{data: gsm8k}]\n")
    config = compose(["data.train_files=[a.jsonl]", "data.val_files=[b.jsonl]"], config_file=str(file))
    assert (config.data.prompt_key, config.data.train_files) == ("question", ["a.jsonl"])


def test_an_experiment_beside_the_file_may_choose_the_data(file):
    (file.parent / "experiment").mkdir()
    mine = "# @package _global_\ndefaults:\n  - override /data: gsm8k\n"
    (file.parent / "experiment/mine.yaml").write_text(mine)
    file.write_text("trainer: {seed: 1}\n")
    files = ["data.train_files=[a.jsonl]", "data.val_files=[b.jsonl]"]
    assert compose(["experiment=mine", *files], config_file=str(file)).data.prompt_key == "question"


def test_a_group_file_may_hold_whole_keys_and_build_on_another_choice(file):
    group = file.parent / "algorithm/mine.yaml"
    group.write_text("# @package _global_\ndefaults: [dapo]\nalgorithm: {kl_coef: 0.5}\nrollout: {n: 7}\n")
    file.write_text("defaults: [{algorithm: mine}]\n")
    config = compose([], config_file=str(file))
    assert (config.algorithm.kl_coef, config.algorithm.clip_high, config.rollout.n) == (0.5, 0.28, 7)


def test_values_are_read_as_in_the_files_of_the_project(file):
    file.write_text("trainer: {policy: {optimizer: {lr: 1e-5}}, run_name: '${oc.env:OWN_NAME,x}'}\n")
    config = compose([], config_file=str(file))
    assert config.trainer.policy.optimizer.lr == 1e-5 and config.trainer.run_dir == "outputs/x"


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("trainer:\n  seed: 1\n  totl_steps: 3\n", "own.yaml:3: trainer.totl_steps: no such key; did you mean "),
        ("\n\nalgoritm: {}\n", "own.yaml:3: algoritm: no such key; did you mean algorithm?"),
        ("trainer:\nrollout: {n: 3}\n", "own.yaml:1: trainer: is a section and needs keys below it, not nothing"),
        ("trainer: 3\n", "own.yaml:1: trainer: is a section and needs keys below it, not 3"),
        ("trainer:\n  seed: 1\n  seed: 2\n", "own.yaml:3: trainer.seed: is there twice, first in line 2; keep one"),
        ("defaults:\n  - algoritm: ppo\n", "own.yaml:2: algoritm: no such group; did you mean algorithm?"),
        ("defaults:\n  - algorithm: grop\n", "own.yaml:2: algorithm=grop: no such choice; did you mean grpo?"),
        ("defaults: 3\n", "own.yaml:1: defaults must be a list of GROUP: CHOICE"),
        ("a: [1\n", "own.yaml:2: is not YAML ("),
        ("- 1\n", "own.yaml: must be a mapping of sections to keys and values"),
        ("", "own.yaml: is empty"),
        ("trainer: {seed: two}\n", "own.yaml:1: trainer.seed: must be a whole number"),
        ("trainer:\n  seed: -1\n", "own.yaml:2: trainer.seed=-1: must be at least 0"),
        ("trainer:\n  run_name: ${nothing}\n", "own.yaml:2: trainer.run_name: ${nothing} names no key"),
        ("trainer:\n  run_name: ${\n", "own.yaml:2: trainer.run_name: the ${…} in this value cannot be read"),
    ],
)  # fmt: skip
def test_a_wrong_file_gets_one_sentence_with_its_line(content, sentence, file):
    file.write_text(content)
    done = command("rollout.n=2", "--config", "own.yaml", "--cfg", "job", cwd=file.parent)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {sentence}") and done.stderr.count("\n") == 1, done.stderr


def test_all_wrong_keys_of_a_file_are_listed(file):
    file.write_text("trainer: {sed: 1}\nreward: {nme: x}\n")
    with pytest.raises(
        UserError, match=r"the config file has wrong keys:\n  .*own.yaml:1: trainer.sed.*\n  .*:2: reward"
    ):
        compose([], config_file=str(file))


@pytest.mark.parametrize(
    "text, sentence",
    [
        (
            "trainer.seed: 1\n",
            "own.yaml:1: trainer.seed: has dots, which nest nothing in YAML; write `trainer: {seed: …}`",
        ),
        (
            "trainer: {policy.optimizer.lr: 1}\n",
            "trainer.policy.optimizer.lr: has dots, which nest nothing in YAML; write `policy: {optimizer: {lr: …}}`",
        ),
        ("generator: {n_samples: 2}\n", "own.yaml:1: generator: no such key; in place of SkyRL's generator, "),
    ],
)
def test_keys_that_are_habits_from_elsewhere_are_explained(text, sentence, file):
    file.write_text(text)
    with pytest.raises(UserError) as refusal:
        compose([], config_file=str(file))
    assert sentence in str(refusal.value)


def test_a_wrong_group_file_is_named_with_its_line(file):
    group = file.parent / "algorithm/mine.yaml"
    group.write_text("kl_coef: 0.1\nclip_hihg: 0.3\n")
    for words in (
        ["--config=own.yaml"],
        ["--config-dir=.", "algorithm=mine"],
        [f"hydra.searchpath=[file://{file.parent}]", "algorithm=mine"],
    ):
        done = command(*words, "--cfg", "job", cwd=file.parent)
        assert (
            done.returncode == 2 and "algorithm/mine.yaml:2: algorithm.clip_hihg: no such key; did you" in done.stderr
        )


def test_a_value_of_the_command_line_is_not_blamed_on_the_file(file):
    done = command("--config", "own.yaml", "rollout.n=two", cwd=file.parent)
    assert done.stderr == "error: rollout.n=two: must be a whole number\n"


def test_a_choice_beside_the_file_must_not_have_a_name_of_the_project(file):
    (file.parent / "algorithm/ppo.yaml").write_text("kl_coef: 0.1\n")
    with pytest.raises(
        UserError, match="algorithm/ppo.yaml: algorithm=ppo is a choice of the project; rename the file"
    ):
        compose([], config_file=str(file))


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--config"], "--config: needs a value after it"),
        (["--config", "nothing.yaml"], "nothing.yaml: cannot be read (No such file or directory)"),
        (["--config", "own.yaml", "--config=b.yaml"], "--config=b.yaml: one file can be given; own.yaml is another"),
        (["--config", "own.yaml", "algorithm=mien"], "algorithm=mien: no such choice; did you mean mine?"),
        (["--config", "own.yaml", "hydra.searchpath=[x]"], "hydra.searchpath: does not go with --config; "),
    ],
)
def test_wrong_words_around_the_file(words, sentence, file):
    done = command(*words, cwd=file.parent)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {sentence}"), done.stderr


@pytest.mark.parametrize("job", ["train", "sft"])
def test_every_job_takes_the_file_from_any_directory(job, file, tmp_path):
    directory = tmp_path / "else where"
    directory.mkdir()
    done = command("--cfg", "job", "--config", "../own.yaml", cwd=directory, job=job)
    assert yaml.safe_load(done.stdout)["rollout"]["n"] == 3, done.stderr


def test_a_sweep_of_a_file(file):
    code = (
        "from trainer.config.command_line import run_app\n"
        "run_app(lambda cfg: print(cfg.trainer.run_dir, cfg.trainer.total_steps, cfg.algorithm.clip_high))\n"
    )
    words = ["--config", "own.yaml", "algorithm=mine,dapo", "-m"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=file.parent, capture_output=True, text=True, timeout=300,
        env=environment(), check=False,
    )  # fmt: skip
    assert "outputs/own/algorithm=mine 33 0.33\n" in done.stdout, done.stderr
    assert "outputs/own/algorithm=dapo 33 0.28\n" in done.stdout
