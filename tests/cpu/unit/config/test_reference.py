"""The reference is complete and up to date."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.support.config import KEYS
from trainer.config import Config, field_docs
from trainer.config.fields import walk_sections
from trainer.config.reference import page

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


def test_the_page_in_docs_is_fresh():
    assert (ROOT / "docs/config.md").read_text() == page() + "\n", "run `make docs`"
