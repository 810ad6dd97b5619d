"""Words for keys of texts are taken as they were typed: on the command line, in YAML files, in sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from trainer.config import compose
from trainer.config.hydra import kind_of_text, quoted, read_yaml, register, unquoted
from trainer.config.schema import KEYS, NAME, SECTIONS
from trainer.files.documents import dump_yaml

WORDS = ["12e4567", "1e5", "007", "0x10", "0o17", "0b11", "1_000", "1.10", "1.", ".5", "+1", "-1", "-0", "12:30:45",
         "on", "off", "yes", "No", "y", "true", "TRUE", "False", "nan", "NaN", "inf", "-Inf", "null", "Null", "none",
         "2026-11-29", "2026-11-29T06:00:00", "1e-3", "6.02e23", "0", "00", "1e5x", "x1e5"]  # fmt: skip


OFF = "trainer.val_interval=-1"


@pytest.mark.parametrize("word", WORDS)
def test_a_text_is_the_word_of_the_command_line_and_of_a_file(word, tmp_path):
    def parsed(given: str) -> Any:
        return OverridesParser.create().parse_override(quoted(given)).value()

    is_null = word.lower() == "null"
    assert parsed(f"trainer.run_name={word}") == word
    assert parsed(f"data.train_files=[{word},a]") == [word, "a"]
    assert parsed(f"model.path={word}") == (None if is_null else word), "it may be null"
    text = f"trainer: {{run_name: {word}}}\ndata:\n  train_files:\n    - {word}\nmodel: {{path: {word}}}\n"
    (tmp_path / "own.yaml").write_text(text)
    values = read_yaml(str(tmp_path / "own.yaml"))
    assert values["trainer"]["run_name"] == word and values["data"]["train_files"] == [word]
    assert values["model"]["path"] == (None if is_null else word)


def test_a_run_has_its_name_and_its_directories(tmp_path):
    config = compose(["trainer.run_name=12e4567"])
    assert (config.trainer.run_name, config.trainer.run_dir) == ("12e4567", "outputs/12e4567")
    assert config.trainer.ckpt_path == "outputs/12e4567/checkpoints"
    file = tmp_path / "own.yaml"
    file.write_text("trainer: {run_name: 007}\n")
    assert compose([], config_file=str(file)).trainer.export_path == "outputs/007/exports"


def test_named_sections_and_their_names_are_words(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("data: {mix: {007: {files: [1e5], weight: 1e0, prompt_key: on}, on: {files: [x], prompt_key: p}}}")
    mix = compose([OFF], config_file=str(file)).data.mix
    assert list(mix) == ["007", "on"] and mix["007"].weight == 1.0
    assert (mix["007"].files, mix["007"].prompt_key) == (["1e5"], "on")
    given = compose([OFF, "data.mix.a={files: [1e5], weight: 2, prompt_key: 1.10}", "data.mix.b.files=[1.0]"]).data.mix
    assert (given["a"].files, given["a"].prompt_key, given["a"].weight) == (["1e5"], "1.10", 2.0)
    assert given["b"].files == ["1.0"]


def test_quotes_nulls_interpolations_and_other_keys_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("COMMIT", "12e4567")
    words = ["trainer.run_name='1e5'", "model.path=null", "data.messages_key=NULL", "trainer.seed=7", "rollout.n=1_0"]
    config = compose(words)
    assert (config.trainer.run_name, config.model.path, config.data.messages_key) == ("1e5", None, None)
    assert (config.trainer.seed, config.rollout.n) == (7, 10)
    for given, name in (
        ("${oc.env:COMMIT}", "12e4567"),
        ("${trainer.seed}", "1"),
        ("x-${trainer.seed}-1e5", "x-1-1e5"),
        ('"a,b"', "a,b"),
        ("str(1e5)", "1e5"),
    ):
        assert compose([f"trainer.run_name={given}"]).trainer.run_name == name
    options = ["++environment.kwargs.a=1e5", "++environment.kwargs.b='1e5'", "environment.name=m:E"]
    assert compose(options).environment.kwargs == {"a": 1e5, "b": "1e5"}, "a function decides its own types"
    file = tmp_path / "own.yaml"
    file.write_text("trainer: {run_name: '1e5', seed: 0x10}\nmodel: {path: ~, chat_template: null, cache_dir: }\n")
    config = compose([], config_file=str(file))
    assert (config.trainer.run_name, config.trainer.seed) == ("1e5", 16)
    assert config.model.path is config.model.chat_template is config.model.cache_dir is None
    file.write_text("base: &base {run_name: 1e5}\ntrainer:\n  <<: *base\n  export_path: 1.10\n")
    values = read_yaml(str(file))
    assert values["trainer"]["export_path"] == "1.10"


@pytest.mark.parametrize(
    "word, expected",
    [
        ("trainer.run_name=1e5,2e5, x", "trainer.run_name='1e5','2e5', x"),
        ("trainer.run_name=choice(1,'2',x)", "trainer.run_name=choice('1','2',x)"),
        ("++trainer.run_name= 1.10 ", "++trainer.run_name= '1.10' "),
        ("data.train_files=[1, 'a,1', null,\"2\"]", "data.train_files=['1', 'a,1', 'null',\"2\"]"),
        ("data.train_files=[1],[2]", "data.train_files=['1'],['2']"),
        ("reward.name=[1,null]", "reward.name=['1','null']"),
        ("trainer={run_name: 1e5, seed: 3}", "trainer={run_name: '1e5', seed: 3}"),
        *((word, word) for word in (
            "trainer.run_name=range(1,3)", "trainer.run_name=http://1:2", "trainer.run_name=a\\,1", "algorithm=1e5",
            "trainer.run_name=${times:2,3}", "trainer.seed=1,2", "trainer.ckpt_interval=5", "~experiment", "word",
        )),
    ],
)  # fmt: skip
def test_the_grammar_of_the_command_line(word, expected):
    assert quoted(word) == expected


def test_a_sweep_names_its_directories_without_our_quotes():
    assert unquoted(quoted("trainer.run_name=1e5")) == "trainer.run_name=1e5"
    assert unquoted("trainer.run_name='a b'") == "trainer.run_name='a b'", "those are of the user"
    assert unquoted("data.train_files=['1']") == "data.train_files=['1']"


def test_every_key_that_may_be_a_text_is_known():
    """So that a type which nobody has thought of is decided on."""
    import dataclasses

    kinds = {}
    for key in KEYS:
        section, _, name = key.rpartition(".")
        (kind,) = (str(f.type) for f in dataclasses.fields(SECTIONS[section]) if f.name == name)
        kinds[key] = kind
    assert {kind for kind in kinds.values() if "str" in kind} == {
        "str", "str | None", "list[str]", "int | str", "dict[str, float]", "dict[str, Any]"
    }  # fmt: skip
    own = {key for key, kind in kinds.items() if kind == "Any"}
    teachers = {"algorithm.teacher.path", "algorithm.teacher.url"}
    assert own == {key for key in kinds if key.endswith("reward.name")} | teachers and all(map(kind_of_text, own))
    assert quoted("algorithm.teacher.path={math: 1e5, code: a}") == "algorithm.teacher.path={math: '1e5', code: a}"
    assert NAME in "".join(own) and kind_of_text("data.mix.x.files") == "list[str]"


def test_what_a_run_records_has_the_same_texts_when_it_is_read(tmp_path):
    """Also where a function decides the types: PyYAML writes 12e4567 without quotes, and OmegaConf reads a number."""
    values: dict[str, Any] = {"environment": {"name": "m:E", "kwargs": {word: word for word in WORDS}}}
    text = dump_yaml(values)
    assert yaml.safe_load(text) == values
    register()
    file = Path(tmp_path, "own.yaml")
    file.write_text(text)
    assert compose([], config_file=str(file)).environment.kwargs == values["environment"]["kwargs"]
    assert yaml.safe_load(dump_yaml({"a": 1e5, "b": 1e-5, "c": [1, True, None]})) == {
        "a": 1e5, "b": 1e-5, "c": [1, True, None]
    }  # fmt: skip
