"""Keys of `data.*`: files or a generator, and what each needs."""

from __future__ import annotations

import pytest

from tests.cpu.unit.config.contradictions import (  # noqa: F401
    test_contradictions_are_refused_in_one_sentence,
    test_what_is_at_a_bound_is_accepted,
)
from trainer.config.data import GENERATORS
from trainer.data.generators import generate

CONTRADICTIONS = [
    (["data=reverse_text", "data.train_files=[a.jsonl]"], "data.synthetic.*data=files"),
    (["data=reverse_text", "data.val_files=[a.jsonl]"], "data.synthetic.*data=files"),
    (["data=files"], r"data.train_files=\[\]: name at least one file"),
    (["data=files", "data.train_files=[a.jsonl]"], "trainer.val_interval=10: needs data.val_files"),
    (["data.train_size=-1"], "data.train_size=-1: a generator needs a number of examples"),
    (["+data.synthetic_args.letters=3"], "data.synthetic_args.*min_letters"),
    (["data=reasoning_gym"], "data.task=None: data.synthetic=reasoning_gym needs the name of a task"),
    (["data.task=chain_sum"], "data.task=chain_sum: is read by data.synthetic=reasoning_gym alone"),
    (["+data.synthetic_args.min_letters=x"], "data.synthetic_args.*min_letters must be a whole number"),
    (["data.curriculum=hardest"], "data.curriculum=hardest: must be an import path"),
]
AT_THE_BOUND = [
    ["data=files", "data.train_files=[a.jsonl]", "trainer.val_interval=-1"],
    ["data=reasoning_gym", "data.task=chain_sum", "+data.synthetic_args.operators=[+,-]"],
]


@pytest.mark.parametrize("name", [name for name, options in GENERATORS.items() if options is not None])
def test_generators_take_the_options_that_the_schema_names(name):
    """The schema lists them itself, because it does not import numpy."""
    (example,) = generate(name, dict.fromkeys(GENERATORS[name], 5), 1, "train")
    assert set(example) == {"prompt", "answer"}
    with pytest.raises(TypeError):
        generate(name, {"letters": 5}, 1, "train")
