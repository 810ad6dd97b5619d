"""The command line on URLs, and what of the credentials is written anywhere: nothing."""

from __future__ import annotations

import logging
import os

import pytest

from tests.support.buckets import KEY, SECRET, make_bucket, use_s3
from tests.support.toy import toy_config, toy_run
from trainer.checkpoint.__main__ import main
from trainer.checkpoint.storage import open_storage
from trainer.checkpoint.store import open_store
from trainer.checkpoint.uploads import open_tiers


@pytest.fixture
def s3(s3_url, monkeypatch):
    use_s3(monkeypatch, s3_url)


def run(capsys, *arguments: str) -> tuple[int, str]:
    status = main(list(arguments))
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_the_commands_take_urls(s3, capsys, tmp_path, tmp_path_factory):
    root = make_bucket("commands") + "/run"
    model = tmp_path_factory.mktemp("start")
    toy_run(toy_config(tmp_path / "run", ckpt_path=root, total_steps=4), model)
    status, listed = run(capsys, "ls", root)
    assert status == 0 and listed.count("  sizes agree") == 4 and "also there" not in listed
    assert run(capsys, "verify", root)[0] == 0
    assert run(capsys, "rollback", root, "--to", "3")[0] == 0
    assert open_store(root).steps() == [1, 2, 3]
    assert "not a checkpoint" in run(capsys, "verify", f"{root}/global_step_9")[1]
    assert "no checkpoint is there" in run(capsys, "ls", f"{root}/elsewhere")[1]


def test_a_rollback_reaches_both_tiers(s3, capsys, tmp_path, tmp_path_factory):
    root, cache = make_bucket("tiers") + "/run", tmp_path / "cache"
    cfg = toy_config(tmp_path / "run", ckpt_path=root, ckpt_cache_dir=str(cache), total_steps=4)
    start = tmp_path_factory.mktemp("start")
    for last in (3, None):  # the end of a run waits for the copy of its last step alone
        toy_run(cfg, start, stop_after=last)
    cache.rename(tmp_path / "away")
    status, refused = run(capsys, "rollback", root, "--to", "3")
    assert status == 2 and f"mkdir -p {cache}" in refused and open_store(root).steps()[-1] == 4
    (tmp_path / "away").rename(cache)
    for place in (root, root, str(cache)):  # as on several nodes, each with its own directory
        assert run(capsys, "rollback", place, "--to", "3")[0] == 0
        assert {open_store(one).steps()[-1] for one in (root, str(cache))} == {3}
    assert open_tiers(root, str(cache)).steps()[-1] == 3


def test_a_policy_is_exported_from_a_url_and_to_a_url(s3, saved_run, capsys, tmp_path):
    root = make_bucket("exports") + "/run"
    store = open_tiers(root, str(saved_run / "checkpoints"))
    store.start_uploads(lambda: None)
    store.finish_uploads(60)
    step = store.steps()[-1]
    assert run(capsys, "export", str(saved_run), str(tmp_path / "from-disk"))[0] == 0
    assert run(capsys, "export", f"{root}/global_step_{step}", str(tmp_path / "from-url"))[0] == 0
    assert run(capsys, "export", root, f"{root}-exported")[0] == 0
    for name in sorted(os.listdir(tmp_path / "from-disk")):
        content = (tmp_path / "from-disk" / name).read_bytes()
        assert (tmp_path / "from-url" / name).read_bytes() == content, name
        assert open_storage("s3://exports/run-exported").get(name) == content, name
    status, refused = run(capsys, "export", root, f"{root}-exported")
    assert status == 2 and "exists already" in refused


def test_no_credential_is_printed_or_saved(s3, capsys, caplog, tmp_path, tmp_path_factory, monkeypatch):
    caplog.set_level(logging.INFO)
    root = make_bucket("secrets") + "/run"
    toy_run(toy_config(tmp_path / "run", ckpt_path=root, total_steps=2), tmp_path_factory.mktemp("start"))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("trainer.checkpoint.buckets.MAX_ATTEMPTS", 1)
    use_s3(monkeypatch, f"http://user:{SECRET}@127.0.0.1:9")
    status, printed = run(capsys, "verify", f"{root}/global_step_1")
    assert status == 2 and "the object store fails" in printed
    texts = [printed, caplog.text]
    texts += [path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [text for text in texts if SECRET in text or KEY in text]


def test_no_credential_is_in_the_store(s3, tmp_path, tmp_path_factory):
    root = make_bucket("stored") + "/run"
    toy_run(toy_config(tmp_path / "run", ckpt_path=root, total_steps=1), tmp_path_factory.mktemp("start"))
    storage = open_storage("s3://stored")
    contents = [storage.get(key) for key in storage.list()]
    assert contents and not [data for data in contents if SECRET.encode() in data or KEY.encode() in data]
