"""`--config FILE`: an experiment of the user's own, and group files beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.refusals import without_privilege
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


def refusal(file: Path, *words: str) -> str:
    with pytest.raises(UserError) as error:
        compose(words, config_file=str(file))
    return str(error.value)


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


WRONG = {
    "trainer:\n  seed: 1\n  totl_steps: 3\n": ":3: trainer.totl_steps: no such key; did you mean ",
    "\n\nalgoritm: {}\n": ":3: algoritm: no such key; did you mean algorithm?",
    "trainer:\nrollout: {n: 3}\n": ":1: trainer: is a section, and takes no value; its keys are ",
    "trainer: 3\n": ":1: trainer: is a section, and takes no value; its keys are ",
    "trainer:\n  seed: 1\n  seed: 2\n": ":3: is not YAML (found duplicate key seed)",
    "defaults:\n  - algoritm: ppo\n": "no such ",
    "defaults:\n  - algorithm: grop\n": ":1: algorithm=grop: no such choice; did you mean grpo?",
    "a: [1\n": ":2: is not YAML (",
    "- 1\n": ": must be a mapping of sections to keys and values",
    "": ": is empty",
    "trainer: {seed: two}\n": ":1: trainer.seed: Value 'two' of type 'str' could not be converted to Integer; ",
    "trainer:\n  seed: -1\n": ":2: trainer.seed=-1: must be at least 0",
    "trainer:\n  run_name: ${nothing}\n": ":2: trainer.run_name: Interpolation key 'nothing' not found",
    "trainer:\n  run_name: ${\n": "trainer.run_name",
    "generator: {n_samples: 2}\n": ":1: generator: no such key; in place of generator, this project has rollout",
}


def test_a_wrong_file_gets_one_sentence_with_its_line(file):
    for content, sentence in WRONG.items():
        file.write_text(content)
        said = refusal(file, "rollout.n=2")
        assert said.startswith(f"{file}{sentence}" if sentence[:1] == ":" else "") and sentence in said, said
        assert "\n" not in said


def test_a_wrong_group_file_names_the_key(file):
    (file.parent / "algorithm/mine.yaml").write_text("kl_coef: 0.1\nclip_hihg: 0.3\n")
    assert refusal(file).startswith("algorithm.clip_hihg: no such key; did you mean ")


def test_a_value_of_the_command_line_is_not_blamed_on_the_file(file):
    assert refusal(file, "rollout.n=two").startswith("rollout.n: Value 'two'")
    assert refusal(file, "algorithm=mien") == "algorithm=mien: no such choice; did you mean mine?"


def test_a_choice_beside_the_file_must_not_have_a_name_of_the_project(file):
    (file.parent / "algorithm/ppo.yaml").write_text("kl_coef: 0.1\n")
    assert refusal(file).endswith("algorithm/ppo.yaml: algorithm=ppo is a choice of the project; rename the file")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert refusal(tmp_path / "nothing.yaml").endswith("nothing.yaml: cannot be read (No such file or directory)")
    assert "no such directory" in refusal(tmp_path / "none/nothing.yaml")


def test_a_file_beside_directories_that_cannot_be_read_is_composed(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer:\n  seed: 7\n")
    (tmp_path / "closed").mkdir(mode=0)
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "algorithm").write_text("a file")
    code = "import sys; from trainer.config.hydra import compose; print(compose([], sys.argv[1]).trainer.seed)"
    command = without_privilege([sys.executable, "-c", code, str(tmp_path / "mine.yaml")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "7\n", done.stderr
