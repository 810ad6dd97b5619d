"""Where the members of a process group meet, and who else could reach them there."""

from __future__ import annotations

import socket
import sys
from importlib.metadata import version

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import local_cluster, start_ranks
from trainer.config import Config
from trainer.config.engines import ENGINES
from trainer.errors import UserError
from trainer.parallel.mesh import listen, open_store, pick_device
from trainer.workers.rank import Rank


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("inet")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


def test_a_store_listens_only_on_the_given_interface():
    before = listening()
    address = listen("127.0.0.1")
    with pytest.raises(OSError):
        listen("127.0.0.1", int(address.rpartition(":")[2]))
    host = open_store(address, is_host=True, world_size=1, timeout_s=30)
    assert listening() - before == {("127.0.0.1", int(address.rpartition(":")[2]))}
    member = open_store(address, is_host=False, world_size=1, timeout_s=30)
    member.set("name", "value")
    assert host.get("name") == b"value"


def test_a_file_store_opens_no_port(tmp_path):
    before = listening()
    stores = [open_store(f"file://{tmp_path}/store", is_host, 2, timeout_s=30) for is_host in (True, False)]
    stores[1].set("name", "value")
    assert stores[0].get("name") == b"value"
    assert stores[0].add("receivers", 1) == 1 and stores[1].add("receivers", 1) == 2
    assert listening() == before


@pytest.mark.parametrize("engine", [None, "vllm", "transformers"])
def test_auto_uses_a_gpu_unless_the_installed_engine_cannot(engine, monkeypatch):
    """These tests run with vLLM's CPU build."""
    spec = ENGINES[engine] if engine else None
    assert pick_device("auto", spec) == "cpu"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert pick_device("auto", spec) == ("cpu" if engine == "vllm" else "cuda")
    assert pick_device("cuda", spec) == "cuda"


def test_a_torchvision_of_another_build_is_refused_in_one_sentence(tmp_path, monkeypatch):
    """By its metadata; it is imported only if they do not tell, because that takes seconds."""
    broken = "import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n"
    (tmp_path / "torchvision.py").write_text(
        f"{broken}raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    metadata = tmp_path / "torchvision-0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    own, _, build = version("torch").partition("+")
    assert build == "cpu", "these tests run with torch's CPU build"

    def found(number: str, needed: str = own) -> str:
        lines = ("Metadata-Version: 2.1", "Name: torchvision", f"Version: {number}", f"Requires-Dist: torch=={needed}")
        metadata.write_text("\n".join(lines))
        try:
            pick_device("cpu", None)
        except UserError as error:
            assert "uninstall it with `pip uninstall torchvision`" in str(error)
            return str(error)
        return ""

    assert "0.1+cpu is for torch 1.0, and torch is" in found("0.1+cpu", "1.0")
    assert found("0.1+cpu") == "" and not (tmp_path / "imported").exists()
    for other in ("0.1", "0.1+cu130"):
        assert "torchvision::nms does not exist" in found(other)


def _sum(rank: Rank) -> tuple[float, set[str]]:
    tensor = torch.tensor([rank.rank + 1.0])
    dist.all_reduce(tensor)
    hosts = {ip for ip, _ in listening()}
    dist.barrier()
    return float(tensor), hosts


@pytest.mark.parametrize("kind", ["file", "port"])
def test_ranks_meet_and_compute_over_loopback(kind, tmp_path):
    if kind == "file":
        address = f"file://{tmp_path}/store"
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
    with local_cluster(2, Config(), "cpu") as cluster:
        ranks = start_ranks(cluster, {"GLOO_SOCKET_IFNAME": "lo"})
        assert ranks.call("run", address, _sum, ()) == [(3.0, {"127.0.0.1"})] * 2
