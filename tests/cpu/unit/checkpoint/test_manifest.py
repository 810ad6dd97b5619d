"""The manifest: a checkpoint that differs from it is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import manager, save, sharded_parts
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.manifest import DamagedError, verify

FILES = ("manifest.json", "trainer_state.json", "policy/.metadata", "policy/__0_0.distcp", "policy/extra.json")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(FILES),
    damage=st.sampled_from(["truncate", "flip", "delete", "swap", "grow", "other_step"]),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    other=st.sampled_from(FILES),
)
def test_a_damaged_file_is_noticed_and_an_older_state_restored(
    real_checkpoints, tmp_path, name, damage, where, bit, other
):
    """Whatever happens to any file of the newest checkpoint: the exact older state, or the exact newest."""
    root = tmp_path / "copy"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(real_checkpoints, root)
    target = root / "global_step_2" / name
    content = bytearray(target.read_bytes())
    if damage == "truncate":
        target.write_bytes(content[: int(where * len(content))])
    elif damage == "flip":
        content[int(where * len(content))] ^= 1 << bit
        target.write_bytes(content)
    elif damage == "delete":
        target.unlink()
    elif damage == "swap":
        second = root / "global_step_2" / other
        target.write_bytes(second.read_bytes())
        second.write_bytes(content)
    elif damage == "grow":
        target.write_bytes(content + bytes([bit]))
    else:
        target.write_bytes((root / "global_step_1" / name).read_bytes())
    unchanged = {f: (root / "global_step_2" / f).exists() and (root / "global_step_2" / f).read_bytes() for f in FILES}
    untouched = all(unchanged[f] == (real_checkpoints / "global_step_2" / f).read_bytes() for f in FILES)
    state: dict = {}
    checkpoints = manager(root)
    n = 2 if untouched else 1
    found = checkpoints.latest()
    assert (found.path, found.step) == (str(root / f"global_step_{n}"), n)
    if not untouched:
        with pytest.raises(DamagedError) as error:
            verify(str(root / "global_step_2"))
        assert any(file in str(error.value) for file in (name, other, "manifest.json"))
    checkpoints.load(found, sharded_parts(state))
    assert state["n"] == n and state["lr"] == n / 10 and torch.equal(state["w"], torch.arange(8.0) + n)


@pytest.mark.parametrize("evil", ["../outside", "/etc/passwd", "policy/../../outside", "./x", "link"])
def test_manifest_paths_cannot_leave_the_checkpoint(tmp_path, evil):
    (tmp_path / "outside").write_bytes(b"abc")
    checkpoint = tmp_path / "global_step_1"
    checkpoint.mkdir()
    (checkpoint / "link").symlink_to(tmp_path / "outside")
    entry = manifests.FileEntry(evil, 3, "0")
    content = {"step": 1, "parts": [], "saved_at": "2026-01-01T00:00:00+00:00", "parent_step": None}
    (checkpoint / "manifest.json").write_bytes(manifests.dump(content, [entry]))
    for level in ("off", "size", "hash"):
        with pytest.raises(DamagedError, match="not inside the checkpoint"):
            verify(str(checkpoint), level)


def test_each_level_of_verification_notices_its_kind_of_damage(tmp_path):
    shard = Path(save(manager(tmp_path), 1)) / "weights/shard"
    found = {}
    for content in (b"abc", b"abd", b"ab", b"abcd", None):
        if content is None:
            shard.unlink()
        else:
            shard.write_bytes(content)
        for level in manifests.VERIFY:
            try:
                verify(str(tmp_path / "global_step_1"), level)
            except DamagedError as error:
                assert "weights/shard" in str(error)
                found.setdefault(content, []).append(level)
    sizes = ["hash", "size"]
    assert found == {b"abd": ["hash"], b"ab": sizes, b"abcd": sizes, None: sizes}
