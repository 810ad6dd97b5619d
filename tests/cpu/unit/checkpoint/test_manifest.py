"""The manifest: a checkpoint that differs from it is damaged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import manager, save, sharded_parts
from tests.support.odd_files import ODD_JSON, config, open_run, resume, rewrite
from tests.support.one_rank import open_run as open_one_rank_run
from tests.support.opened import opened_files
from tests.support.ranks import run_ranks
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.__main__ import main as checkpoint_tool
from trainer.checkpoint.components import files_component
from trainer.checkpoint.manifest import FORMAT_VERSION, CorruptCheckpointError, FileEntry, step_in, verify
from trainer.checkpoint.storage import open_storage
from trainer.errors import UserError
from trainer.files.atomic_io import digest_bytes
from trainer.files.documents import is_count
from trainer.workers.rank import Rank

FILES = ("manifest.json", "trainer_state.json", "policy/.metadata", "policy/__0_0.distcp", "policy/extra.json")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        with pytest.raises(CorruptCheckpointError) as error:
            verify(str(root / "global_step_2"))
        assert any(file in str(error.value) for file in (name, other, "manifest.json"))
    checkpoints.load(found, sharded_parts(state))
    assert state["n"] == n and state["lr"] == n / 10 and torch.equal(state["w"], torch.arange(8.0) + n)


def test_a_manifest_that_has_changed_is_damaged(tmp_path):
    path = Path(save(manager(tmp_path), 1)) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "saved_at": "2026-01-01T00:00:00+00:00"}))
    for level in manifests.VERIFY:
        with pytest.raises(CorruptCheckpointError, match="manifest.json is damaged"):
            verify(str(path.parent), level)


def test_manifest_paths_cannot_leave_the_checkpoint(tmp_path):
    (tmp_path / "outside").write_bytes(b"abc")
    checkpoint = tmp_path / "global_step_1"
    checkpoint.mkdir()
    (checkpoint / "link").symlink_to(tmp_path / "outside")
    content = {"step": 1, "parts": [], "saved_at": "2026-01-01T00:00:00+00:00", "parent_step": None}
    for evil in ("../outside", "/etc/passwd", "policy/../../outside", "./x", "link"):
        entry = manifests.FileEntry(evil, 3, "0")
        (checkpoint / "manifest.json").write_bytes(manifests.dump({**content, "files": [vars(entry)]}))
        for level in manifests.VERIFY:
            with pytest.raises(CorruptCheckpointError, match="not inside the checkpoint"):
                verify(str(checkpoint), level)


@pytest.mark.parametrize("name, levels", [("__0_0.distcp", ["hash"]), ("shard", ["hash", "unsharded"])])
def test_each_level_of_verification_notices_its_kind_of_damage(tmp_path, name, levels):
    parts = [files_component("weights", lambda: {"weights/__0_0.distcp": b"abc", "weights/shard": b"abc"})]
    shard = Path(save(manager(tmp_path), 1, parts)) / "weights" / name
    found = {}
    for content in (b"abc", b"abd", b"ab", b"abcd", None):
        if content is None:
            shard.unlink()
        else:
            shard.write_bytes(content)
        for level in manifests.VERIFY:
            try:
                verify(str(tmp_path / "global_step_1"), level)
            except CorruptCheckpointError as error:
                assert f"weights/{name}" in str(error)
                found.setdefault(content, []).append(level)
    sizes = list(manifests.VERIFY)
    assert found == {b"abd": levels, b"ab": sizes, b"abcd": sizes, None: sizes}


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([10**30, -(10**30), 2**63]), st.text(max_size=4),
    st.sampled_from([float("inf"), float("nan"), -0.5, 1e300, "../x", "\x1b[2J", "\ud800", "global_step_1", "\0"]),
    st.lists(st.none() | st.integers(0, 2), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(0, 1)),
)  # fmt: skip


def paths(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of every value in nested lists and objects."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [inner for name, child in children for inner in paths(child, (*path, name))]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_manifest_of_any_shape_is_valid_or_damaged(real_run, tmp_path, capsys, caplog, data):
    run_dir = tmp_path / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.copytree(real_run, run_dir)
    checkpoint = run_dir / "checkpoints/global_step_2"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["parent"] = data.draw(st.sampled_from([None, {"forked_from": "/x", "step": 1, "manifest": "0"}]))
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.sampled_from(paths(manifest) or [("x",)]))
        holder = manifest
        for name in where[:-1]:
            holder = holder[name]
        if data.draw(st.booleans()):
            holder[where[-1]] = data.draw(VALUES)
        else:
            del holder[where[-1]]
    if is_count(manifest.get("metrics_from")):  # another number is of the right shape, and the lines would be missing
        manifest["metrics_from"] = None
    if is_count(manifest.get("format_version")):  # another number is another format, which is refused by name
        manifest["format_version"] = FORMAT_VERSION
    rewrite(checkpoint, manifest)
    valid = {}
    for level in manifests.VERIFY:
        try:
            valid[level] = verify(str(checkpoint), level) is not None
        except CorruptCheckpointError as error:
            valid[level] = False
            assert str(checkpoint) in str(error)
    for arguments in (["ls", str(run_dir)], ["verify", str(run_dir), "--json"]):
        assert checkpoint_tool(arguments) in (0, 1)
    assert "\x1b" not in capsys.readouterr().out
    state: dict = {}
    caplog.clear()
    with open_run(config(run_dir), state) as run:
        assert run.resume.checkpoint.step == (2 if valid["hash"] else 1)
        assert ("skipped a damaged checkpoint" in caplog.text) != valid["hash"]
        try:
            run.load()
        except UserError as error:
            assert valid["hash"] and "part" not in str(error), error


def test_a_manifest_that_is_no_manifest_falls_back(run_dir):
    for content in ODD_JSON:
        (run_dir / "checkpoints/global_step_2").mkdir(exist_ok=True)  # a run sets aside what it goes back behind
        (run_dir / "checkpoints/global_step_2/manifest.json").write_bytes(content)
        assert resume(run_dir) == 1, content[:20]


@pytest.mark.parametrize("kind", ["directory", "pipe", "link", "endless"])
def test_a_manifest_that_is_no_regular_file_falls_back(run_dir, kind):
    path = run_dir / "checkpoints/global_step_2/manifest.json"
    path.rename(run_dir / "kept")
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "endless" else run_dir / "kept")
    assert resume(run_dir) == 1


def test_a_manifest_without_files_is_not_valid(run_dir):
    checkpoint = run_dir / "checkpoints/global_step_2"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    rewrite(checkpoint, manifest | {"files": []})
    with pytest.raises(CorruptCheckpointError, match="names no file"):
        verify(str(checkpoint), "size")
    assert resume(run_dir) == 1


def test_a_manifest_without_any_of_its_files_falls_back(run_dir):
    for name in os.listdir(run_dir / "checkpoints/global_step_2"):
        if name != "manifest.json":
            (run_dir / "checkpoints/global_step_2" / name).unlink()
    assert resume(run_dir) == 1


def resume_and_count(rank: Rank, root: str, model: str) -> int:
    with opened_files() as names, open_one_rank_run(rank, root, model) as run:
        run.load()
    return names.count("manifest.json")


def test_a_resume_reads_the_manifest_once(saved_run, model):
    assert run_ranks(1, resume_and_count, str(saved_run), str(model)) == [1]


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_a_shard_that_is_no_file_is_refused_before_it_is_read(run_dir, kind):
    checkpoint = run_dir / "checkpoints/global_step_2"
    file = checkpoint / "data.json"
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    for level in manifests.VERIFY:
        with pytest.raises(CorruptCheckpointError, match="data.json.*is not inside the checkpoint, or is no file"):
            verify(str(checkpoint), level)


# ---------------------------------------------------------------------------------------------------
# Files: hashed on their way, and inside of their directory


@pytest.fixture(params=["disk", "object store"])
def path(request, tmp_path) -> str:
    return str(tmp_path / "files") if request.param == "disk" else request.getfixturevalue("bucket_behind_proxy")


def test_what_is_written_is_measured_and_hashed_on_its_way(path, tmp_path):
    (tmp_path / "source").write_bytes(b"from a file")
    files = open_storage(path)
    files.write("small", b"abc")
    with files.open_writer("folder/large") as stream:
        stream.write(b"de")
        stream.write(memoryview(b"f"))
    files.upload(str(tmp_path / "source"), "copy")
    contents = {"small": b"abc", "folder/large": b"def", "copy": b"from a file"}
    assert files.written == {name: FileEntry(name, len(data), digest_bytes(data)) for name, data in contents.items()}
    others = open_storage(path)  # another process reads what the storage has
    for name, data in contents.items():
        assert (others.digest(name), others.get(name)) == (digest_bytes(data), data)
    assert others.list() == {name: len(contents[name]) for name in sorted(contents)}
    files.sync_written("folder")


def test_paths_that_lead_out_or_are_not_in_shortest_form_are_not_contained(path, tmp_path):
    for inside in ("../x", "/x", "a/../../x", "./x", "a//x", "", ".", ".."):
        assert not open_storage(path).contains(inside), inside
    assert open_storage(path).contains("policy/__0_0.distcp")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/out").symlink_to(tmp_path)
    assert not any(open_storage(str(tmp_path / "checkpoint")).contains(behind) for behind in ("out", "out/x"))


def test_files_are_not_read_through_links(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("content")
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "folder/link").symlink_to("file")
    files = open_storage(str(tmp_path))
    assert files.get("folder/file") == b"content"
    for path in ("link/file", "folder/link"):
        with pytest.raises(OSError):
            files.get(path)


def test_the_step_comes_from_the_name():
    odd = ("global_step_012", "global_step_1\n", "global_step_", "global_step_-1", ".aside-global_step_1-ab")
    for name, step in {"global_step_0": 0, "global_step_12": 12, **dict.fromkeys(odd)}.items():
        assert step_in(f"/runs/{name}") == step and step_in(f"/runs/{name}/") == step, name
