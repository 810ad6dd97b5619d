"""Write and read sharded states with DCP in any storage: each rank writes one file, and reads ranges of bytes."""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from trainer.checkpoint.checkpoint_files import CheckpointFiles
from trainer.checkpoint.safe_dcp import SafeReader
from trainer.checkpoint.storage import Storage

_PARALLEL = 8
_GAP_BYTES = 1 << 20
"""Two ranges that are closer than this are read as one."""
_RANGE_BYTES = 64 << 20
"""A range that reaches this size takes no other in."""


class _FileSystem(FileSystemBase):
    """What DCP needs of a file system. It writes `.metadata` under another name and renames it: here it is put once."""

    def __init__(self, files: CheckpointFiles):
        self._files = files
        self._unnamed: dict[str, bytes] = {}
        self.fetched: IO[bytes] | None = None
        """The bytes that the next stream reads; None: the whole file."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        name = str(path)
        if mode == "rb":
            yield self.fetched or io.BytesIO(self._files.read(name))
        elif name.endswith(".tmp"):
            buffer = io.BytesIO()
            yield buffer
            self._unnamed[name] = buffer.getvalue()
        else:
            with self._files.open_writer(name) as stream:
                yield stream

    def concat_path(self, path: str | os.PathLike, suffix: str) -> str:
        return posixpath.join(str(path), suffix)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        self._files.write(str(new_path), self._unnamed.pop(str(path)))

    def init_path(self, path: str | os.PathLike) -> str:
        return str(path)

    def mkdir(self, path: str | os.PathLike) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def exists(self, path: str | os.PathLike) -> bool:
        return False  # a staging area is new

    def rm_file(self, path: str | os.PathLike) -> None:
        raise NotImplementedError


class ShardWriter(FileSystemWriter):
    """Writes one file a rank to a folder of `files`, which makes it durable."""

    def __init__(self, files: CheckpointFiles, folder: str):
        super().__init__(folder, single_file_per_rank=True, sync_files=False)
        self.fs, self.path = _FileSystem(files), folder  # type: ignore[assignment]


class RangeReader(SafeReader):
    """Reads the ranges of bytes that this rank needs, several at a time."""

    def __init__(self, storage: Storage, folder: str):
        super().__init__(folder)
        self._storage = storage
        self.fs, self.path = _FileSystem(CheckpointFiles(storage)), folder  # type: ignore[assignment]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        ranges = list(self.ranges(plan.items))
        with ThreadPoolExecutor(_PARALLEL) as pool:
            for first in range(0, len(ranges), _PARALLEL):  # a batch at a time, to bound the memory
                batch = ranges[first : first + _PARALLEL]
                for wanted, data in zip(batch, pool.map(self.fetch, batch), strict=True):
                    self.fill(wanted, data, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def fetch(self, wanted: ByteRange) -> bytes:
        """Return the bytes of a range."""
        return self._storage.get_range(f"{self.path}/{wanted.name}", wanted.start, wanted.end)

    def fill(self, wanted: ByteRange, data: bytes, planner: LoadPlanner) -> None:
        """Fill the tensors of a range from its bytes."""
        self.fs.fetched = _At(data, wanted.start)  # type: ignore[attr-defined]
        super().read_data(LoadPlan(wanted.items), planner)

    def ranges(self, items: list[ReadItem]) -> Iterator[ByteRange]:
        """Yield ranges of bytes that cover these items; neighbours are joined."""
        stored = [(self.storage_data[item.storage_index], item) for item in items]
        open_range: ByteRange | None = None
        for info, item in sorted(stored, key=lambda pair: (pair[0].relative_path, pair[0].offset)):
            end = info.offset + info.length
            if open_range is not None and open_range.takes(info.relative_path, info.offset):
                open_range.end = max(open_range.end, end)
                open_range.items.append(item)
            else:
                if open_range is not None:
                    yield open_range
                open_range = ByteRange(info.relative_path, info.offset, end, [item])
        if open_range is not None:
            yield open_range


class ByteRange:
    """Some bytes of a file, and the items in them."""

    def __init__(self, name: str, start: int, end: int, items: list[ReadItem]):
        self.name, self.start, self.end, self.items = name, start, end, items

    def takes(self, name: str, start: int) -> bool:
        """Return whether an item that starts there belongs to this range."""
        near = start <= self.end + _GAP_BYTES
        return name == self.name and (start < self.end or near and self.end - self.start < _RANGE_BYTES)


class _At(io.BytesIO):
    """Bytes of a file, at the positions that they have in the file."""

    def __init__(self, data: bytes, start: int):
        super().__init__(data)
        self._start = start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return super().seek(offset - self._start if whence == os.SEEK_SET else offset, whence) + self._start

    def tell(self) -> int:
        return super().tell() + self._start
