"""The reference is complete and up to date."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.support.config import KEYS
from trainer.config import Config, field_docs
from trainer.config.fields import walk_sections
from trainer.config.reference import main, page

ROOT = Path(__file__).parents[4]


def test_every_key_has_a_meaning():
    for name, section in walk_sections(Config()):
        docs = field_docs(type(section))
        for f in dataclasses.fields(section):
            if name:
                assert docs.get(f.name), f"{name}.{f.name}"


def test_meanings_stand_alone():
    """No meaning points to the key above it."""
    for name, section in walk_sections(Config()):
        for key, meaning in field_docs(type(section)).items():
            assert not meaning.startswith(("The same", "And ", "Likewise", "How far")), f"{name}.{key}"


def test_the_page_shows_every_key_with_type_bounds_and_default():
    text = page()
    for key in KEYS:
        assert f"| `{key}` | " in text
    assert "| `trainer.val_interval` | int, at least 1, or -1 | `10` | harmless | Validate every" in text
    assert "| `algorithm.clip_low` | float or None, at least 0 | `null` |" in text


def test_some_keys_are_shown_alone(capsys):
    assert main(["trainer.val_interval"]) == 0
    first, meaning = capsys.readouterr().out.splitlines()
    assert first == "trainer.val_interval: int, at least 1, or -1, default 10, resume harmless"
    assert meaning.startswith("  Validate every")
    assert main(["val_interval", "max_ckpts"]) == 0
    assert capsys.readouterr().out.splitlines()[::2] == [first, *_first_lines("trainer.max_ckpts_to_keep")]
    assert main(["use_peft"]) == main(["ckpt_intervall"]) == 2
    foreign, wrong = capsys.readouterr().err.splitlines()
    assert foreign.endswith("in place of use_peft, this project has trainer.policy.lora.rank")
    assert wrong.endswith("did you mean trainer.ckpt_interval?")


def _first_lines(*keys: str) -> list[str]:
    rows = {key: line for line in page().splitlines() for key in keys if line.startswith(f"| `{key}` |")}
    cells = {key: [cell.strip(" `") for cell in line.split("|")[2:5]] for key, line in rows.items()}
    return [f"{key}: {kind}, default {default}, resume {rule}" for key, (kind, default, rule) in cells.items()]


def test_the_page_in_docs_is_fresh():
    assert (ROOT / "docs/config.md").read_text() == page() + "\n", "run `make docs`"
