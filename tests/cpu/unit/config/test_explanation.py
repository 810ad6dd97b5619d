"""One sentence of ours for what Hydra and OmegaConf say of keys, choices, values and interpolations."""

from __future__ import annotations

import pytest

from tests.support.config import explained
from trainer.config import conf_dir
from trainer.config.config_file import ConfigFiles
from trainer.config.explanation import explain
from trainer.errors import UserError


@pytest.mark.parametrize(
    "word, sentence",
    [
        # choices
        ("algorithm={a:1}", "algorithm.a: no such key; docs/config.md lists the keys of algorithm"),
        ("data={a:1}", "data.a: no such key; valid are data.train_files, "),
        ("algorithm=null", "algorithm=null: no such choice; choose one of cispo, "),
        ("algorithm=1", "algorithm=1: no such choice; choose one of cispo, "),
        ("algorithm=nothing", "algorithm=nothing: no such choice; choose one of cispo, "),
        ("algorithm=a/b", "algorithm=a/b: no such choice; choose one of cispo, "),
        ("experiment=[smoke,nothing]", "experiment=nothing: no such choice; choose one of gsm8k"),
        ("experiment={a:1}", "experiment={a:1}: no such choice; choose one of gsm8k"),
        ("nothing/x=1", "nothing/x: no such key; valid are trainer, "),
        ("hydra/launcher=nothing", "hydra/launcher=nothing: no such choice; choose one of basic, "),
        ("hydra.nothing=1", "hydra.nothing: Hydra has no such key; "),
        ("config_file=x", "config_file: no such key; valid are trainer, "),
        # values
        ("trainer.seed=two", "trainer.seed=two: must be a whole number"),
        ("trainer.seed=1.5", "trainer.seed=1.5: must be a whole number"),
        ("trainer.seed=null", "trainer.seed=null: must be a whole number"),
        ("trainer.seed={a:1}", "trainer.seed={a:1}: must be a whole number"),
        ("trainer.seed=[1,2]", "trainer.seed=[1,2]: must be a whole number"),
        ("trainer.policy.optimizer.lr=x", "trainer.policy.optimizer.lr=x: must be a number"),
        ("trainer.deadline=[1]", "trainer.deadline=[1]: must be a text, or null"),
        ("reward.weights=[a]", "reward.weights[0]: must be a number"),
        ("data.train_files={a:1}", "data.train_files={a:1}: must be a list [VALUE, VALUE]"),
        ("trainer=null", "trainer=null: trainer is a section; its keys are trainer.task, trainer.run_name, "),
        ("trainer=3", ", … (docs/config.md lists all)"),
        ("trainer.policy={optimizer:{lrr:1}}", "trainer.policy.optimizer.lrr: no such key; did you mean "),
        # interpolations
        ("trainer.seed=${nothing}", "trainer.seed: ${nothing} names no key; write ${SECTION.KEY}, "),
        ("trainer.run_name=${oc.env:NOTHING}", "trainer.run_name: the environment variable NOTHING is not set; "),
        ("trainer.run_name=${nosuch:1}", "trainer.run_name: there is no function nosuch for ${nosuch:…}; "),
        ("trainer.run_name=${trainer.run_name}", "trainer.run_name: refers to itself; give it a value"),
        ("trainer.seed=${trainer.run_name}", "gives a value of another kind; it must be a whole number"),
        ("trainer.seed=???", "trainer.seed: has no value; write trainer.seed=VALUE"),
    ],
)  # fmt: skip
def test_an_error_of_a_library_gets_one_sentence_of_ours(word, sentence):
    assert sentence in explained(word)


def test_a_path_in_place_of_a_choice_gets_the_key_for_it():
    assert explained("model=some/model").endswith("no such choice; write model.path=some/model")
    assert explained("data=my/a.jsonl").endswith("no such choice; write data=files data.train_files=[my/a.jsonl]")


def test_a_choice_that_is_nearly_right_is_suggested():
    assert explained("algorithm=grpoo").endswith("algorithm=grpoo: no such choice; did you mean grpo?")


def test_all_wrong_keys_of_a_command_are_listed():
    headline, *sentences = explained("trainer.sed=1", "rolout.n=2", "trainer.seed=3").split("\n  ")
    assert headline == "the command has wrong keys:"
    assert [sentence.partition(":")[0] for sentence in sentences] == ["trainer.sed", "rolout.n"]


def test_a_refusal_of_ours_is_shown_as_it_is_and_an_unknown_error_as_one_line():
    def sentence(error: Exception) -> str:
        return explain(error, [], ConfigFiles(), conf_dir())

    assert sentence(UserError("x=1: mend it")) == "x=1: mend it"
    assert sentence(RuntimeError("something\nodd")) == "the command cannot be composed (something odd)"
