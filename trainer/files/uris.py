"""Paths and URLs of places that keep checkpoints: directories, and prefixes in object stores such as `s3://bucket/run`."""

from __future__ import annotations

import os
import posixpath
import re

SCHEMES = {
    "s3": ("s3", "trainer.checkpoint.s3_client", "S3Client"),
    "gs": ("gcs", "trainer.checkpoint.gcs_client", "GoogleClient"),
}
"""The URL schemes of object stores: the extra of this package that each needs, and the module and class of its client
(see `trainer.checkpoint.object_storage.ObjectStoreClient`)."""

_URL = re.compile(r"^([a-z][a-z0-9+.-]*)://(.*)\Z", re.I | re.S)


def is_url(path: str) -> bool:
    """Return whether `path` has a scheme, such as `s3://`."""
    return _URL.match(path) is not None


def problem_of(url: str) -> str | None:
    """Return what is wrong with the URL of an object store; None: nothing. The text repeats no part of the URL."""
    match = _URL.match(url)
    assert match is not None, url
    scheme, rest = match[1], match[2]
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        return f"must be a directory that all ranks see, or begin with {known}"
    bucket, _, key = rest.partition("/")
    if "@" in bucket or ":" in bucket:
        return (
            "must not contain credentials: give them as environment variables or in a profile, as the store's own "
            "tools read them"
        )
    if not bucket or not rest.isprintable() or re.search(r"[?#*\[\]\\]", rest):
        return "must be a bucket and a prefix, such as s3://bucket/run, without ? # * [ ] and backslashes"
    if any(part in ("", ".", "..") for part in key.rstrip("/").split("/")) and key.rstrip("/"):
        return "must not contain empty parts, . or .. between its slashes"
    return None


def absolute(path: str) -> str:
    """Return a path that means the same in every process, without a slash at its end."""
    return path.rstrip("/") if is_url(path) else os.path.abspath(path)


def is_same(a: str, b: str) -> bool:
    """Return whether two paths or URLs name one place; links are followed."""
    return absolute(a) == absolute(b) if is_url(a) or is_url(b) else os.path.realpath(a) == os.path.realpath(b)


def below(path: str, *names: str) -> str:
    """Return the path of something below a directory or prefix."""
    return posixpath.join(path, *(name for name in names if name))


def inside(directory: str, path: str) -> str:
    """Return a path that was given in `directory`, as it is to be given elsewhere."""
    return path if is_url(path) else os.path.join(directory, path)
