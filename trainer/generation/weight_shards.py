"""Weights by shard and by difference: each rank offers what has changed of its own shards, and engines fetch it.

A rank keeps its blocks of the newest version in host memory, as bits of the engines' dtype, and serves them on a port
of its node's address. The engines of a node share one copy of the weight files in shared memory. The first engine that
needs a version brings the copy to it: it fetches from every rank what has changed since the version that the copy has,
or whole blocks if the rank does not know that version. All engines of the node then load the files.

A version is named by digests. That of a rank follows from the places and the digests of all its blocks, and the driver
passes it on to the engines. So a copy that was brought to a version has the bits that the ranks had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import shutil
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from trainer.errors import RESTART_HINT, UserError, WorkerError, describe_error
from trainer.files.atomic_io import write_file
from trainer.files.shared_memory import SHARED_MEMORY, NodeDirectory
from trainer.models.weight_deltas import Change, apply_change, bits_of, difference, digest_of, whole
from trainer.process import time_limits

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.models.export_weights import FileLayout, Region

_MOST_CLIENTS = 16
_LENGTH = struct.Struct("<Q")


class RankOffer(NamedTuple):
    """What a rank offers."""

    address: str  # `host:port`
    digest: str  # of the rank's blocks, in hexadecimal
    changed_bytes: int  # size of what has changed since the version before, or of everything if there was none


@dataclass(frozen=True)
class ShardKeeper:
    """Tells ranks to keep their blocks, and to serve them to engines."""

    token: str  # a secret of the job, which ranks and engines must prove to each other
    hosts: tuple[str, ...]  # address of the node of each rank
    timeout_s: float  # longest time in which nothing moves

    def keep(self, layout: FileLayout, blocks: Iterable[tuple[str, tuple[int, ...], Tensor]], rank: int) -> RankOffer:
        """Keep the blocks of this rank (see `trainer.models.export_weights.own_blocks`) until the next call.

        The rank's server is opened at the first sync. It stays until this process is a rank of another job.
        """
        if rank not in _servers or _servers[rank][0] != self:
            if rank in _servers:
                _servers.pop(rank)[1].close()
            _servers[rank] = self, ShardServer(self.token, self.hosts[rank], self.timeout_s)
        return _servers[rank][1].keep(layout, blocks)


_servers: dict[int, tuple[ShardKeeper, ShardServer]] = {}


@dataclass(frozen=True)
class _Version:
    """A rank's blocks of one version. They do not change, so they can be sent while the rank makes other ones."""

    digest: str = ""  # empty: there is no version
    base: str = ""  # Digest of the version before. Empty: none is known.
    files: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    """Size and header, in hexadecimal, of the files to which the blocks belong."""
    regions: Sequence[Region] = ()
    digests: Sequence[str] = ()
    bits: Sequence[np.ndarray] = ()
    changes: Sequence[Change] = ()  # from `base` to this version


class ShardServer:
    """Keeps a rank's blocks of one version, with what has changed since the version before, and serves them.

    Args:
        host: address on which it listens.
    """

    def __init__(self, token: str, host: str, timeout_s: float):
        self._token, self._timeout_s = token, timeout_s
        self._version = _Version()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, name="weights", daemon=True).start()

    def keep(self, layout: FileLayout, blocks: Iterable[tuple[str, tuple[int, ...], Tensor]]) -> RankOffer:
        """Keep `blocks` in place of those of the version before. Nothing can be fetched meanwhile."""
        base, before = self._version.digest, dict(zip(self._version.regions, self._version.bits, strict=True))
        self._version = _Version()  # each old block is freed as soon as it was compared
        regions, kept, changes = [], [], []
        for name, first, block in blocks:
            region = layout.region(name, first, tuple(block.shape))
            # On the device, because a combined copy and cast would cast on the CPU.
            host = block.detach().to(layout.entries[name].dtype).to("cpu")
            bits = bits_of(host.clone() if host.data_ptr() == block.data_ptr() else host)
            old = before.pop(region, None)
            regions.append(region)
            kept.append(bits)
            changes.append(whole(bits) if old is None else difference(old, bits))
        files = {file: [layout.sizes[file], header.hex()] for file, header in layout.headers.items()}
        digests = [digest_of(bits) for bits in kept]
        digest = _version_digest(files, regions, digests)
        self._version = _Version(digest, base, files, regions, digests, kept, changes)
        return RankOffer(self.address, digest, sum(change.nbytes for change in changes))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # else the thread would wait on
        self._listener.close()

    def _serve(self) -> None:
        free = threading.BoundedSemaphore(_MOST_CLIENTS)
        while True:
            free.acquire()
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(end, free), name="weights", daemon=True).start()

    def _answer(self, end: socket.socket, free: threading.Semaphore) -> None:
        """Answer one client. One that goes away, or is none of the job, is forgotten."""
        try:
            with contextlib.suppress(OSError, EOFError, ValueError, AuthenticationError), end:
                _limit(end, time_limits.NODE_ANSWER_S)  # for strangers
                _authenticate(end, self._token, [deliver_challenge, answer_challenge])
                _limit(end, self._timeout_s)
                request = _receive_json(end)
                version, has, wants = self._version, request["has"], request["wants"]
                if wants != version.digest:
                    _send_json(end, {"error": f"it offers {version.digest or 'no version'}, and not {wants}"})
                    return
                if has == wants:
                    changes: Sequence[Change] = ()
                elif has and has == version.base:
                    changes = version.changes
                else:
                    changes = [whole(bits) for bits in version.bits]
                places = {"files": version.files, "regions": version.regions, "digests": version.digests}
                _send_json(end, {**places, "counts": [change.count for change in changes]})
                for change in changes:
                    end.sendall(_bytes_of(change.distances))
                    end.sendall(_bytes_of(change.values))
        finally:
            free.release()


