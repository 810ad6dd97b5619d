"""Files that ranks write together: their layout, and that safetensors reads what was written."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.ranks import run_ranks
from trainer.models.export_weights import export_tensors, in_groups, plan_layout, write_safetensors
from trainer.workers.rank import Rank

TENSORS = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "b": torch.arange(5),
    "c": torch.tensor(True),
    "empty": torch.zeros(0, 3),
}


class Module(nn.Module):
    """Weights that are tied, sharded by rows and by columns, and replicated; and buffers."""

    def __init__(self, mesh=None):
        super().__init__()
        self.rows = nn.Parameter(torch.arange(15.0).view(5, 3))
        self.columns = nn.Parameter(torch.arange(14.0).view(2, 7))
        self.bias = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.tied = self.rows
        self.register_buffer("steps", torch.tensor([1, 2]))
        self.register_buffer("cache", torch.ones(9), persistent=False)
        if mesh is not None:
            for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("bias", Replicate())):
                split = distribute_tensor(getattr(self, name).detach(), mesh, [placement])
                setattr(self, name, nn.Parameter(split, requires_grad=False))
            self.tied = self.rows


def write(rank: Rank, directory: str) -> list[str]:
    return write_safetensors(Module(rank.layout.fsdp_mesh), directory, torch.bfloat16)


def test_tied_weights_are_exported_once_and_caches_not_at_all():
    assert list(export_tensors(Module())) == ["rows", "columns", "bias", "steps"]


@pytest.mark.parametrize("most", [10**9, 40])
def test_the_layout_is_a_file_of_safetensors(tmp_path, most):
    """Each tensor at its offset."""
    layout = plan_layout(TENSORS, most)
    assert len(layout.headers) == (1 if most > 40 else 3)
    layout.create(str(tmp_path))
    with layout.opened(str(tmp_path)) as write:
        for name, tensor in TENSORS.items():
            write(name, (0,) * tensor.dim(), tensor)
    for file, header in layout.headers.items():
        assert len(header) % 8 == 0, "data begins at a multiple of 8"
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118, it is not a dict
                tensor, entry = opened.get_tensor(name), layout.entries[name]
                assert (entry.file, entry.shape, entry.dtype) == (file, tuple(tensor.shape), tensor.dtype)
                assert torch.equal(tensor, TENSORS[name])
    assert list(layout.entries) == list(TENSORS)


def test_tensors_are_split_over_files_in_order(tmp_path):
    sizes = {"a": 3, "b": 4, "c": 20, "d": 1, "e": 9}
    assert in_groups(sizes, 10) == [["a", "b"], ["c"], ["d", "e"]]
    layout = plan_layout(TENSORS, 48)
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    layout.create(str(tmp_path))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"].items()) == [("a.weight", first), *((name, second) for name in ("b", "c", "empty"))]
    assert index["metadata"] == {"total_size": 48 + 40 + 1}


def test_shards_of_ranks_are_written_at_their_places(tmp_path):
    names = run_ranks(2, write, str(tmp_path / "out"))
    assert names == [["model.safetensors"]] * 2
    found, plain = load_file(tmp_path / "out/model.safetensors"), Module()
    assert set(found) == {"rows", "columns", "bias", "steps"}
    for name in ("rows", "columns", "bias"):
        assert torch.equal(found[name], getattr(plain, name).bfloat16()), name
    assert torch.equal(found["steps"], plain.steps)
    assert not (tmp_path / "out/model.safetensors.index.json").exists()


def test_no_file_is_written_through_a_link(tmp_path):
    """The directory may be one that others can write to."""
    secret = tmp_path / "secret"
    secret.write_text(json.dumps("unchanged"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model.safetensors").symlink_to(secret)
    with pytest.raises(OSError, match="symbolic links"):
        run_ranks(1, write, str(tmp_path / "out"))
    assert secret.read_text() == '"unchanged"'
