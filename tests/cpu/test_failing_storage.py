"""Several damaged checkpoints in a row: the storage is tried before training relies on it."""

from __future__ import annotations

import resource
import signal

import pytest

from tests.cpu.test_config_changes import configured, save
from trainer.errors import UserError
from trainer.run_directory import RunDirectory


@pytest.fixture
def damaged(tmp_path):
    """A run whose two newest checkpoints of three are damaged."""
    save(configured(tmp_path), 1, 2, 3)
    for step in (2, 3):
        with open(tmp_path / f"checkpoints/global_step_{step}/data.json", "a") as file:
            file.write(" ")
    return tmp_path


def test_the_user_learns_that_the_storage_may_be_failing(damaged, caplog):
    with RunDirectory(configured(damaged, resume_mode="latest")).open() as run:
        assert run.resume.step == 1
    first, second, sign = caplog.messages
    assert all(text.startswith("skipped a damaged checkpoint") for text in (first, second))
    assert "2 damaged checkpoints in a row" in sign and "64 MiB" in sign
    assert not [path for path in (damaged / "checkpoints").iterdir() if "probe" in path.name]


def test_one_damaged_checkpoint_alone_is_no_sign(damaged, caplog):
    cfg = configured(damaged, resume_mode="latest")
    with RunDirectory(cfg).open() as run:
        run.checkpoints.delete([3])
    caplog.clear()
    with RunDirectory(cfg).open():
        (message,) = caplog.messages
        assert message.startswith("skipped a damaged checkpoint")


def test_storage_that_loses_what_is_written_is_refused(damaged):
    """A limit on the size of files stands in for the failing disk: small files are kept, the test file is not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(UserError, match=r"trainer.ckpt_path=.*the 2 newest checkpoints are damaged.*failing"):
            RunDirectory(configured(damaged, resume_mode="latest")).open()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
