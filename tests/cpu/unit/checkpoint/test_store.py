"""The local store: a draft is published by a rename, and files are read where no link leads out."""

from __future__ import annotations

import os

import pytest

from tests.support.checkpoints import hidden
from trainer.checkpoint.names import step_in
from trainer.checkpoint.store import LocalStore, files_at


def nothing() -> None:
    pass


def test_a_draft_is_no_checkpoint_until_it_is_published(tmp_path):
    store = LocalStore(str(tmp_path / "checkpoints"))
    draft = store.begin(3)
    draft.write("folder/file", b"abc")
    assert store.steps() == [] and list(store.leftovers().values()) == ["an interrupted save"]
    seen = []
    store.publish(draft, 3, b"{}", lambda: seen.append((store.steps(), draft.read("manifest.json"))))
    assert seen == [([], b"{}")], "asked when all is written and nothing is committed"
    assert store.steps() == [3] and store.leftovers() == {}
    assert files_at(store.path(3)).sizes() == {"folder/file": 3, "manifest.json": 2}


def test_a_commit_that_is_refused_publishes_nothing(tmp_path):
    store = LocalStore(str(tmp_path))
    draft = store.begin(1)

    def refuse() -> None:
        raise PermissionError("another job holds the directory")

    with pytest.raises(PermissionError):
        store.publish(draft, 1, b"{}", refuse)
    assert store.steps() == []
    store.discard(draft)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_is_withdrawn_atomically_and_then_removed(tmp_path):
    store = LocalStore(str(tmp_path))
    for step in (1, 2):
        store.publish(store.begin(step), step, b"{}", nothing)
    left, aside = store.withdraw(1), store.set_aside(2)
    assert store.steps() == [] and hidden(tmp_path) == [".aside-", ".deleting-"]
    assert store.leftovers() == {left: "an interrupted deletion"}, "what was set aside is kept"
    assert store.asides(2) == [aside] and store.asides(1) == []
    store.remove(left)
    store.remove(aside)
    assert os.listdir(tmp_path) == []


def test_a_probe_leaves_no_files(tmp_path):
    LocalStore(str(tmp_path / "new")).probe()
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "./x", "a//x", "out", "out/x", ""])
def test_paths_outside_of_the_directory_or_not_in_shortest_form_are_not_contained(tmp_path, path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/out").symlink_to(tmp_path)
    assert not files_at(str(tmp_path / "checkpoint")).contains(path)
    assert files_at(str(tmp_path / "checkpoint")).contains("policy/__0_0.distcp")


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
