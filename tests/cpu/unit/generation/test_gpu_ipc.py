"""Two processes on one device: who may connect, messages that must come in time, and a buffer that both see."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection as Channel
from multiprocessing.connection import answer_challenge

import pytest
import torch

from trainer.generation import weight_sync
from trainer.generation.weight_sync import accept, connect, export_buffer, import_buffer, receive_within

WAIT_S = 60.0


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


def answer_once(token: str) -> str:
    with accept(token, "cpu", WAIT_S) as link:
        text = link.recv()
        link.send(text.upper())
    return text


def test_two_sides_with_one_token_meet_and_talk(thread):
    accepting = thread.submit(answer_once, "a token")
    with connect("a token", "cpu", WAIT_S) as link:
        link.send("hello")
        assert link.recv() == "HELLO"
    assert accepting.result() == "hello"


def test_a_stranger_who_finds_the_address_is_refused(thread):
    accepting = thread.submit(answer_once, "a token")
    with socket.socket(socket.AF_UNIX) as stranger:
        while stranger.connect_ex(weight_sync._address("a token", "cpu")):
            pass
        with Channel(os.dup(stranger.fileno())) as channel, pytest.raises(AuthenticationError):
            answer_challenge(channel, b"another token")
    with pytest.raises(AuthenticationError):
        accepting.result()


def test_the_address_tells_nothing_of_the_token_and_leaves_no_file():
    address = weight_sync._address("a token", "cpu")
    assert address.startswith("\0trainer-") and "token" not in address
    assert len({weight_sync._address(token, "cpu") for token in ("a token", "b")} - {address}) == 1


def test_a_side_that_stays_away_is_missed():
    with pytest.raises(TimeoutError, match="no engine took weights on this GPU for 0.05 s"), accept("x", "cpu", 0.05):
        pass
    with pytest.raises(TimeoutError, match="no rank offers weights on this GPU for 0.05 s"), connect("x", "cpu", 0.05):
        pass


def test_a_message_that_does_not_come_in_time_and_a_side_that_ended_are_told_apart():
    ours, theirs = Pipe()
    with pytest.raises(TimeoutError, match="no answer for 0.05 s while weights went between two processes"):
        receive_within(ours, 0.05)
    theirs.close()
    with pytest.raises(EOFError):
        receive_within(ours, 0.05)


def test_another_process_sees_what_is_written_into_an_exported_buffer():
    buffer, handle = export_buffer(4, "cpu")
    buffer.copy_(torch.arange(4, dtype=torch.uint8))
    child = os.fork()
    if child == 0:
        try:
            theirs = import_buffer(handle, "cpu")
            assert theirs.tolist() == [0, 1, 2, 3]
            theirs[0] = 7
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert buffer.tolist() == [7, 1, 2, 3]
