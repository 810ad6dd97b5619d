"""Files that are complete or absent, and reads that follow no link."""

from __future__ import annotations

import os

import pytest

from tests.support.namespaces import small_disk
from trainer.files.atomic_io import read_file, read_inside, write_file


def test_a_write_replaces_the_complete_file(tmp_path):
    path = str(tmp_path / "file")
    write_file(path, "first, and long")
    write_file(path, b"second")
    assert read_file(path) == b"second"
    assert os.listdir(tmp_path) == ["file"]


def test_a_fenced_write_leaves_the_file_unchanged(tmp_path):
    path = str(tmp_path / "file")
    write_file(path, "of the owner")

    def fence() -> None:
        raise PermissionError("another job owns it")

    with pytest.raises(PermissionError):
        write_file(path, "of the former owner", fence)
    assert read_file(path) == b"of the owner"


def test_a_write_without_room_leaves_nothing():
    with small_disk("64k") as directory:
        path = f"{directory}/file"
        write_file(path, b"small")
        with pytest.raises(OSError, match="No space left on device"):
            write_file(path, bytes(1 << 17))
        assert read_file(path) == b"small" and os.listdir(directory) == ["file"]


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_only_regular_files_are_read(tmp_path, kind):
    (tmp_path / "secret").write_text("secret")
    path = tmp_path / "file"
    if kind == "link":
        path.symlink_to(tmp_path / "secret")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(OSError):
        read_file(str(path))


def test_no_directory_of_the_path_may_be_a_link(tmp_path):
    (tmp_path / "root/real").mkdir(parents=True)
    (tmp_path / "root/real/file").write_text("content")
    (tmp_path / "root/link").symlink_to(tmp_path / "root/real")
    assert read_inside(str(tmp_path / "root"), "real/file") == b"content"
    with pytest.raises(OSError):
        read_inside(str(tmp_path / "root"), "link/file")


def test_a_private_file_is_accessible_only_to_its_owner(tmp_path):
    write_file(str(tmp_path / "file"), b"x", mode=0o600)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
