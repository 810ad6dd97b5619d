"""Files of the run directory that checkpoints carry."""

from __future__ import annotations

import shutil

import pytest

from tests.support.runs import OpenRun, configured
from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import CorruptCheckpointError
from trainer.run.run_files import RunFiles


@pytest.fixture
def run(tmp_path):
    """An open run whose checkpoints carry its files."""
    with OpenRun(configured(tmp_path / "run"), {"step": 1}) as run:
        run.components.append(run.directory.run_files.component())
        yield run


def checkpoint_of(run: OpenRun, step: int) -> manifest.Checkpoint:
    return manifest.read(run.directory.checkpoints.store.path(step))


def write(run: OpenRun, path: str, text: str) -> None:
    file = run.directory.run_files._run_dir + "/" + path
    with open(file, "a") as handle:
        handle.write(text)


def test_each_checkpoint_restores_the_files_as_they_were_and_shares_what_did_not_change(run, tmp_path):
    store = run.directory.checkpoints.store
    one, two = '{"step": 1, "loss": 1.0}\n', '{"step": 2, "loss": 1.0}\n'
    write(run, "metrics.jsonl", one)
    write(run, "rewards.jsonl", "secret\n")
    run.save(1)
    before = set(store.pieces())
    write(run, "metrics.jsonl", two)
    run.save(2)
    assert len(set(store.pieces()) - before) == 1, "the second save adds the new lines alone"
    before, files = set(store.pieces()), RunFiles(run.directory.run_files._run_dir, store)
    files.restore(checkpoint_of(run, 2))
    write(run, "metrics.jsonl", '{"step": 3, "loss": 1.0}\n')
    files._keep(files._stamps())
    assert len(set(store.pieces()) - before) == 1, "so does the first save of the next process"
    for step, text in ((1, one), (2, one + two)):
        elsewhere = tmp_path / f"at {step}"
        elsewhere.mkdir()
        RunFiles(str(elsewhere), store).restore(checkpoint_of(run, step))
        assert (elsewhere / "metrics.jsonl").read_text() == text
        assert (elsewhere / "rewards.jsonl").stat().st_mode & 0o077 == 0, "others cannot read it"
        assert {file.name for file in elsewhere.iterdir()} == {"metrics.jsonl", "rewards.jsonl"}


def test_a_file_that_has_more_lines_stays_and_another_one_is_replaced(run, tmp_path):
    write(run, "metrics.jsonl", "one\n")
    run.save(1)
    store, checkpoint = run.directory.checkpoints.store, checkpoint_of(run, 1)
    for before, after in (("one\ntwo\n", "one\ntwo\n"), ("other\n", "one\n"), ("", "one\n")):
        (tmp_path / "metrics.jsonl").write_text(before)
        RunFiles(str(tmp_path), store).restore(checkpoint)
        assert (tmp_path / "metrics.jsonl").read_text() == after


def test_pieces_that_no_checkpoint_names_are_deleted_unless_a_checkpoint_is_archived_or_damaged(run):
    store = run.directory.checkpoints.store
    write(run, "metrics.jsonl", "one\n")
    run.save(1)
    named = set(store.pieces())
    store.keep_piece("0" * 32, b"left by a killed save")
    (listing,) = (entry.path for entry in checkpoint_of(run, 1).entries if entry.path.startswith("carried"))
    file = f"{store.path(1)}/{listing}"
    shutil.copy(file, f"{file}.good")
    with open(file, "w") as damaged:
        damaged.write("{")
    run.directory.run_files.remove_unused()
    assert set(store.pieces()) == named | {"0" * 32}
    shutil.move(f"{file}.good", file)
    run.directory.run_files.remove_unused()
    assert set(store.pieces()) == named


def test_a_damaged_piece_is_refused(run, tmp_path):
    write(run, "metrics.jsonl", "one\n")
    run.save(1)
    store = run.directory.checkpoints.store
    names = store.pieces()
    store.remove_pieces(names)
    with pytest.raises(CorruptCheckpointError, match="a piece of a carried file cannot be read"):
        RunFiles(str(tmp_path), store).restore(checkpoint_of(run, 1))
    for name in names:
        store.keep_piece(name, b"other")
    with pytest.raises(CorruptCheckpointError, match="the piece .* of a carried file is damaged"):
        RunFiles(str(tmp_path), store).restore(checkpoint_of(run, 1))
    assert not (tmp_path / "metrics.jsonl").exists()
