"""The operations of a storage: the same on a disk, in S3, in Google Cloud Storage, and in a store that is new."""

from __future__ import annotations

import itertools
import os
import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.another_store import use_another_store
from tests.support.fault_proxy import CUT, LOST, PASS
from tests.support.gcs import gcs_server, use_gcs
from trainer.checkpoint.storage import (
    Storage,
    StoreError,
    open_storage,
)


@pytest.fixture(params=["disk", "s3", "gs", "mem"])
def storage(request, tmp_path, monkeypatch):
    if request.param == "disk":
        (tmp_path / "root").mkdir()
        yield open_storage(str(tmp_path / "root"))
    elif request.param == "s3":
        yield open_storage(f"{request.getfixturevalue('bucket_behind_proxy')}/run")
    elif request.param == "mem":
        use_another_store(monkeypatch, tmp_path)
        yield open_storage("mem://bucket/run")
    else:
        with gcs_server() as url:
            use_gcs(monkeypatch, url)
            yield open_storage("gs://bucket/run")


def test_what_is_put_is_read_listed_and_deleted(storage: Storage):
    for key in ("a", "folder/b", "folder/inner/c"):
        storage.put(key, key.encode())
    assert storage.get("folder/inner/c") == b"folder/inner/c" and storage.get_range("folder/b", 2, 5) == b"lde"
    assert storage.size("folder/b") == 8
    assert storage.list() == {"a": 1, "folder/b": 8, "folder/inner/c": 14}
    assert storage.list("folder") == {"folder/b": 8, "folder/inner/c": 14}
    assert storage.names() == ["a", "folder"] and storage.names("folder") == ["b", "inner"]
    assert storage.names("nowhere") == [] == list(storage.list("nowhere"))
    with pytest.raises(OSError):
        storage.get_range("a", 0, 2)
    storage.delete("a")
    storage.delete("a")
    storage.delete_below("folder/inner")
    assert storage.list() == {"folder/b": 8}
    for read in (storage.get, storage.size, storage.get_with_etag):
        with pytest.raises(FileNotFoundError):
            read("a")


def test_a_put_on_a_condition_is_done_only_if_the_object_is_unchanged(storage: Storage):
    assert storage.put_if("a", b"1", None) and not storage.put_if("a", b"2", None)
    data, etag = storage.get_with_etag("a")
    assert data == b"1" and storage.put_if("a", b"3", etag)
    assert not storage.put_if("a", b"4", etag) and storage.get("a") == b"3"
    assert not storage.put_if("missing", b"4", etag) and "missing" not in storage.names()
    assert not storage.delete_if_match("a", etag)
    if storage.disk is not None:
        assert storage.delete_if_match("a", storage.get_with_etag("a")[1])
        assert storage.names() == ["missing.guard"]


def test_one_of_many_writers_on_a_condition_wins(storage: Storage):
    storage.put("a", b"start")
    etag = storage.get_with_etag("a")[1]
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda n: storage.put_if("new", b"%d" % n, None), range(8)))
        replaced = list(pool.map(lambda n: storage.put_if("a", b"%d" % n, etag), range(8)))
    assert created.count(True) == replaced.count(True) == 1
    assert storage.get("new") == b"%d" % created.index(True) and storage.get("a") == b"%d" % replaced.index(True)


def test_the_etag_of_a_file_changes_when_it_is_touched(tmp_path):
    storage = open_storage(str(tmp_path))
    storage.put("a", b"1")
    before = storage.get_with_etag("a")[1]
    os.utime(tmp_path / "a", (1e9, 1e9))
    assert storage.get_with_etag("a")[1] != before


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """The smallest parts that S3 accepts."""
    monkeypatch.setattr("trainer.checkpoint.buckets._PART_BYTES", 5 << 20)


def test_a_large_object_is_written_in_parts(storage: Storage, small_parts):
    for size in (0, 5, 6 << 20, 10 << 20):
        block, key = secrets.token_bytes(min(size, 1 << 20) or 1), f"folder/{size}"
        with storage.open_writer(key) as stream:
            for _ in range(size // len(block)):
                stream.write(block)
        assert storage.size(key) == size
        if size > len(block):
            assert storage.get_range(key, len(block) - 1, len(block) + 1) == block[-1:] + block[:1]


def test_a_writer_that_fails_leaves_no_object(bucket_behind_proxy, small_parts):
    storage = open_storage(bucket_behind_proxy)
    with pytest.raises(StoreError, match="KeyError"), storage.open_writer("large") as stream:
        stream.write(bytes(6 << 20))
        raise KeyError
    assert storage.names() == [] and uploads(bucket_behind_proxy) == []


@pytest.mark.parametrize("fault", [LOST, CUT])
def test_a_large_object_is_complete_although_answers_are_lost(bucket_behind_proxy, faults, fault, small_parts):
    """Also the answer to the last request, after which S3 no longer knows the upload."""
    number = itertools.count(1)
    faults.plan = lambda method, path: fault if method in ("PUT", "POST") and next(number) % 2 else PASS
    storage, data = open_storage(bucket_behind_proxy), secrets.token_bytes(11 << 20)
    with storage.open_writer("large") as stream:
        stream.write(data)
    assert storage.get("large") == data


def test_a_bucket_that_is_missing_is_named(bucket_behind_proxy):
    with pytest.raises(StoreError, match="there is no bucket nowhere"):
        open_storage("s3://nowhere/run").put_if("a", b"1", None)


def uploads(bucket: str) -> list:
    from trainer.checkpoint.buckets import client_of

    return client_of("s3").api.list_multipart_uploads(Bucket=bucket.removeprefix("s3://")).get("Uploads", [])
