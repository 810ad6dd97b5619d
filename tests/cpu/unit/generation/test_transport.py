"""How weights reach the engines, by setting, engine, device and node."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support import plain_engine
from tests.support.plain_pool import answers
from trainer.config import RolloutConfig
from trainer.config.engines import ENGINES, TRANSPORTS, EngineSpec, TransportSpec, find_transport
from trainer.errors import UserError
from trainer.generation.transport import SharedMemoryTransport, choose_transport, name_of


@pytest.fixture
def files_engine(monkeypatch) -> None:
    """An engine of the user that reads files and nothing else."""
    monkeypatch.setitem(ENGINES, "files", EngineSpec(path="my_engine:Engine"))


@pytest.mark.parametrize(
    ("setting", "engine", "same_node", "transport"),
    [
        ("auto", "vllm", True, "shared_memory"),
        ("auto", "transformers", True, "shared_memory"),
        ("auto", "vllm", False, "broadcast"),
        ("auto", "transformers", False, "broadcast"),
        ("broadcast", "vllm", True, "broadcast"),
        ("shared_memory", "vllm", True, "shared_memory"),
    ],
)
def test_the_transport_follows_from_setting_and_place(setting, engine, same_node, transport):
    assert choose_transport(RolloutConfig(engine=engine, weight_sync=setting), same_node) == transport


@pytest.mark.parametrize("same_node", [True, False])
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
@pytest.mark.parametrize(("colocate", "transport"), [(False, "broadcast"), (True, "ipc")])
def test_weights_stay_on_gpus(engine, colocate, same_node, transport):
    rollout = RolloutConfig(engine=engine, colocate=colocate)
    assert choose_transport(rollout, same_node, device="cuda") == transport


@pytest.mark.usefixtures("files_engine")
@pytest.mark.parametrize("colocate", [True, False])
def test_engines_that_read_files_get_files_on_gpus_too(colocate):
    rollout = RolloutConfig(engine="files", colocate=colocate)
    assert choose_transport(rollout, same_node=True, device="cuda") == "shared_memory"


@pytest.mark.usefixtures("files_engine")
@pytest.mark.parametrize(
    ("setting", "engine", "same_node", "colocate", "device"),
    [
        ("shared_memory", "vllm", False, False, "cpu"),
        ("auto", "files", False, False, "cpu"),
        ("broadcast", "files", True, False, "cpu"),
        ("broadcast", "vllm", True, True, "cuda"),
        ("auto", "files", False, True, "cuda"),
        ("ipc", "files", True, True, "cuda"),
        ("ipc", "vllm", True, True, "cpu"),
        ("ipc", "vllm", True, False, "cuda"),
    ],
)
def test_transports_that_cannot_work_are_refused(setting, engine, same_node, colocate, device):
    rollout = RolloutConfig(engine=engine, weight_sync=setting, colocate=colocate)
    with pytest.raises(UserError, match="rollout.weight_sync="):
        choose_transport(rollout, same_node, device)


class CountingTransport(SharedMemoryTransport):
    """A way of the user: shared memory, and where the engines are."""

    def meet(self, engines):
        self.met = list(engines)


def assert_two_engines_follow(start) -> None:
    """Check that new weights reach both engines through `CountingTransport`."""
    pool, ranks = start(num_engines=2)
    pool.start(version=1, is_initial=True)
    assert pool._transport.met == [0, 1]
    ranks.call("policy", "train")
    pool.sync_weights(2)
    assert answers(pool) == [[0, 7, 1], [1, 7, 1]]


def test_a_new_way_is_one_entry_of_the_table(start, monkeypatch):
    spec = TransportSpec(f"{__name__}:CountingTransport", suits=lambda place: place.same_node, problem=lambda _: None)
    monkeypatch.setitem(TRANSPORTS, "counting", spec)
    monkeypatch.setitem(ENGINES, "plain", dataclasses.replace(plain_engine.SPEC, transports=("counting",)))
    assert_two_engines_follow(start)


@pytest.mark.parametrize("way", [f"{__name__}:OWN", f"{__name__}:CountingTransport"])
@pytest.mark.parametrize("setting", ["auto", "named"])
def test_an_engine_of_the_user_names_a_way_of_its_own(monkeypatch, way, setting):
    by_path = dataclasses.replace(plain_engine.SPEC, transports=("shared_memory", way))
    by_value = dataclasses.replace(plain_engine.SPEC, transports=(find_transport(way), "shared_memory"))
    for spec in (by_path, by_value):
        monkeypatch.setitem(ENGINES, "server", spec)
        chosen = RolloutConfig(engine="server", weight_sync=way if setting == "named" else "auto")
        found = choose_transport(chosen, same_node=True)
        assert find_transport(found) == find_transport(way) and name_of(found) in (way, find_transport(way).path)


OWN = TransportSpec(f"{__name__}:CountingTransport", problem=lambda place: None if place.same_node else "use one node")


def test_a_way_of_the_user_that_cannot_work_is_refused(monkeypatch):
    monkeypatch.setitem(ENGINES, "server", dataclasses.replace(plain_engine.SPEC, transports=(OWN,)))
    rollout = RolloutConfig(engine="server")
    with pytest.raises(UserError, match=f"rollout.weight_sync={OWN.path}: use one node"):
        choose_transport(rollout, same_node=False)
    way = f"{__name__}:OWN"
    sentence = (
        f"{way}: rollout.engine=transformers takes weights through shared_memory or .*; choose one of these, or auto"
    )
    with pytest.raises(UserError, match=sentence):
        choose_transport(RolloutConfig(engine="transformers", weight_sync=way), same_node=True)


def test_weights_travel_a_way_of_the_user(start, monkeypatch):
    monkeypatch.setitem(ENGINES, "plain", dataclasses.replace(plain_engine.SPEC, transports=(OWN,)))
    assert_two_engines_follow(start)
