"""Object stores: real HTTP servers that a test starts on this machine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from trainer.checkpoint.buckets import client_of

KEY, SECRET = "AKIATESTSTORE0000001", "topSecretOfTheStore/4711"


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Run moto's S3 server; yields its URL. Every bucket that a test names must be made with `make_bucket`."""
    from moto.moto_server.threaded_moto_server import MotoRequestHandler
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    one_condition_at_a_time = threading.Lock()  # moto reads and writes in two steps; S3's condition is one
    moto = DomainDispatcherApplication(create_backend_app)

    def app(environ, start_response):
        conditional = "HTTP_IF_MATCH" in environ or "HTTP_IF_NONE_MATCH" in environ
        with one_condition_at_a_time if conditional else contextlib.nullcontext():
            return moto(environ, start_response)

    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()


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
