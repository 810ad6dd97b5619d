"""Keys of `data.*`: files or a generator, and what each needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpu.unit.config.contradictions import (  # noqa: F401
    test_contradictions_are_refused_in_one_sentence,
    test_what_is_at_a_bound_is_accepted,
)
from tests.support.config import config_of
from trainer.config import compose
from trainer.config.data import GENERATORS
from trainer.config.fields import resume_rules
from trainer.data.generators import generate
from trainer.errors import UserError
from trainer.files.redaction import redact_text

MIX = ["data.mix.math.files=[a.jsonl]", "trainer.val_interval=-1"]
SET = ["data.val_sets.math.files=[a.jsonl]"]
CONTRADICTIONS = [
    (["data=reverse_text", "data.train_files=[a.jsonl]"], "data.synthetic.*data=files"),
    (["data=reverse_text", "data.val_files=[a.jsonl]"], "data.synthetic.*data=files"),
    (["data=files"], r"data.train_files=\[\]: name at least one file"),
    (["data=files", "data.train_files=[a.jsonl]"], "trainer.val_interval=10: needs data.val_files"),
    (["data.train_size=-1"], "data.train_size=-1: a generator needs a number of examples"),
    (["+data.synthetic_args.letters=3"], "data.synthetic_args.*min_letters"),
    (["data=reasoning_gym"], "data.synthetic_args.task: data.synthetic=reasoning_gym needs the name of a task"),
    (["+data.synthetic_args.min_letters=x"], "data.synthetic_args.*min_letters must be a whole number"),
    (["data.curriculum=hardest"], "data.curriculum=hardest: must be an import path"),
    (
        [*MIX, "data.train_files=[a.jsonl]"],
        r"data.train_files=\['a.jsonl'\]: data.mix names the training data; drop the",
    ),
    ([*MIX, "data=reverse_text"], "data.synthetic=reverse_text: data.mix names the training data; choose data=files"),
    ([*MIX, "data.curriculum=a:b"], "data.curriculum=a:b: data.mix names .* or set data.mix.NAME.curriculum"),
    ([*MIX, "data.train_size=5"], "data.train_size=5: data.mix names .* or set data.mix.NAME.size"),
    (
        ["data.mix.math.weight=1", "trainer.val_interval=-1"],
        r"data.mix.math.files=\[\]: name at least one file, or a generator",
    ),
    ([*MIX, "data.mix.math.synthetic=arithmetic"], "data.mix.math.synthetic=arithmetic: files cannot be combined"),
    ([MIX[1], "data.mix.math.synthetic=arithmetic"], "data.mix.math.size=-1: a generator needs a number of examples"),
    ([*MIX, "data.mix.math.weight=0"], "data.mix.math.weight=0.0: must be above 0"),
    ([*MIX, "data.mix.math.weight=much"], "data.mix.math.weight: .*must be float"),
    ([*MIX, "data.mix.math.wieght=2"], "data.mix.math.wieght: no such key; did you mean data.mix.math.weight?"),
    (
        [*MIX, "data.mix.math.environment.max_turn=2"],
        "data.mix.math.environment.max_turn: no such key; did you mean data.mix.math.environment.max_turns",
    ),
    ([*MIX, "data.mix.math.environment.name=x"], "data.mix.math.environment.name=x: must be an import path"),
    ([*MIX, "data.mix.math.reward.name=[math,math]"], "data.mix.math.reward.name=.*: names a reward twice"),
    ([*MIX, "data.mix.math.reward.timeout_s=-1"], "data.mix.math.reward.timeout_s=-1.0: must be at least 0.001"),
    ([*MIX, "data.mix.math=3"], "data.mix.math=3: is a section; its keys are "),
    ([*MIX, "trainer.val_interval=10"], "trainer.val_interval=10: needs data.val_files"),
    (
        [*SET, "data.val_sets.math.n=4", "data.val_sets.math.temperature=0"],
        "data.val_sets.math.n=4: greedy completions",
    ),
    ([*SET, "data.val_sets.math.n=0"], "data.val_sets.math.n=0: must be at least 1"),
    ([*SET, "data.val_sets.math.max_response_tokens=99"], "tokens=99: engines complete at most rollout.max_response_t"),
    ([*SET, "data.val_sets.math.weight=2"], "data.val_sets.math.weight: no such key; "),
    (["data.val_sets.reward.files=[a.jsonl]"], "^data.val_sets.reward: a set cannot have this name"),
    (["data.val_sets.a/b.files=[a.jsonl]"], "data.val_sets"),
    (["data.val_sets.math.n=2"], r"data.val_sets.math.files=\[\]: name at least one file, or a generator"),
]
AT_THE_BOUND = [
    ["data=files", "data.train_files=[a.jsonl]", "trainer.val_interval=-1"],
    ["data=reasoning_gym", "data.synthetic_args.task=chain_sum", "+data.synthetic_args.operators=[+,-]"],
]


def test_a_source_has_the_runs_values_where_it_sets_none():
    mix = config_of(
        [
            "data.mix.math.files=[a.jsonl]",
            "data.mix.math.prompt_key=question",
            "data.mix.games.synthetic=arithmetic",
            "data.mix.games.size=5",
            "data.mix.games.weight=2",
            "data.mix.games.environment.name=games:Game",
            "data.mix.games.environment.kwargs.size=3",
            "environment.name=tools:Tools",
            "environment.max_turns=4",
            "+environment.kwargs.tool=python",
            "reward.name=gsm8k",
            "data.answer_key=final",
            "trainer.val_interval=-1",
        ]
    ).data.mix
    assert {name: source.weight for name, source in mix.items()} == {"math": 1.0, "games": 2.0}
    assert (mix["math"].prompt_key, mix["math"].answer_key, mix["games"].prompt_key) == ("question", "final", "prompt")
    assert (mix["math"].environment.name, mix["math"].environment.kwargs) == ("tools:Tools", {"tool": "python"})
    assert (mix["games"].environment.name, mix["games"].environment.kwargs) == ("games:Game", {"size": 3})
    assert (mix["games"].environment.max_turns, mix["games"].reward.name) == (4, "gsm8k")


def test_a_validation_set_is_drawn_as_the_run_unless_it_says_otherwise():
    words = ["rollout.temperature=0.6", "data.val_sets.b.files=[b.jsonl]", "data.val_sets.b.n=4"]
    config = config_of([*SET, *words, "trainer.val_interval=5", "data.val_sets.b.interval=7"])
    a, b = (config.data.val_sets[name] for name in ("math", "b"))
    assert [one.temperature_in(config) for one in (a, b)] == [0.0, 0.6]
    assert [one.interval_in(config) for one in (a, b)] == [5, 7]
    config.rollout.temperature = 0.0
    assert b.temperature_in(config) == 1.0, "sampled completions of a greedy run would all be equal"
    rules = resume_rules(config)
    assert {rules[key].change for key in rules if key.startswith("data.val_sets")} == {"validation"}


def test_a_validation_set_may_have_an_environment_beside_penalties_of_long_completions():
    words = ["data.val_sets.math.environment.name=a:B", "algorithm.overlong_buffer=2", "rollout.max_response_tokens=8"]
    assert config_of([*SET, *words]).data.val_sets["math"].environment.name == "a:B"


def test_validation_sets_alone_are_validation():
    files = ["data=files", "data.train_files=[a.jsonl]", *SET]
    assert config_of(files).validates(10) and not config_of([*files, "trainer.val_interval=-1"]).validates(10)
    config = config_of([*files, "trainer.val_interval=-1", "data.val_sets.math.interval=4"])
    assert config.validates(4) and config.validates_start and not config.validates(5)
    words = ["trainer.task=sft", "trainer.val_interval=-1", "data.val_sets.math.interval=4"]
    assert not config_of([*files, *words]).validates(4)


def test_a_source_may_do_without_the_environment_of_the_run():
    words = ["environment.name=tools:Tools", "data.mix.math.environment.name=null"]
    config = config_of([*MIX, *words])
    assert config.data.mix["math"].environment.name is None and config.environment.name == "tools:Tools"
    assert config.of_source("mix.math").on_failure == config.reward.on_failure


def test_a_mix_in_a_file_is_changed_by_the_command_line(tmp_path):
    (tmp_path / "mix.yaml").write_text(
        "data:\n  mix:\n    math: {files: [a.jsonl], reward: {name: gsm8k}}\n    code: {files: [b.jsonl]}\n"
        "trainer: {val_interval: -1}\n"
    )
    config = compose(["data.mix.code.weight=3", "data.mix.code.reward.name=code:score"], str(tmp_path / "mix.yaml"))
    assert config.data.synthetic is None, "the mix implies data=files"
    assert {name: source.weight for name, source in config.data.mix.items()} == {"math": 1.0, "code": 3.0}
    assert [source.reward.name for source in config.data.mix.values()] == ["gsm8k", "code:score"]


def test_a_wrong_key_of_a_mix_in_a_file_is_named_with_its_line(tmp_path):
    (tmp_path / "mix.yaml").write_text("data:\n  mix:\n    math:\n      file: [a.jsonl]\n")
    with pytest.raises(
        UserError, match=r"mix.yaml:4: data.mix.math.file: no such key; did you mean data.mix.math.files"
    ):
        compose([], str(tmp_path / "mix.yaml"))


def test_the_token_of_a_sources_judge_is_a_secret(monkeypatch):
    monkeypatch.setenv("JUDGE_OF_MATH", "Bearer 9x7-of-math")
    config_of([*MIX, "data.mix.math.reward.authorization_env=JUDGE_OF_MATH"])
    assert "9x7" not in redact_text("it said: Bearer 9x7-of-math")


def test_the_mix_of_the_docs_is_accepted(tmp_path):
    text = (Path(__file__).parents[4] / "docs/data.md").read_text()
    (tmp_path / "mix.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    mix = compose(["data.mix.math.weight=3"], str(tmp_path / "mix.yaml")).data.mix
    assert {name: source.weight for name, source in mix.items()} == {"math": 3.0, "code": 1.0, "words": 1.0}
    assert (mix["code"].environment.max_turns, mix["code"].prompt_key) == (6, "task")


def test_messages_about_the_data_of_a_source_name_its_keys():
    data = config_of([*MIX, "data.mix.math.prompt_key=question"]).of_source("mix.math").data
    assert (data.train_files, data.name_of("train_files")) == (["a.jsonl"], "data.mix.math.files")
    assert data.name_of("prompt_key") == "data.mix.math.prompt_key"


@pytest.mark.parametrize("name", [name for name, options in GENERATORS.items() if options is not None])
def test_generators_take_the_options_that_the_schema_names(name):
    """The schema lists them itself, because it does not import numpy."""
    (example,) = generate(name, dict.fromkeys(GENERATORS[name], 5), 1, "train")
    assert set(example) >= {"prompt", "answer"}
    with pytest.raises(TypeError):
        generate(name, {"letters": 5}, 1, "train")
