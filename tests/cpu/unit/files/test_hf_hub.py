"""A Hub that does not answer."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import tenacity
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from trainer.config import DataConfig
from trainer.data.datasets import read_examples
from trainer.errors import UserError
from trainer.files.hf_hub import with_retries
from trainer.models.files import resolve_model_path


@pytest.fixture
def no_hub(monkeypatch):
    """A Hub at an address where nothing listens."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """The pauses between attempts, in seconds, which the test does not wait for."""
    pauses: list[float] = []
    monkeypatch.setattr(tenacity.nap, "time", SimpleNamespace(sleep=pauses.append))
    return pauses


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: read_examples(DataConfig(train_files=["hf://nobody/nothing"]), "train"),
            "data.train_files=hf://nobody/nothing: cannot be loaded from the Hub .*; with HF_HUB_OFFLINE=1 .*",
        ),
        (
            lambda: resolve_model_path("nobody/nothing"),
            "model.path=nobody/nothing: no such directory, and the Hub cannot be reached .*; name a directory .*",
        ),
    ],
    ids=["data", "model"],
)
def test_a_failed_connection_to_the_hub_is_tried_three_times(no_hub, pauses, call, sentence):
    with pytest.raises(UserError) as error:
        call()
    assert pauses == [0.5, 1.0]
    assert re.fullmatch(sentence, str(error.value)), str(error.value)


def test_only_failed_connections_are_retried(pauses):
    calls = []

    def fail_with(*errors):
        def call():
            calls.append(1)
            if len(calls) <= len(errors):
                raise errors[len(calls) - 1]
            return "done"

        calls.clear()
        return call

    wrapped = OSError("wrapped")
    wrapped.__cause__ = ConnectionRefusedError()
    assert with_retries(fail_with(wrapped, TimeoutError())) == "done"
    assert len(calls) == 3
    with pytest.raises(FileNotFoundError):
        with_retries(fail_with(FileNotFoundError(), FileNotFoundError()))
    assert len(calls) == 1
    with pytest.raises(OfflineModeIsEnabled):
        with_retries(fail_with(OfflineModeIsEnabled("no")))
    assert len(calls) == 1
