"""Loading shards executes nothing that they hold."""

from __future__ import annotations

import enum
import io
import os
import pickle
import shutil
import struct

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties, TensorStorageMetadata

from tests.support.ranks import run_ranks
from trainer.checkpoint.sharded import ShardedFiles
from trainer.checkpoint.tensors import load_metadata, read_head
from trainer.errors import UserError


class Malice:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_malicious_pickle_is_refused_and_not_executed(real_checkpoints, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(real_checkpoints, root)
    executed = tmp_path / "executed"
    metadata = root / "global_step_2/policy/.metadata"
    metadata.write_bytes(pickle.dumps(Malice(str(executed))))
    tensors = {"w": torch.zeros(8), "lr": 0.0}
    with pytest.raises(UserError, match="mkdir.*not executed"):
        ShardedFiles(str(root / "global_step_2")).read("policy", tensors)
    assert not executed.exists()


def test_a_malicious_value_among_the_shards_is_not_executed(tmp_path):
    executed = tmp_path / "executed"
    run_ranks(1, write_malice, str(tmp_path), str(executed))
    tensors = {"lr": 0.0}
    with pytest.raises(UserError, match="cannot be loaded"):
        ShardedFiles(str(tmp_path)).read("policy", tensors)
    assert not executed.exists()


def test_a_malicious_tensor_among_the_shards_is_not_executed(tmp_path):
    def entry(name: bytes, content: bytes) -> bytes:
        return b"PK\3\4" + bytes(22) + struct.pack("<HH", len(name), 0) + name + content

    executed = tmp_path / "executed"
    described = pickle.dumps(Malice(str(executed)), protocol=2)
    head = (
        entry(b"archive/data.pkl", described) + entry(b"archive/byteorder", b"little") + entry(b"archive/data/0", b"")
    )
    with pytest.raises(UserError, match="mkdir.*not executed"):
        read_head(head)
    assert not executed.exists()


def write_malice(rank, directory: str, executed: str) -> None:
    ShardedFiles(directory).write("policy", {"lr": Malice(executed)}, {}, dist.group.WORLD)


def test_a_description_of_shards_cannot_name_files_outside_of_its_directory(real_checkpoints):
    with open(real_checkpoints / "global_step_2/policy/.metadata", "rb") as file:
        metadata = load_metadata(file)
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = type(info)("../../elsewhere.distcp", info.offset, info.length)
    with pytest.raises(UserError, match="elsewhere"):
        load_metadata(io.BytesIO(pickle.dumps(metadata)))


NAMES = [
    "os:system",
    "posix:system",
    "builtins:eval",
    "builtins:getattr",
    "importlib:import_module",
    "copyreg:_reconstructor",
    "__main__:x",
    "torch:load",
    "torch:save",
    "torch:compile",
    "torch:Tensor",
    "torch:ops",
    "torch:hub.load",
    "torch:classes.load_library",
    "torch:os.system",
    "torch:serialization.load",
    "torch:float32.__class__",
    "torch:Size.__reduce__",
    "torch:Size.__class__",
    "torch:storage.load",
    "torch.serialization:load",
    "torch.serialization:os.system",
    "torch.serialization:_get_layout.__globals__",
    "torch.storage:_load_from_bytes",
    "torch.hub:load",
    "torch.jit:load",
    "torch.utils.cpp_extension:load",
    "torch.distributed.checkpoint.metadata:os.system",
    "torch.distributed.checkpoint.metadata:pickle.loads",
    "torch.distributed.checkpoint.metadata:Metadata.__init__.__globals__",
    "torch.distributed.checkpoint.filesystem:os.system",
    "torch.distributed.checkpoint.filesystem:_StorageInfo.mro",
    "collections:OrderedDict.fromkeys",
    "collections:namedtuple",
    "collections:_sys.modules",
    "pathlib:os.system",
    "pathlib:io.open",
    "pathlib:Path.home",
    "pathlib:PosixPath.write_text",
    "trainer.checkpoint.tensors:torch.load",
]


def call(protocol: int, module: str, name: str) -> bytes:
    """A pickle that calls `module.name("x")`."""
    if protocol == 2:
        return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"X\x01\x00\x00\x00x\x85R."
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    return b"\x80\x04" + words + b"\x93\x8c\x01x\x85R."


def test_names_that_no_checkpoint_needs_are_not_looked_up():
    for name in NAMES:
        for protocol in (2, 4):
            with pytest.raises(UserError, match="which no checkpoint needs; it was not executed"):
                load_metadata(io.BytesIO(call(protocol, *name.split(":"))))


ENCODING = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"


def test_enum_members_pickled_by_early_python_3_11_load():
    class OlderPickler(pickle.Pickler):
        def reducer_override(self, value):
            return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented

    properties = TensorProperties(dtype=torch.float32)
    tensor = TensorStorageMetadata(properties=properties, size=torch.Size([2]), chunks=[])
    written = io.BytesIO()
    OlderPickler(written).dump(Metadata({"x": tensor}, storage_data={}, storage_meta=StorageMeta()))
    assert b"getattr" in written.getvalue()
    written.seek(0)
    assert load_metadata(written).state_dict_metadata["x"] == tensor


def test_getattr_reaches_only_members_of_the_enum():
    owners = [(ENCODING, name) for name in ("__class__", "mro", "_member_map_")]
    for owner, name in [*owners, (b"ctorch\nSize\n", "__add__"), (b"cpathlib\nPosixPath\n", "home")]:
        word = b"X" + len(name).to_bytes(4, "little") + name.encode()
        with pytest.raises(UserError, match="which no checkpoint needs; it was not executed"):
            load_metadata(io.BytesIO(b"\x80\x02cbuiltins\ngetattr\n" + owner + word + b"\x86R."))
