"""Locations of checkpoints: local paths, and URLs of prefixes in object stores such as `s3://bucket/run`."""

from __future__ import annotations

import os
import re

SCHEMES = {
    "s3": ("s3", "trainer.checkpoint.s3_client", "S3Client"),
    "gs": ("gcs", "trainer.checkpoint.gcs_client", "GoogleClient"),
}
"""The URL schemes of object stores. For each: the extra of this package that it needs, and the module and class of its
client (see `trainer.checkpoint.object_storage.ObjectStoreClient`)."""

_URL = re.compile(r"^([a-z][a-z0-9+.-]*)://(.*)\Z", re.I | re.S)


def is_url(path: str) -> bool:
    """Return whether `path` has a scheme, such as `s3://`."""
    return _URL.match(path) is not None


def problem_of(url: str) -> str | None:
    """Return what is wrong with the URL of an object store, or None. The text repeats no component of the URL."""
    match = _URL.match(url)
    assert match is not None, url
    scheme, rest = match[1], match[2]
    if scheme not in SCHEMES:
        schemes = ", ".join(f"{name}://" for name in SCHEMES)
        return f"must be a directory that all ranks see, or begin with {schemes}"
    bucket, _, key = rest.partition("/")
    if "@" in bucket or ":" in bucket:
        return (
            "must not contain credentials: set them as environment variables or in a profile, where the store's own "
            "tools read them"
        )
    if not bucket or not rest.isprintable() or re.search(r"[?#*\[\]\\]", rest):
        return "must be a bucket and a prefix, such as s3://bucket/run, without ? # * [ ] and backslashes"
    if any(name in ("", ".", "..") for name in key.rstrip("/").split("/")) and key.rstrip("/"):
        return "must not contain . or .. or an empty name between its slashes"
    return None


def absolute(path: str) -> str:
    """Return a path that is valid in every working directory, without a slash at its end."""
    return path.rstrip("/") if is_url(path) else os.path.abspath(path)


def is_same(a: str, b: str) -> bool:
    """Return whether two paths or URLs are the same location. Links are followed."""
    return absolute(a) == absolute(b) if is_url(a) or is_url(b) else os.path.realpath(a) == os.path.realpath(b)


def inside(directory: str, path: str) -> str:
    """Return a path that was given relative to `directory`, as it is valid in other directories."""
    return path if is_url(path) else os.path.join(directory, path)
