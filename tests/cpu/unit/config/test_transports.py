"""The table of transports names classes that exist, and is what can be chosen."""

from __future__ import annotations

import pytest

from trainer.config import Config
from trainer.config.engines import ADAPTER, TRANSPORTS, TransportSpec, find_transport
from trainer.config.rules import check_rollout
from trainer.errors import UserError
from trainer.generation.transport import BUILT_IN, Transport


@pytest.mark.parametrize("spec", [*TRANSPORTS.values(), ADAPTER], ids=[*TRANSPORTS, "adapter"])
def test_a_built_in_transport_has_a_class_with_its_methods(spec):
    assert {name for name in vars(Transport) if not name.startswith("_")} <= set(dir(BUILT_IN[spec.path]))


OWN = TransportSpec("my_server:Http")


@pytest.mark.parametrize("name", ["auto", *TRANSPORTS, f"{__name__}:OWN", f"{__name__}:Http"])
def test_every_transport_can_be_chosen(name):
    cfg = Config()
    cfg.rollout.weight_sync = name
    check_rollout(cfg)


class Http(Transport):
    """A way of the user."""


def test_a_transport_of_the_user_has_an_import_path():
    assert find_transport(f"{__name__}:OWN") is OWN and find_transport(OWN) is OWN
    assert find_transport(f"{__name__}:Http") == TransportSpec(f"{__name__}:Http")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("http", "choose one of auto, ipc, broadcast, shared_memory, or an import path"),
        (f"{__name__}:test_every_transport_can_be_chosen", "is a function; it must be a TransportSpec"),
    ],
)
def test_what_is_no_transport_is_refused(name, problem):
    cfg = Config()
    cfg.rollout.weight_sync = name
    with pytest.raises(UserError, match=f"rollout.weight_sync={name}: {problem}"):
        check_rollout(cfg)
