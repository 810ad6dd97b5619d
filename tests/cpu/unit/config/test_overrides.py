"""Words of a command line: flags anywhere, and one sentence of ours about each override that is wrong."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.config import KEYS, explained
from tests.support.jobs import environment
from trainer.config import Config, TrainerConfig, compose
from trainer.config.config_file import ConfigFiles
from trainer.config.hydra import prepared
from trainer.config.overrides import arranged, kind_of, refuse_unread, unread_words
from trainer.errors import UserError
from trainer.files.documents import flatten


@pytest.mark.parametrize(
    "word, sentence",
    [
        ("trainer.run_name=a=b", "trainer.run_name=a=b: a value with = needs quotes; a text in quotes is taken as it "),
        ("a=b=c", "a: no such key; valid are trainer, "),
        ("trainer.seed=", "trainer.seed=: has no value; write one after the =, or leave trainer.seed out"),
        ("algorithm=", "algorithm=: has no value; write one after the =, or leave algorithm out"),
        ("", "'': has no value; write KEY=VALUE or GROUP=CHOICE"),
        ("=1", "=1: has no key before the =; write KEY=VALUE or GROUP=CHOICE"),
        ("=", "=: has no key before the =; write KEY=VALUE or GROUP=CHOICE"),
        ("+new.key=1", "new: no such key; valid are trainer, "),
        ("++new=1", "new: no such key; valid are trainer, "),
        ("~x", "~x: keys cannot be removed; leave x out for its default"),
        ("~trainer.seed", "~trainer.seed: keys cannot be removed; leave trainer.seed out for its default"),
        ("~trainer.seed=1", "~trainer.seed=1: keys cannot be removed; "),
        ("trainer..seed=1", "trainer..seed=1: this is no name of a key; write trainer.seed=VALUE"),
        ("trainer.seed =1", "trainer.seed =1: this is no name of a key; write trainer.seed=VALUE"),
        ("trainer[seed]=1", "trainer[seed]=1: this is no name of a key; write trainer.seed=VALUE"),
        ("trainer.=1", "trainer.=1: this is no name of a key; write trainer.KEY=VALUE"),
        ("algorithm@x=ppo", "algorithm@x=ppo: names have no @; write algorithm=VALUE"),
        ("-trainer.seed=1", "-trainer.seed=1: keys have no dashes before them; write trainer.seed=1"),
        ("-m=3", "-m=3: takes no value; write -m"),
        ("--nothing", "--nothing: no such flag; `trainer train --help` lists them"),
        ("--config-path=x", "--config-path=x: the project's own config is always read; name a YAML file of yours"),
        ("-cn=x", "-cn=x: the project's own config is always read; name a YAML file of yours with --config FILE, or "),
        ("--multrun", "--multrun: no such flag; did you mean --multirun?"),
        # groups
        ("algorithm=[grpo,ppo]", "algorithm takes one choice; write algorithm=grpo, or run one job for each with "),
        ("algorithm=grpo,ppo", "several choices run one job each; add --multirun, or choose one"),
        ("experiment=smoke,smoke", "add --multirun, or choose one, or experiment=[smoke,smoke] for all of them in one"),
        # values
        ("trainer.seed=1,2", "trainer.seed=1,2: several values run one job each; add --multirun, or give one value"),
        ("trainer.run_name=a,b", "or write 'trainer.run_name=\"a,b\"' for a text"),
        ("data.train_files=a,b", "write data.train_files=[a,b] for a list; to run one job for each value, add "),
        ("trainer.seed=range(1,3)", "several values run one job each; add --multirun, or give one value"),
        ("trainer.seed={", "trainer.seed={: the { is not closed; trainer.seed must be a whole number"),
        ("trainer.seed=1]", "trainer.seed=1]: the ] has no [ before it; trainer.seed must be a whole number"),
        ("reward.name=[a", "reward.name=[a: the [ is not closed; "),
        ("trainer.divergence_limits={a:1}}", "the } has no { before it; "),
        ("trainer.divergence_limits={a}", "a mapping is written {NAME: VALUE}; "),
        ("data.train_files=[a,]", "a comma has no value beside it; data.train_files must be a list [VALUE, VALUE]"),
        ("trainer.run_name='x", "trainer.run_name='x: the quote ' is not closed; "),
        ('trainer.run_name="x', 'the quote " is not closed; '),
        ("trainer.run_name=a(b)", "brackets ( ) are a function of the command line, and there is none that takes "),
        ("trainer.run_name=é", "a text in quotes is taken as it is: 'trainer.run_name=\"é\"'"),
        ("trainer.run_name=a\x1b[31m]", "trainer.run_name=a\\x1b[31m]: a value with \\x1b needs quotes; "),
        ("trainer.seed=${", "the { is not closed; "),
    ],
)  # fmt: skip
def test_a_wrong_override_gets_one_sentence_of_ours(word, sentence):
    assert sentence in (explained(word) or "it is taken")


def test_the_directory_of_a_run_is_no_override(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    assert explained("run") == "run: has no value; write KEY=VALUE or GROUP=CHOICE"
    (tmp_path / "run/config.yaml").write_text("{}")
    said = "run: is a directory, not KEY=VALUE or GROUP=CHOICE; for its config write --config=run/config.yaml"
    assert explained("run") == said


def test_the_quotes_that_a_sentence_advises_are_taken():
    for value in ("a=b", "a(b)", "é", "a,b", "a b#c"):
        sentence = explained(f"trainer.run_name={value}")
        advised = sentence.partition("'trainer.run_name=")[2].rpartition("'")[0]
        assert compose([f"trainer.run_name={advised}"]).trainer.run_name == value


def test_all_that_cannot_be_read_is_listed():
    headline, *sentences = explained("trainer.seed={", "algorithm=[grpo,ppo]", "~x").split("\n  ")
    assert headline == "the command cannot be read:" and len(sentences) == 3


def test_pluses_before_keys_and_groups_of_the_schema_change_nothing():
    for words in (["+trainer.seed=7", "+algorithm=ppo"], ["++trainer.seed=7", "++algorithm=ppo"]):
        assert compose(words) == compose(["trainer.seed=7", "algorithm=ppo"])


def test_the_last_of_several_values_and_choices_wins():
    words = ["trainer.seed=1", "algorithm=ppo", "trainer.seed=2", "algorithm=dapo"]
    assert compose(words) == compose(["trainer.seed=2", "algorithm=dapo"])


WORDS = "trainer.seed algorithm experiment reward.weights model.path data ppo smoke null ??? range( choice( ${ = 1 a"
PIECES = [*WORDS.split(), *"{}[],'\":$()+~/. \\@é\n\x1b-#="]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), st.booleans())
def test_any_word_is_taken_or_gets_sentences_of_ours(word, with_key):
    explained(f"trainer.run_name={word}" if with_key else word)


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_multirun_works_anywhere(flag, position, tmp_path):
    code = (
        "from trainer.config.command_line import run_app\n"
        "run_app(lambda cfg: print('seed', cfg.trainer.seed, 'n', cfg.rollout.n))\n"
    )
    words = ["trainer.seed=1,2", "rollout.n=4"]
    words.insert(position, flag)
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "seed 1 n 4\n" in done.stdout and "seed 2 n 4\n" in done.stdout


def test_flags_come_first_in_their_long_form():
    assert arranged(["a=1", "-m", "-cd", "x", "b=2", "--cfg", "hydra"]) == [
        "--multirun", "--config-dir=x", "--cfg=hydra", "a=1", "b=2",
    ]  # fmt: skip
    assert arranged(["--info", "a=1"]) == ["--info=all", "a=1"]
    assert arranged(["a=1", "--info", "defaults"]) == ["--info=defaults", "a=1"]
    with pytest.raises(UserError, match="--config-dir: needs a value after it"):
        arranged(["a=1", "--config-dir"])


def test_several_values_are_taken_with_multirun():
    words = ["trainer.seed=1,2", "algorithm=grpo,ppo", "rollout.n=range(2,4)"]
    assert prepared([*words, "-m"], ConfigFiles()) == ["--multirun", *words]


@pytest.mark.parametrize(
    "key, kind",
    [
        ("trainer.seed", "a whole number"),
        ("trainer.deadline", "a text, or null"),
        ("trainer.ckpt_interval", "a whole number, or a text"),
        ("reward.weights", "a list [VALUE, VALUE]"),
        ("reward.weights[0]", "a number"),
        ("trainer.divergence_limits", "a mapping {NAME: VALUE}"),
        ("trainer.policy.optimizer.lr", "a number"),
        ("trainer", ""),
        ("nothing.x", ""),
    ],
)
def test_the_kind_of_a_value_in_words(key, kind):
    assert kind_of(key) == kind


@pytest.mark.parametrize(
    ("task", "words", "unread"),
    [
        ("sft", ["sft.steps=3", "data=files", "hydra.verbose=true", "trainer.seed=2"], []),
        (
            "sft",
            ["rollout.n=4", "algorithm=ppo", "++algorithm.gamma=1"],
            ["rollout.n", "algorithm=ppo", "algorithm.gamma"],
        ),
        ("sft", ["trainer.total_steps=9", "trainer.critic={path:x}"], ["trainer.total_steps", "trainer.critic"]),
        (
            "sft",
            ["data.curriculum=my:order", "+data.mix.a.curriculum=my:order"],
            ["data.curriculum", "data.mix.a.curriculum"],
        ),
        ("rl", ["rollout.n=4", "algorithm=ppo", "sft.steps=3"], []),
        ("rl", ["inference.port=8001"], ["inference.port"]),
        ("tests.support.preferences:TASK", ["rollout=vllm", "trainer.total_steps=9"], ["rollout=vllm"]),
    ],
)
def test_overrides_that_the_task_does_not_read_are_named(task, words, unread):
    assert unread_words(words, Config(trainer=TrainerConfig(task=task))) == unread


ENVIRONMENT = "environment.name=my:World"
MIX = ["data.mix={a: {synthetic: arithmetic, size: 4}, b: {synthetic: arithmetic, size: 4}}", "trainer.val_interval=-1"]
OF_SOURCE = "data.mix.a.environment.name=my:World"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            [ENVIRONMENT, "reward.name=math"],
            "reward.name: environment.name=my:World gives the rewards, so reward.name is not read; leave it out, or "
            "set environment.name=null",
        ),
        (
            [ENVIRONMENT, "reward={name: math, weights: [2]}", "reward.remote.deadline_s=3"],
            "reward.name: environment.name=my:World gives the rewards, so reward.name and reward.weights and "
            "reward.remote.deadline_s are not read; leave them out, or set environment.name=null",
        ),
        (
            [*MIX, OF_SOURCE, "data.mix.a.reward.name=math"],
            "data.mix.a.reward.name: data.mix.a.environment.name=my:World gives the rewards, so data.mix.a.reward.name "
            "is not read; leave it out, or set data.mix.a.environment.name=null",
        ),
        ([*MIX, ENVIRONMENT, "reward.timeout_s=3"], "reward.timeout_s: environment.name=my:World gives the rewards, "),
        ([ENVIRONMENT, "reward.success_threshold=0.5"], ""),
        ([ENVIRONMENT, "data=gsm8k"], ""),
        (["experiment=look_up", "reward.success_threshold=0.5"], ""),
        (["experiment=look_up", "reward.name=math"], "reward.name: environment.name=trainer.environments.look_up:Lo"),
        ([ENVIRONMENT, "environment.name=null", "reward.name=math"], ""),
        ([*MIX, OF_SOURCE, "data.mix.b.reward.name=math"], ""),
        ([*MIX, OF_SOURCE, "reward.name=math"], ""),
        ([*MIX, ENVIRONMENT, "data.mix.a.environment.name=null", "reward.name=math"], ""),
        ([ENVIRONMENT, "reward.on_failure=zero", "trainer.task=tests.support.reward_model:TASK"], ""),
    ],
)
def test_a_reward_that_an_environment_replaces_is_refused(words, sentence):
    if not sentence:
        refuse_unread(words, compose(words))
        return
    with pytest.raises(UserError) as refused:
        refuse_unread(words, compose(words))
    assert str(refused.value).startswith(sentence)


def test_a_file_that_names_an_environment_and_a_reward_is_refused():
    """In different files, each may serve other runs as well."""
    cfg = compose([ENVIRONMENT])
    lines = {"environment.name": "a.yaml:3", "reward": "a.yaml:4", "reward.name": "a.yaml:5"}
    with pytest.raises(UserError, match="^reward.name: environment.name=my:World gives the rewards"):
        refuse_unread([], cfg, lines)
    refuse_unread([], compose([]), lines)
    refuse_unread([], compose(["trainer.task=sft", ENVIRONMENT]), lines)
    refuse_unread([], cfg, lines | {"environment.name": "b.yaml:3"})


def test_the_recorded_config_of_a_run_with_an_environment_is_accepted():
    cfg = compose([ENVIRONMENT])
    recorded = flatten(dataclasses.asdict(cfg))
    assert {"environment.name", "reward.name"} <= recorded.keys()
    refuse_unread([], cfg, {key: f"config.yaml:{number}" for number, key in enumerate(recorded)})


def test_a_run_that_an_earlier_version_has_started_continues_with_the_same_words(caplog):
    words = [ENVIRONMENT, "reward.name=math"]
    refuse_unread(words, compose(words), continues=True)
    assert "so reward.name is not read" in caplog.text


def test_supervised_stages_of_examples_get_the_words_that_they_read():
    words = [f"{name}=1" for name in (*KEYS, "algorithm", "rollout", "data", "model", "experiment")]
    script = 'source examples/supervised_words.bash "$@"; printf "%s\\n" "${supervised_words[@]}"'
    command = ["bash", "-euc", script, "bash", *words]
    done = subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=True)
    supervised = Config(trainer=TrainerConfig(task="sft"))
    assert done.stdout.split() == [word for word in words if not unread_words([word], supervised)]
