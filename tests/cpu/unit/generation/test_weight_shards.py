"""Weights by shard and by difference: two ranks that serve, and the copy that engines of a node share."""

from __future__ import annotations

import pickle
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.jobs import left_in_shared_memory, shared_memory
from tests.support.weights import make_weights
from trainer.errors import UserError, WorkerError
from trainer.generation import weight_shards
from trainer.generation.weight_shards import NodeCopy, Shards, ShardServer
from trainer.models.export_weights import plan_layout
from trainer.process import time_limits

WAIT_S = 60.0


def some_changed(weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Change about two percent of the elements."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < 0.02, tensor + 1, tensor)
        for name, tensor in weights.items()
    }


class Ranks:
    """Two ranks. Each has half of the rows or columns of each tensor with an even number of them."""

    def __init__(self, token: str, timeout_s: float = WAIT_S):
        self.token, self.timeout_s = token, timeout_s
        self.servers = [ShardServer(token, "127.0.0.1", timeout_s) for _ in range(2)]

    def keep(self, weights: Mapping[str, Tensor]) -> Shards:
        layout, blocks = plan_layout(weights, max_file_bytes=200_000), ([], [])
        assert len(layout.headers) > 1
        for name, tensor in weights.items():
            axis = next((axis for axis, size in enumerate(tensor.shape) if size and size % 2 == 0), None)
            if axis is None or tensor.dim() > 2:
                blocks[0].append((name, (0,) * tensor.dim(), tensor))
                continue
            for rank, part in enumerate(tensor.chunk(2, axis)):
                first = tuple(rank * part.shape[axis] if number == axis else 0 for number in range(tensor.dim()))
                blocks[rank].append((name, first, part))
        offers = tuple(server.keep(layout, own) for server, own in zip(self.servers, blocks, strict=True))
        return Shards(self.token, offers, self.timeout_s)

    def close(self) -> None:
        while self.servers:
            self.servers.pop().close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    before = shared_memory()
    ranks = Ranks(secrets.token_hex(16))
    yield ranks
    ranks.close()
    weight_shards.close_copies()
    assert not left_in_shared_memory(before)


def loaded(directory: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in Path(directory).glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_serves(source: Shards, weights: Mapping[str, Tensor]) -> None:
    with source.opened() as directory:
        found = loaded(directory)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_each_version_arrives_and_only_changes_travel(ranks):
    weights = make_weights(1)
    source = ranks.keep(weights)
    total = sum(tensor.nbytes for tensor in weights.values())
    assert sum(offer.changed_bytes for offer in source.offers) == total
    assert_serves(source, weights)
    for seed in (2, 3):
        weights = some_changed(weights, seed)
        source = ranks.keep(weights)
        assert sum(offer.changed_bytes for offer in source.offers) < 0.2 * total
        assert_serves(source, weights)


def test_engines_of_a_node_fetch_once(ranks):
    """The second one loads the same files while no rank serves, and the last one deletes them."""
    weights = make_weights(1)
    source = ranks.keep(weights)
    assert_serves(source, weights)
    ranks.close()
    script = (
        "import sys, pickle; from trainer.generation.weight_shards import close_copies\n"
        "with pickle.loads(bytes.fromhex(sys.argv[1])).opened() as directory: print(directory)\n"
        "close_copies()"
    )
    other = subprocess.run(
        [sys.executable, "-c", script, pickle.dumps(source).hex()], capture_output=True, text=True, check=True
    )
    with source.opened() as directory:
        assert other.stdout.strip() == directory
    assert_serves(source, weights)


def test_engines_that_ask_together_wait_for_each_other(ranks):
    weights = make_weights(1)
    copies = [NodeCopy(ranks.token) for _ in range(3)]
    for seed in range(3):
        weights = some_changed(weights, seed)
        source = ranks.keep(weights)

        def load(copy: NodeCopy, source: Shards = source) -> dict[str, Tensor]:
            with copy.at(source) as directory:
                return loaded(directory)

        with ThreadPoolExecutor(3) as threads:
            for found in threads.map(load, copies):
                assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    for copy in copies:
        copy.close()


def test_an_engine_without_the_base_gets_everything(ranks):
    """It has missed a version, or its copy is of ranks that have ended."""
    weights = make_weights(1)
    assert_serves(ranks.keep(weights), weights)
    for seed in (2, 3):
        weights = some_changed(weights, seed)
        source = ranks.keep(weights)
    assert_serves(source, weights)
    ranks.close()
    others, weights = Ranks(ranks.token), some_changed(weights, 4)
    assert_serves(others.keep(weights), weights)
    others.close()


def test_a_copy_that_was_damaged_is_found_and_fetched_again(ranks):
    weights = make_weights(1)
    source = ranks.keep(weights)
    with source.opened() as directory:
        path = next(path for path in Path(directory).glob("*.safetensors") if "large.float32" in load_file(path))
    middle = path.stat().st_size // 2
    content = path.read_bytes()
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    weights = some_changed(weights, 2)
    source = ranks.keep(weights)
    with pytest.raises(WorkerError, match="rollout.weight_sync=delta: the weights of the rank at .* have the digest"):
        assert_serves(source, {})
    assert_serves(source, weights)


def test_a_version_that_is_not_offered_any_more_is_refused(ranks):
    old = ranks.keep(make_weights(1))
    ranks.keep(make_weights(2))
    with pytest.raises(WorkerError, match=f"it offers [0-9a-f]+, and not {old.offers[0].digest}"):
        assert_serves(old, {})


def test_bits_change_the_digest_and_equal_bits_do_not(ranks):
    weights = make_weights(1)
    zero = {**weights, "scalar.float32": torch.tensor(0.0)}
    one, same, other = (
        ranks.keep(version).offers[0].digest for version in (zero, zero, {**zero, "scalar.float32": torch.tensor(-0.0)})
    )
    assert one == same != other


def test_strangers_learn_nothing_and_keep_nobody_waiting(ranks, monkeypatch):
    monkeypatch.setattr(time_limits, "NODE_ANSWER_S", 0.5)
    weights = make_weights(1)
    source = ranks.keep(weights)
    host, port = source.offers[0].address.split(":")
    assert host == "127.0.0.1"
    silent = [socket.create_connection((host, int(port))) for _ in range(20)]
    with pytest.raises(WorkerError, match="have not arrived .AuthenticationError: digest"):
        assert_serves(Shards("another secret", source.offers, WAIT_S), {})
    assert_serves(source, weights)
    for one in silent:
        one.close()


def test_a_rank_that_has_gone_is_named(ranks):
    source = ranks.keep(make_weights(1))
    ranks.close()
    with pytest.raises(WorkerError, match=f"the weights of the rank at {source.offers[0].address} have not arrived"):
        assert_serves(source, {})


def test_a_copy_that_does_not_fit_is_refused(ranks, monkeypatch):
    source = ranks.keep(make_weights(1))

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(UserError, match="rollout.weight_sync=delta: /dev/shm of an engine's node has no room"):
        assert_serves(source, {})
