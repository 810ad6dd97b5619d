"""Exports at a path and at a URL."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.support.buckets import make_bucket, use_s3
from tests.support.fault_proxy import ERROR, PASS
from tests.support.toy import toy_config
from trainer.checkpoint.exports import PolicyExports, check_export_path, export_directory, is_exported
from trainer.checkpoint.storage import StoreError, open_storage
from trainer.checkpoint.store import open_store
from trainer.errors import FailureSource, UserError, set_failure_source


def write(directory: str, text: str) -> None:
    Path(directory, "extra").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "extra/template"):
        Path(directory, name).write_text(f"{text} {name}")


def test_an_export_to_a_path_is_made_there(tmp_path):
    target = str(tmp_path / "export")
    assert not is_exported(target)
    with export_directory(target) as directory:
        assert directory == target
        write(directory, "one")
    assert is_exported(target)


def test_an_export_at_a_url_is_whole_or_has_no_config(bucket_behind_proxy, faults, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.checkpoint.buckets.MAX_ATTEMPTS", 1)
    target = f"{bucket_behind_proxy}/export"
    for text in ("one", "two"):
        with export_directory(target, str(tmp_path)) as directory:
            write(directory, text)
    assert is_exported(target) and open_storage(target).get("extra/template") == b"two extra/template"
    faults.plan = lambda method, path: ERROR if method == "PUT" and path.endswith("model.safetensors") else PASS
    with pytest.raises(StoreError), export_directory(target, str(tmp_path)) as directory:
        write(directory, "three")
    assert not is_exported(target), "the older export is replaced in part"


class Fails:
    """An exporter whose exports raise an error."""

    def __init__(self, error: OSError):
        self.error = error

    def export(self, directory: str, dtype: str) -> None:
        raise self.error


def test_an_export_without_room_is_left_out_unless_a_rank_has_failed(tmp_path, caplog):
    """The other ranks wait for one that has failed: all must start again."""
    full = OSError(errno.ENOSPC, "No space left on device")
    exports = PolicyExports(toy_config(tmp_path, hf_save_interval=1), Fails(full))
    exports.export_if_due(1)
    assert "/global_step_1/policy: cannot be written (No space left on device); training continues" in caplog.text
    set_failure_source(full, FailureSource("rank 1"))
    with pytest.raises(OSError, match="No space left"):
        exports.export_if_due(1)


def test_a_directory_of_exports_that_holds_something_else_is_refused_before_the_start(s3_url, tmp_path, monkeypatch):
    use_s3(monkeypatch, s3_url)
    check_export_path(str(tmp_path / "exports"))  # not there yet
    check_export_path(f"{make_bucket('exports')}/new")
    export = tmp_path / "exports/global_step_2/policy"
    write(str(export), "one")
    check_export_path(str(tmp_path / "exports"))
    (export / "config.json").unlink()
    with pytest.raises(UserError, match="trainer.export_path=.*/exports: .*/policy is not an export of a policy"):
        check_export_path(str(tmp_path / "exports"))
    for store in (open_store(str(tmp_path / "checkpoints")), open_store(f"{make_bucket('exports')}/checkpoints")):
        store.write_latest(2)
        with pytest.raises(UserError, match="trainer.export_path=.*/checkpoints: holds checkpoints; choose another"):
            check_export_path(store.root)
