"""Locations of checkpoints: local paths, URLs of prefixes in object stores such as `s3://bucket/run`; and HTTP URLs."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from importlib.metadata import entry_points
from urllib.parse import SplitResult, urlsplit

from trainer.errors import UserError, describe_error


@dataclass(frozen=True)
class StoreSpec:
    """One kind of object store."""

    path: str
    """Import path `package.module:Class`; the class is a `trainer.checkpoint.buckets.ObjectStoreClient`."""
    extra: str = ""  # the extra of this package that the client needs. Empty: none.
    variables: tuple[str, ...] = ()
    """Environment variables that the client reads, or, with `_` at their end, the beginnings of their names. Ranks on
    other machines get those of the driver that they do not have."""
    identity: tuple[str, ...] = ()
    """Those of them that together say who sends a request. A machine with one of these keeps its own."""
    drawing: tuple[str, ...] = ()
    """Modules that draw from Python's `random`, such as for the waits between requests. They get a generator of their
    own, so that requests do not change what user code draws."""


STORES: dict[str, StoreSpec] = {
    "s3": StoreSpec(
        "trainer.checkpoint.buckets:S3Client",
        extra="s3",
        variables=("AWS_",),
        identity=(
            *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
            *("AWS_PROFILE", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"),
        ),
        drawing=("botocore.utils",),  # while it finds credentials
    ),
    "gs": StoreSpec(
        "trainer.checkpoint.buckets:GoogleClient",
        extra="gcs",
        variables=("GCSFS_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "FSSPEC_"),
        drawing=("aiohttp.connector", "gcsfs.retry", "google.auth._exponential_backoff"),
    ),
}
"""The kinds of object stores, by their URL scheme. An installed package adds one by an entry point of the group
`trainer.object_stores`: its name is the scheme, its value the import path of a `StoreSpec`."""

ENTRY_POINTS = "trainer.object_stores"  # the group of the entry points
_URL = re.compile(r"^([a-z][a-z0-9+.-]*)://(.*)\Z", re.I | re.S)


def store_spec(url: str) -> StoreSpec | None:
    """Return the kind of object store of a URL, or None. Raises UserError: the package that has it cannot be used."""
    scheme = url.partition("://")[0]
    return STORES.get(scheme) or _installed_store(scheme)


@functools.cache
def _installed_store(scheme: str) -> StoreSpec | None:
    for entry in entry_points(group=ENTRY_POINTS, name=scheme):
        try:
            spec = entry.load()
        except Exception as error:  # the package is not ours
            raise UserError(f"{scheme}://: {entry.value} cannot be imported ({describe_error(error)})") from error
        if not isinstance(spec, StoreSpec):
            raise UserError(f"{scheme}://: {entry.value} is a {type(spec).__name__}; it must be a StoreSpec")
        return spec
    return None


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


def problem_of(url: str) -> str | None:
    """Return what is wrong with the URL of an object store, or None. The text repeats no component of the URL."""
    match = _URL.match(url)
    assert match is not None, url
    rest = match[2]
    if store_spec(url) is None:
        installed = sorted(entry_points(group=ENTRY_POINTS).names)
        schemes = ", ".join(f"{name}://" for name in dict.fromkeys((*STORES, *installed)))
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


def lies_in(path: str, directory: str) -> bool:
    """Return whether a path or URL is `directory`, or lies inside it. Links are followed."""
    if is_url(path) != is_url(directory):
        return False
    path, directory = (absolute(one) if is_url(one) else os.path.realpath(one) for one in (path, directory))
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")


def inside(directory: str, path: str) -> str:
    return path if is_url(path) else os.path.join(directory, path)


def split_http_url(url: str) -> SplitResult | None:
    """Return the parts of the address of an HTTP server; None: it is none."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return None
    return parts if is_address else None
