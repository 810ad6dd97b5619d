"""Object stores: real HTTP servers that a test starts on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from trainer.checkpoint.buckets import client_of

KEY, SECRET = "AKIATESTSTORE0000001", "topSecretOfTheStore/4711"


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Run moto's S3 server; yields its URL. Every bucket that a test names must be made with `make_bucket`."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def s3_variables(url: str) -> dict[str, str]:
    """The environment variables with which a process uses an S3 server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def use_s3(patch: pytest.MonkeyPatch, url: str) -> dict[str, str]:
    """Point this process, and its children, at an S3 server; returns the environment variables."""
    environment = s3_variables(url)
    for name, value in environment.items():
        patch.setenv(name, value)
    forget_connections()
    return environment


def forget_connections() -> None:
    """Let the next request use the environment of now."""
    client_of.cache_clear()


def make_bucket(name: str) -> str:
    """Make a bucket on the server of `use_s3`; returns its URL.

    Raises:
        OSError: the server does not answer.
    """
    from botocore.exceptions import BotoCoreError

    try:
        client_of("s3").api.create_bucket(Bucket=name)
    except BotoCoreError as error:
        raise OSError(str(error)) from error
    return f"s3://{name}"
