"""The table of transports names classes that exist, and is what can be chosen."""

from __future__ import annotations

import pytest

from trainer.config import Config
from trainer.config.fields import walk_keys
from trainer.config.transports import ADAPTER, TRANSPORTS
from trainer.generation.transport import Transport
from trainer.import_utils import import_function


@pytest.mark.parametrize("spec", [*TRANSPORTS.values(), ADAPTER], ids=[*TRANSPORTS, "adapter"])
def test_the_path_of_a_transport_is_a_class_with_its_methods(spec):
    found = import_function(spec.path, "rollout.weight_sync")
    assert {name for name in vars(Transport) if not name.startswith("_")} <= set(dir(found))


def test_every_transport_can_be_chosen():
    rules = {key: rule for key, _, rule in walk_keys(Config())}
    assert rules["rollout.weight_sync"].choices == ("auto", *TRANSPORTS)
