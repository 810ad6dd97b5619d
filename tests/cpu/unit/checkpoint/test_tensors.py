"""The tensors of a checkpoint without ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer.checkpoint.manifest import CorruptCheckpointError, verify
from trainer.checkpoint.tensors import NamedFiles


@pytest.fixture
def files(real_checkpoints) -> list[NamedFiles]:
    return [NamedFiles(verify(str(Path(real_checkpoints) / f"global_step_{step}"))) for step in (1, 2)]


def test_tensors_are_assembled_from_the_shards(files):
    assert files[0].tensors("policy", ["w"])["w"].equal(torch.arange(8.0) + 1)
    assert list(files[0].shapes("policy")) == ["w"] and files[0].shapes("critic") == {}


def test_a_file_that_was_changed_after_the_check_is_refused(files):
    path = Path(files[0].path, "trainer_state.json")
    saved = path.read_bytes()
    path.write_bytes(saved + b" ")
    try:
        with pytest.raises(CorruptCheckpointError, match="trainer_state.json does not have the content"):
            files[0].json("trainer_state.json", {})
    finally:
        path.write_bytes(saved)
    assert files[0].json("trainer_state.json", {}) == {"n": 1} and files[0].json("nowhere.json", {}) == {}