@dataclass(frozen=True)
class Shards:
    """Weights that ranks offer. Engines load the files of their node's copy of them."""

    token: str
    offers: tuple[RankOffer, ...]
    timeout_s: float

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Shards:
        """Return the object of which `dataclasses.asdict` was sent. Raises TypeError or ValueError if it is none."""
        offers = tuple(
            RankOffer(*(kind(value) for kind, value in zip((str, str, int), offer, strict=True)))
            for offer in fields["offers"]
        )
        return cls(str(fields["token"]), offers, float(fields["timeout_s"]))

    @contextmanager
    def opened(self) -> Iterator[str]:
        """Bring this node's copy to this version. Yield its directory, in which nothing changes within the block.

        Raises:
            WorkerError: a rank does not serve this version, or the bits that have arrived are others.
            UserError: shared memory cannot hold the copy.
        """
        if self.token not in _copies:
            _copies[self.token] = NodeCopy(self.token)
        with _copies[self.token].at(self) as directory:
            yield directory


_copies: dict[str, NodeCopy] = {}


def close_copies() -> None:
    """Leave this node's copies. The last process deletes them."""
    while _copies:
        _copies.popitem()[1].close()


class NodeCopy:
    """The weight files of one version, which the engines of a node share.

    The digests of the version are in a file of their own, which does not exist while the weights change. So an engine
    that is killed meanwhile leaves a copy without a version, and the next one fetches all of it.
    """

    def __init__(self, token: str):
        self._directory = NodeDirectory(token)
        self._weights = os.path.join(self._directory.path, "weights")
        self._version = os.path.join(self._directory.path, "version.json")

    def close(self) -> None:
        self._directory.close()

    @contextmanager
    def at(self, source: Shards) -> Iterator[str]:
        """Bring the copy to the version of `source`. Yield its directory."""
        wanted = [offer.digest for offer in source.offers]
        lock = os.path.join(self._directory.path, "lock")
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            while self._held() != wanted:
                fcntl.flock(handle, fcntl.LOCK_EX)  # releases the shared lock first
                if (held := self._held()) != wanted:
                    self._fetch(source, held)
                    write_file(self._version, json.dumps(wanted))
                fcntl.flock(handle, fcntl.LOCK_SH)
            yield self._weights
        finally:
            os.close(handle)

    def _held(self) -> list[str]:
        try:
            with open(self._version) as file:
                return json.load(file)
        except FileNotFoundError:
            return []

    def _fetch(self, source: Shards, held: Sequence[str]) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._version)
        if len(held) != len(source.offers):
            held = [""] * len(source.offers)
            shutil.rmtree(self._weights, ignore_errors=True)
        with contextlib.ExitStack() as stack:
            ends, answers = [], []
            for offer, has in zip(source.offers, held, strict=True):
                with _fetching(offer):
                    end = stack.enter_context(_connected(offer.address, source.token, source.timeout_s))
                    _send_json(end, {"has": has, "wants": offer.digest})
                    answer = _receive_json(end)
                    if "error" in answer:
                        raise ValueError(answer["error"])
                    found = _version_digest(answer["files"], answer["regions"], answer["digests"])
                    if found != offer.digest:
                        raise ValueError(f"it sends the version {found}, and has offered {offer.digest}")
                    answers.append(answer)
                    ends.append(end)
            self._create(answers[0]["files"])
            threads = stack.enter_context(ThreadPoolExecutor(min(len(ends), _MOST_CLIENTS)))
            for _ in threads.map(self._receive, source.offers, ends, answers):
                pass

    def _create(self, files: Mapping[str, Sequence[Any]]) -> None:
        """Create the files that are missing, and write their headers."""
        os.makedirs(self._weights, mode=0o700, exist_ok=True)
        try:
            for file, (size, header) in files.items():
                handle = os.open(os.path.join(self._weights, file), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                with open(handle, "r+b") as out:
                    os.posix_fallocate(handle, 0, size)  # a write to memory that is missing would kill the process
                    out.write(bytes.fromhex(header))
        except OSError as error:
            needed = sum(size for size, _ in files.values())
            raise UserError(
                f"rollout.weight_sync=delta: {SHARED_MEMORY} of an engine's node has no room for the policy's weights, "
                f"{needed / 1e6:.1f} MB ({error.strerror}); make it larger (in a container: docker run --shm-size), or "
                "choose rollout.weight_sync=broadcast"
            ) from error

    def _receive(self, offer: RankOffer, end: socket.socket, answer: Mapping[str, Any]) -> None:
        """Receive the blocks of one rank, and write them to their places."""
        regions, digests, counts = answer["regions"], answer["digests"], answer["counts"]
        open_file = functools.cache(lambda file: np.memmap(os.path.join(self._weights, file), np.uint8, "r+"))
        with _fetching(offer):
            for (file, *place), digest, count in zip(regions[: len(counts)], digests, counts, strict=False):
                start, runs, size, stride, itemsize = place
                shape, strides = (runs, size // itemsize), (stride, itemsize)
                region = np.ndarray(shape, f"u{itemsize}", open_file(file), start, strides)
                block = region.reshape(-1)  # a copy if the region has gaps
                if count < 0:
                    _receive_into(end, block)
                    change = Change(-1, block[:0], block)
                else:
                    change = Change(count, np.empty(count, np.uint8), np.empty(count, block.dtype))
                    _receive_into(end, change.distances)
                    _receive_into(end, change.values)
                apply_change(block, change, digest)
                if runs > 1:
                    region[:] = block.reshape(shape)


@contextmanager
def _fetching(offer: RankOffer) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, AuthenticationError) as error:
        is_late = isinstance(error, BlockingIOError)  # of `_limit`
        reason = "it sends nothing any more" if is_late else describe_error(error)
        raise WorkerError(
            f"rollout.weight_sync=delta: the weights of the rank at {offer.address} have not arrived ({reason})",
            RESTART_HINT,
        ) from error


def _version_digest(files: Mapping[str, Any], regions: Sequence[Any], digests: Sequence[str]) -> str:
    """Return the digest of a rank's blocks: of the files that they belong to, their places, and their own digests."""
    return xxhash.xxh3_128_hexdigest(json.dumps([files, regions, digests]).encode())


# ---------------------------------------------------------------------------------------------------
# The wire: after a challenge of both sides, messages of a length and JSON, then plain bytes whose number is known


@contextmanager
def _connected(address: str, token: str, timeout_s: float) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), time_limits.NODE_ANSWER_S) as end:
        end.settimeout(None)
        _limit(end, timeout_s)  # also the wait for strangers who came first
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a node that is lost closes no connection
        for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            end.setsockopt(socket.IPPROTO_TCP, option, value)
        _authenticate(end, token, [answer_challenge, deliver_challenge])
        yield end


def _authenticate(end: socket.socket, token: str, steps: Sequence[Any]) -> None:
    with Pipe(os.dup(end.fileno())) as pipe:
        for step in steps:
            step(pipe, token.encode())


def _limit(end: socket.socket, timeout_s: float) -> None:
    """Let blocking reads and writes fail after this time. Unlike `settimeout`, it holds for copies of the socket."""
    seconds, rest = divmod(timeout_s, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(1e6 * rest)))


def _send_json(end: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    end.sendall(_LENGTH.pack(len(data)) + data)


def _receive_json(end: socket.socket) -> Any:
    length = bytearray(_LENGTH.size)
    _receive_into(end, length)
    data = bytearray(_LENGTH.unpack(length)[0])
    _receive_into(end, data)
    return json.loads(data)


def _bytes_of(data: Any) -> memoryview:
    return memoryview(data).cast("B") if len(data) else memoryview(b"")


def _receive_into(end: socket.socket, data: Any) -> None:
    """Fill `data` with what comes."""
    left = _bytes_of(data)
    while left:
        if not (received := end.recv_into(left)):
            raise EOFError("the other side has ended")
        left = left[received:]
