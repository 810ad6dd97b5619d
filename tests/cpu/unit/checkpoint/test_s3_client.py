"""Where the client of S3 finds credentials, endpoints, proxies and certificates: where AWS tools do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.buckets import KEY, SECRET, forget_connections, make_bucket, use_s3
from trainer.checkpoint.storage import StoreError, open_storage


@pytest.fixture
def bare(s3_url, monkeypatch, tmp_path):
    """A bucket, and no variable that says how to reach it."""
    with monkeypatch.context() as known:
        use_s3(known, s3_url)
        url = make_bucket(tmp_path.name.replace("_", "-")[:40])
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setattr("trainer.checkpoint.buckets.MAX_ATTEMPTS", 1)
    forget_connections()
    yield url
    forget_connections()


def is_usable(url: str) -> bool:
    storage = open_storage(url)
    storage.put("a", b"1")
    return storage.get("a") == b"1"


def test_a_profile_names_the_endpoint_and_the_credentials(bare, s3_url, monkeypatch, tmp_path):
    Path(tmp_path, "config").write_text(f"[profile mine]\nregion = us-east-1\nendpoint_url = {s3_url}\n")
    Path(tmp_path, "credentials").write_text(f"[mine]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert is_usable(bare)


def test_without_credentials_one_request_is_refused(bare, s3_url, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    with pytest.raises(StoreError, match="no credentials"):
        open_storage(bare).get("a")


@pytest.mark.parametrize(
    ("variable", "value"), [("AWS_CA_BUNDLE", "/nowhere/ca.pem"), ("HTTPS_PROXY", "http://127.0.0.1:9")]
)
def test_certificates_and_proxies_of_the_environment_are_used(bare, s3_url, monkeypatch, variable, value):
    """A certificate that is missing must not look like a missing object."""
    for name, content in {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, variable: value}.items():
        monkeypatch.setenv(name, content)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url.replace("http://", "https://"))
    with pytest.raises(StoreError, match="error sending request|No such file|invalid path") as raised:
        open_storage(bare).get("a")
    assert SECRET not in str(raised.value)
