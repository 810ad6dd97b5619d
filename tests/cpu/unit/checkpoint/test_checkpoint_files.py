"""The files of a checkpoint: hashed on their way, and inside of its directory."""

from __future__ import annotations

import pytest

from trainer.checkpoint.checkpoint_files import FileEntry, files_at, step_in
from trainer.files.atomic_io import digest_bytes


@pytest.fixture(params=["disk", "object store"])
def path(request, tmp_path) -> str:
    return str(tmp_path / "files") if request.param == "disk" else request.getfixturevalue("bucket_behind_proxy")


def test_what_is_written_is_measured_and_hashed_on_its_way(path, tmp_path):
    (tmp_path / "source").write_bytes(b"from a file")
    files = files_at(path)
    files.write("small", b"abc")
    with files.open_writer("folder/large") as stream:
        stream.write(b"de")
        stream.write(memoryview(b"f"))
    files.upload(str(tmp_path / "source"), "copy")
    contents = {"small": b"abc", "folder/large": b"def", "copy": b"from a file"}
    assert files.written == {name: FileEntry(name, len(data), digest_bytes(data)) for name, data in contents.items()}
    others = files_at(path)  # another process reads what the storage has
    for name, data in contents.items():
        assert (others.digest(name), others.read(name)) == (digest_bytes(data), data)
    assert others.storage.list() == {name: len(contents[name]) for name in sorted(contents)}
    files.sync("folder")


@pytest.mark.parametrize("path_inside", ["../x", "/x", "a/../../x", "./x", "a//x", "", ".", ".."])
def test_paths_that_lead_out_or_are_not_in_shortest_form_are_not_contained(path, path_inside):
    assert not files_at(path).contains(path_inside)
    assert files_at(path).contains("policy/__0_0.distcp")


@pytest.mark.parametrize("path", ["out", "out/x"])
def test_paths_behind_a_link_are_not_contained(tmp_path, path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/out").symlink_to(tmp_path)
    assert not files_at(str(tmp_path / "checkpoint")).contains(path)


def test_files_are_not_read_through_links(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("content")
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "folder/link").symlink_to("file")
    files = files_at(str(tmp_path))
    assert files.read("folder/file") == b"content"
    for path in ("link/file", "folder/link"):
        with pytest.raises(OSError):
            files.read(path)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("global_step_0", 0),
        ("global_step_12", 12),
        ("global_step_012", None),
        ("global_step_1\n", None),
        ("global_step_", None),
        ("global_step_-1", None),
        (".aside-global_step_1-ab", None),
    ],
)
def test_the_step_comes_from_the_name(name, step):
    assert step_in(f"/runs/{name}") == step and step_in(f"/runs/{name}/") == step
