from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.buckets import make_bucket, use_s3
from tests.support.checkpoints import write_two
from tests.support.fault_proxy import Faults, fault_proxy
from tests.support.one_rank import save_run
from tests.support.ranks import run_ranks
from trainer.models.tiny import TinyShape, build_tiny
from trainer.process import time_limits


@pytest.fixture(scope="session")
def real_checkpoints(tmp_path_factory):
    """Two checkpoints with DCP shards, of states 1 and 2."""
    root = tmp_path_factory.mktemp("real")
    run_ranks(1, write_two, str(root))
    return root


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_tiny(TinyShape(hidden_size=64, intermediate_size=128, seed=3), str(path))
    return path


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory, model) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(1, save_run, str(root), str(model))
    return root


@pytest.fixture
def faults(monkeypatch) -> Faults:
    """What goes wrong between this process and the store. Requests that failed are sent again soon."""
    monkeypatch.setattr(time_limits, "STORAGE_LONGEST_BACKOFF_S", 0.02)
    return Faults()


@pytest.fixture
def bucket_behind_proxy(s3_url, faults, monkeypatch) -> Iterator[str]:
    """The URL of an empty bucket, which is reached through a proxy with faults."""
    with fault_proxy(s3_url, faults) as url:
        use_s3(monkeypatch, url)
        yield make_bucket(f"bucket-{secrets.token_hex(4)}")
