"""Paths and URLs of stored checkpoints."""

from __future__ import annotations

import os

import pytest

from tests.support.another_store import STORE, use_another_store
from trainer.errors import UserError
from trainer.files.uris import absolute, inside, is_same, is_url, lies_in, problem_of, store_spec


@pytest.mark.parametrize(
    ("path", "answer"), [("s3://bucket/run", True), ("S3://b", True), ("runs/s3://b", False), ("/runs", False)]
)
def test_a_scheme_makes_a_url(path, answer):
    assert is_url(path) == answer


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/a/b", "gs://bucket/a/", "s3://bucket/a b"])
def test_a_bucket_and_a_prefix_are_accepted(url):
    assert problem_of(url) is None


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://host/run", "begin with"),
        ("s3://user:password@bucket/run", "must not contain credentials"),
        ("s3:///run", "must be a bucket and a prefix"),
        ("s3://bucket/run?versionId=1", "must be a bucket and a prefix"),
        ("s3://bucket/a\nb", "must be a bucket and a prefix"),
        ("s3://bucket/a/../b", "must not contain . or .. or an empty name"),
        ("s3://bucket/a//b", "must not contain . or .. or an empty name"),
    ],
)
def test_an_invalid_url_is_refused_without_repeating_it(url, problem):
    text = problem_of(url)
    assert problem in text
    assert "password" not in text and "versionId" not in text


def test_an_installed_package_adds_a_kind_of_store(tmp_path, monkeypatch):
    assert "begin with s3://, gs://" in problem_of("mem://bucket/run")
    use_another_store(monkeypatch, tmp_path)
    assert store_spec("mem://bucket/run") == STORE and problem_of("mem://bucket/run") is None
    assert "credentials" in problem_of("mem://user:password@bucket/run")
    assert "begin with s3://, gs://, mem://" in problem_of("men://bucket/run")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("no_such_module:STORE", "no_such_module:STORE cannot be imported .*no_such_module"),
        ("tests.support.another_store:MemoryClient", "is a type; it must be a StoreSpec"),
    ],
)
def test_a_broken_package_of_a_store_is_named(tmp_path, monkeypatch, value, problem):
    use_another_store(monkeypatch, tmp_path)
    entries = tmp_path / "another_store-1.0.dist-info/entry_points.txt"
    entries.write_text(f"[trainer.object_stores]\nmem = {value}\n")
    with pytest.raises(UserError, match=f"^mem://: .*{problem}"):
        problem_of("mem://bucket/run")


def test_paths_are_absolute_and_urls_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute("runs/") == str(tmp_path / "runs") and absolute("s3://bucket/run/") == "s3://bucket/run"
    assert inside("/home", "runs") == "/home/runs" and inside("/home", "s3://b/r") == "s3://b/r"


def test_links_are_followed_to_the_same_location(tmp_path):
    (tmp_path / "runs").mkdir()
    os.symlink(tmp_path / "runs", tmp_path / "link")
    assert is_same(str(tmp_path / "link"), str(tmp_path / "runs")) and not is_same(
        str(tmp_path), str(tmp_path / "runs")
    )
    assert is_same("s3://b/r/", "s3://b/r") and not is_same("s3://b/r", str(tmp_path))


def test_a_place_lies_in_a_directory_by_its_names_and_its_links(tmp_path):
    (tmp_path / "runs/one").mkdir(parents=True)
    os.symlink(tmp_path / "runs", tmp_path / "link")
    runs = str(tmp_path / "runs")
    for inside_it in (runs, f"{runs}/", f"{runs}/one", f"{tmp_path}/link/one/not/there", f"{runs}/../runs/one"):
        assert lies_in(inside_it, runs) and lies_in(inside_it, "/"), inside_it
    assert not any(lies_in(path, runs) for path in (str(tmp_path), f"{runs}2", f"{runs}/../x", "s3://b/runs"))
    assert lies_in("s3://b/x/y", "s3://b/x/") and lies_in("s3://b/x", "s3://b/x") and lies_in("s3://b/x", "s3://b")
    assert not lies_in("s3://b/xy", "s3://b/x") and not lies_in("s3://b/x", "s3://b/x/y")
    assert not lies_in("s3://b/x", "gs://b/x") and not lies_in("s3://b/x", "/")
