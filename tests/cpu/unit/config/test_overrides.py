"""Words of a command line: flags anywhere, and one sentence about each override that is wrong."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.config import KEYS, config_of, explained
from trainer.config import Config, TrainerConfig, compose
from trainer.config.command_line import parsed, refuse_unread, unread_words
from trainer.errors import UserError

WRONG = {
    "trainer.sed=1": "trainer.sed: no such key; did you mean trainer.seed?",
    "total_steps=10": "total_steps: no such key; did you mean trainer.total_steps?",
    "++new=1": "new: no such key; valid are trainer, ",
    "+trainer.policy.lora.extra={x: 1}": "trainer.policy.lora.extra: no such key; valid are ",
    "trainer.seed": "trainer.seed: cannot be read (missing EQUAL at '<EOF>'); write KEY=VALUE or GROUP=CHOICE",
    "": ": cannot be read (",
    "trainer.run_name=a=b": "trainer.run_name=a=b: cannot be read (",
    "reward.name=[a": "reward.name=[a: cannot be read (",
    "trainer.run_name=a\x1b[31m]": "trainer.run_name=a\\x1b[31m]: cannot be read (",
    "trainer.seed=": "trainer.seed: Value '' of type 'str' could not be converted to Integer; it must be int",
    "~trainer.seed": "trainer.seed: TrainerConfig (DictConfig) does not support deletion",
    "trainer.seed=1,2": "several values run one job each; add -m for that, or write trainer.seed=[…] for a list",
    "trainer.seed=two": "trainer.seed: Value 'two' of type 'str' could not be converted to Integer; it must be int",
    "trainer.seed=null": "trainer.seed: ",
    "trainer.deadline=[1]": "trainer.deadline: Cannot convert 'list' to string: '['1']'; it must be str | null",
    "data.train_files=a.jsonl": "it must be list[str]",
    "rollout.n=0": "rollout.n=0: must be at least 1",
    "trainer.policy=x": "trainer.policy: is a section, and takes no value; its keys are trainer.policy.optimizer, ",
    "trainer=3": ", … (docs/config.md lists all)",
    "algorithm=grop": "algorithm=grop: no such choice; did you mean grpo?",
    "experiment=[smoke,nothing]": "experiment=nothing: no such choice; choose one of dpo_qwen3",
    "model=some/model": "model=some/model: no such choice; write model.path=some/model",
    "data=my/a.jsonl": "no such choice; write data=files data.train_files=[my/a.jsonl]",
    "hydra.nothing=1": "hydra.nothing: Key 'nothing' not in 'HydraConf'",
    "trainer.seed=${nothing}": "trainer.seed: Interpolation key 'nothing' not found",
    "trainer.run_name=${oc.env:NOTHING}": "trainer.run_name: \"Environment variable 'NOTHING' not found\"",
    "trainer.seed=${trainer.run_name}": "trainer.seed: ",
    "trainer.seed=???": "trainer.seed: ",
}


def test_a_wrong_override_gets_one_sentence():
    for word, sentence in WRONG.items():
        said = explained(word)
        assert said is not None and sentence in said and "\n" not in said, (word, said)
    headline, *sentences = explained("trainer.sed=1", "rolout.n=2", "trainer.seed={").split("\n  ")
    assert headline == "the command cannot be read:"
    assert [sentence.partition(":")[0] for sentence in sentences] == ["trainer.sed", "rolout.n", "trainer.seed={"]


def test_flags_may_stand_anywhere():
    flags = parsed(["a=1", "-m", "--config", "x.yaml", "b=2", "--cfg=job", "-p", "trainer", "~c"])
    assert (flags.overrides, flags.multirun, flags.config) == (["a=1", "b=2", "~c"], True, "x.yaml")
    assert (flags.cfg, flags.package, flags.config_dir) == ("job", "trainer", None)
    for words, sentence in {
        ("--nothing",): "--nothing: no such flag; `trainer train --help` lists them",
        ("--multrun",): "--multrun: no such flag; did you mean --multirun?",
        ("--trainer.seed=5",): "--trainer.seed=5: no such flag; write trainer.seed=5",
        ("a=1", "--config"): "argument --config: expected one argument; `trainer train --help` shows the arguments",
    }.items():
        with pytest.raises(UserError) as refused:
            parsed(words)
        assert str(refused.value) == sentence


def test_the_directory_of_a_run_is_no_override(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("{}")
    said = "run: is a directory, not KEY=VALUE; for its config write --config=run/config.yaml"
    assert explained("run") == said


def test_pluses_before_keys_and_groups_of_the_schema_change_nothing():
    words = ["+trainer.seed=7", "++trainer.total_steps=3", "+algorithm=ppo", "++rollout=transformers"]
    assert compose(words) == compose([word.lstrip("+") for word in words])


def test_the_last_of_several_values_and_choices_wins():
    words = ["trainer.seed=1", "algorithm=ppo", "trainer.seed=2", "algorithm=dapo"]
    assert compose(words) == compose(["trainer.seed=2", "algorithm=dapo"])


WORDS = "trainer.seed algorithm experiment reward.weights model.path data ppo smoke null ??? range( choice( ${ = 1 a"
PIECES = [*WORDS.split(), *"{}[],'\":$()+~/. \\@é\n\x1b-#="]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), st.booleans())
def test_any_word_is_taken_or_gets_sentences_of_ours(word, with_key):
    explained(f"trainer.run_name={word}" if with_key else word)


@pytest.mark.parametrize(
    ("task", "words", "unread"),
    [
        ("sft", ["sft.steps=3", "data=files", "hydra.verbose=true", "trainer.seed=2"], []),
        (
            "sft",
            ["rollout.n=4", "algorithm=ppo", "++algorithm.clip_low=1"],
            ["rollout.n", "algorithm=ppo", "algorithm.clip_low"],
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
            [ENVIRONMENT, "reward={name: math, weights: [2]}", "reward.timeout_s=3"],
            "reward: environment.name=my:World gives the rewards, so reward is not read; ",
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
        (["experiment=look_up", "reward.name=math"], "reward.name: environment.name=trainer.environments.questions:Lo"),
        ([ENVIRONMENT, "environment.name=null", "reward.name=math"], ""),
        ([*MIX, OF_SOURCE, "data.mix.b.reward.name=math"], ""),
        ([*MIX, OF_SOURCE, "reward.name=math"], ""),
        ([*MIX, ENVIRONMENT, "data.mix.a.environment.name=null", "reward.name=math"], ""),
        ([ENVIRONMENT, "reward.on_failure=zero", "trainer.task=tests.support.reward_model:TASK"], ""),
    ],
)
def test_a_reward_that_an_environment_replaces_is_refused(words, sentence):
    if not sentence:
        refuse_unread(words, config_of(words))
        return
    with pytest.raises(UserError) as refused:
        refuse_unread(words, config_of(words))
    assert str(refused.value).startswith(sentence), str(refused.value)


def test_supervised_stages_of_examples_get_the_words_that_they_read():
    words = [f"{name}=1" for name in (*KEYS, "algorithm", "rollout", "data", "model", "experiment")]
    script = 'source examples/supervised_words.bash "$@"; printf "%s\\n" "${supervised_words[@]}"'
    command = ["bash", "-euc", script, "bash", *words]
    done = subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=True)
    supervised = Config(trainer=TrainerConfig(task="sft"))
    assert done.stdout.split() == [word for word in words if not unread_words([word], supervised)]
