"""How weights reach the engines, by setting, engine, device and node."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support import plain_engine
from tests.support.plain_pool import answers
from trainer.config import RolloutConfig
from trainer.config.engines import ENGINES, EngineSpec
from trainer.config.schema import walk_keys, with_sections
from trainer.errors import UserError
from trainer.generation.transport import TRANSPORTS, SharedMemoryTransport, choose_transport


@pytest.fixture
def files_engine(monkeypatch) -> None:
    """An engine of the user that reads files and nothing else."""
    monkeypatch.setitem(ENGINES, "files", EngineSpec(path="my_engine:Engine"))


@pytest.mark.parametrize(
    ("setting", "engine", "same_node", "transport"),
    [
        ("auto", "vllm", True, "shared_memory"),
        ("auto", "transformers", True, "shared_memory"),
        ("auto", "vllm", False, "delta"),
        ("auto", "transformers", False, "delta"),
        ("broadcast", "vllm", True, "broadcast"),
        ("shared_memory", "vllm", True, "shared_memory"),
        ("auto", "server", False, "delta"),
        ("delta", "transformers", True, "delta"),
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
        ("delta", "files", False, False, "cpu"),
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
    """Shared memory, and how many processes of engines there are."""

    def meet(self, receivers, colocated):
        self.met = receivers


def test_a_new_way_is_one_entry_of_the_table(start, monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "counting", CountingTransport)
    monkeypatch.setitem(ENGINES, "plain", dataclasses.replace(plain_engine.SPEC, transports=("counting",)))
    pool, ranks = start(num_engines=2)
    pool.start(version=1, is_initial=True)
    assert pool._transport.met == 2
    ranks.call("policy", "train")
    pool.sync_weights(2)
    assert answers(pool) == [[0, 7, 1], [1, 7, 1]]


def test_the_choices_of_the_key_are_those_of_the_table():
    (choices,) = [rule.choices for key, _, rule in walk_keys(with_sections()) if key == "rollout.weight_sync"]
    assert set(choices) == {"auto", *TRANSPORTS}
    assert all(set(spec.transports) <= set(TRANSPORTS) for spec in ENGINES.values())
