"""How weights travel to engines. Both ends are threads of one process."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.weights import BUCKET, assert_equal, make_weights
from trainer.generation.weight_sync import Broadcast, Ipc, WeightTransferGroup, connect
from trainer.models.weight_deltas import WeightsDigest

WAIT_S = 60.0


def broadcast(path: Path, timeout_s: float = WAIT_S) -> Broadcast:
    return Broadcast(f"file://{path}/store", 1, "cpu", timeout_s, BUCKET)


def ipc(path: Path, timeout_s: float = WAIT_S) -> Ipc:
    return Ipc(secrets.token_hex(16), (0,), "cpu", timeout_s, BUCKET)


@pytest.mark.parametrize("source", [broadcast, ipc])
def test_all_ranks_step_through(source, tmp_path):
    """Gathering a tensor is a collective, so a rank that sends nothing must still come along."""
    seen = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for i in range(3):
            seen.append(i)
            yield f"w{i}", torch.zeros(1)

    source(tmp_path).send(weights(), rank=1)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("make_source", [broadcast, ipc])
def test_tensors_of_all_types_and_sizes_arrive_in_every_sync(make_source, tmp_path):
    source = make_source(tmp_path)
    with ThreadPoolExecutor(1) as thread:
        for version in (1, 2, 3):
            sending = thread.submit(source.send, iter(make_weights(version).items()), 0)
            digest = WeightsDigest()
            assert_equal(list(digest.of(source.receive())), make_weights(version))
            assert sending.result() == str(digest)


def in_two_buckets(second: threading.Event) -> Iterator[tuple[str, Tensor]]:
    """Tells when the ranks gather the second of two tensors that fill a bucket each."""
    yield "a", torch.zeros(BUCKET, dtype=torch.uint8)
    second.set()
    yield "b", torch.ones(BUCKET, dtype=torch.uint8)


def test_the_next_tensors_are_gathered_while_a_bucket_is_broadcast(tmp_path):
    """The receiver takes the first bucket after the second one was gathered."""
    gathered, source = threading.Event(), broadcast(tmp_path)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(lambda: WeightTransferGroup(source, sender=True).send(in_two_buckets(gathered)))
        channel = WeightTransferGroup(source, sender=False)
        assert gathered.wait(WAIT_S)
        assert [name for name, _ in channel.receive()] == ["a", "b"]
        sending.result()


def test_the_next_tensors_are_gathered_while_a_worker_copies(tmp_path):
    gathered, source = threading.Event(), ipc(tmp_path)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(source.send, in_two_buckets(gathered), 0)
        with connect(source.token, "cpu", WAIT_S) as link:
            assert gathered.wait(WAIT_S)
            messages = []
            while (message := link.recv()) is not None:
                messages.append(message)
                if not isinstance(message, bytes):
                    link.send(message[0])
            link.send(None)
            sending.result()
    assert [message[1][0][0] for message in messages if not isinstance(message, bytes)] == ["a", "b"]


def test_the_death_of_a_worker_is_heard(tmp_path):
    source = ipc(tmp_path)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(source.send, iter(make_weights(1).items()), 0)
        with connect(source.token, "cpu", WAIT_S):
            pass
        with pytest.raises((EOFError, OSError)):
            sending.result()


def test_a_side_that_stays_away_is_missed(tmp_path):
    with pytest.raises(TimeoutError, match="no engine took weights on this GPU for 0.1 s"):
        ipc(tmp_path, timeout_s=0.1).send(iter([]), 0)
    with pytest.raises(TimeoutError, match="no rank offers weights on this GPU for 0.1 s"):
        list(ipc(tmp_path, timeout_s=0.1).receive())
