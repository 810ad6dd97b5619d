"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import process_marks
from tests.support.buckets import s3_server

os.environ["OMP_NUM_THREADS"] = "1"  # for the engines and models of this process too: before torch is imported
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these tests are about CPUs, also on a machine with GPUs
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - with Ray's 15, others would leave it hardly any time


sys.addaudithook(process_marks.refuse_processes)
gc.disable()  # the collector would look at all that the test modules import, again and again

# A machine that is busy is no fault of the code. Each run draws other examples, so that few of them are enough.
settings.register_profile("any_machine", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")

_LIBRARIES = ("AITER_", "KMP_", "LD_LIBRARY_PATH", "NCCL_", "PYTORCH_", "RAY_", "TILELANG_", "TORCH", "TRITON_")
_SET_FOR_THE_PROCESS = (*_LIBRARIES, "VLLM_", "_TORCHINDUCTOR_", "HF_HUB_", "HYDRA_", "TQDM_", "PYTEST_CURRENT_TEST")
"""Beginnings of variables that libraries set when they are imported, and that a command sets at its start."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests marked `early` first. Mark those that start processes."""
    process_marks.add_marks(items)
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
    gc.freeze()  # from now on it looks at what tests make
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    process_marks.watch(item)
    return (yield)


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """A test that leaves a variable behind changes what later tests of its process find, so it fails."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    changed = {name for name in changed if not name.startswith(_SET_FOR_THE_PROCESS)}
    assert not changed, f"the test has changed variables of the environment: {sorted(changed)}"


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """A command that runs in this process prints the messages of all modules: only until its test ends."""
    logger = logging.getLogger("trainer")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagate, handlers


@pytest.fixture
def marker(monkeypatch, tmp_path) -> str:
    """A value in the environment of everything that the test starts."""
    monkeypatch.setenv("TRAINER_TEST_MARKER", str(tmp_path))
    return str(tmp_path)


@pytest.fixture
def read_only(tmp_path) -> Iterator[Path]:
    """A directory that cannot be written."""
    path = tmp_path / "read_only"
    path.mkdir(mode=0o555)
    yield path
    path.chmod(0o755)


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """The URL of an S3 server. A test makes buckets with names of its own, and reaches them with `use_s3`."""
    with s3_server() as url:
        yield url


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory) -> Path:
    """One for all processes of the test run: the first one makes it, and the others wait and use it."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def _own_cache(shared_directory):
    """Embedded models are built once per test session, not taken from, or left in, the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRAINER_CACHE", str(shared_directory / "cache"))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """The directory of a model with random weights. No test changes it."""
    from trainer.models.tiny import TinyShape, build_tiny  # torch, after the variables above

    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyShape(hidden_size=64, intermediate_size=128), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model) -> Any:
    """The tokenizer of that model. The tests of one module share it."""
    from trainer.models.tokenizer import load_tokenizer

    return load_tokenizer(model)


@pytest.fixture(scope="module")
def ray_address():
    """A Ray cluster that jobs join, as on several nodes; it outlives them."""
    directory = tempfile.mkdtemp(prefix="ray")  # Ray's sockets need a short path
    command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--head",
        "--block",
        "--port=0",
        "--node-ip-address=127.0.0.1",
        "--num-cpus=8",
        f"--object-store-memory={2**28}",
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--no-monitor",
        f"--temp-dir={directory}",
    ]
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    env["RAY_prestart_worker_first_driver"] = "0"  # processes that no job uses
    env.pop("TRAINER_TEST_MARKER", None)  # it belongs to the test that happens to be first
    log = Path(directory, "log")
    with log.open("w") as output:
        cluster = subprocess.Popen(command, stdout=output, stderr=output, env=env)
    try:
        while not (said := re.search(r"ray start --address='.*:(\d+)'", log.read_text())):
            assert cluster.poll() is None, log.read_text()
            time.sleep(0.1)
        yield f"127.0.0.1:{said[1]}"
    finally:
        cluster.terminate()
        cluster.wait()
        shutil.rmtree(directory, ignore_errors=True)
