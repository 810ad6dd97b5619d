"""What is said to inference servers arrives as it was, to the last bit."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from tests.support.generation import GREEDY, contents, make_requests, with_sampling
from trainer.generation.engine import Completion
from trainer.generation.server_protocol import (
    _STARTS_FILE,
    Job,
    decode_completions,
    decode_requests,
    encode_completions,
    encode_requests,
    fingerprint,
)
from trainer.run.run_metadata import STARTS_FILE


def test_requests_and_completions_arrive_as_they_were():
    sent = dict(enumerate([*make_requests(3), *with_sampling(make_requests(2), GREEDY)], start=7))
    received = decode_requests(encode_requests(sent))
    assert list(received) == list(sent)
    for number, request in sent.items():
        assert received[number].prompt_token_ids.tolist() == request.prompt_token_ids.tolist()
        assert (received[number].seed, received[number].sampling) == (request.seed, request.sampling)
    logprobs = -np.random.default_rng(1).random(5, np.float32) * 1e-3
    completion = Completion([1, 2, 3, 4, 5], logprobs, "stop", (3, 4), ((3, 2), (4, 3)))
    received_completion = decode_completions(encode_completions({9: completion}))[9]
    assert contents([received_completion]) == contents([completion])
    assert received_completion.version_spans == completion.version_spans


def test_what_is_no_list_of_requests_is_a_value_error():
    for body in [b"", b"[]", b"{}", b'{"samplings": [{}], "requests": []}', b'{"samplings": 1}']:
        with pytest.raises(ValueError):
            decode_requests(body)


def test_a_start_of_a_run_and_a_copy_of_its_directory_are_told_apart(tmp_path):
    assert _STARTS_FILE == STARTS_FILE
    (run := tmp_path / "run").mkdir()
    (run / STARTS_FILE).write_text('{"time": 1}\n')
    first = Job.of_run(str(run), {})
    shutil.copytree(run, tmp_path / "copy")
    (run / STARTS_FILE).write_text('{"time": 1}\n{"time": 2}\n')
    second, copy = Job.of_run(str(run), {}), Job.of_run(str(tmp_path / "copy"), {})
    assert first.run == second.run != copy.run and (first.start, second.start) == (1, 2)


def test_the_fingerprint_tells_directories_with_equal_files_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("equal")
        os.utime(tmp_path / name / "x", (1, 1))
    assert fingerprint(str(tmp_path / "a")) != fingerprint(str(tmp_path / "b"))
