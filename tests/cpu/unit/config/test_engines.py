"""The table of engines names classes that exist, and ways of syncing that can be chosen."""

from __future__ import annotations

import pytest

from trainer.config import ENGINES, Config
from trainer.config.engines import engines_with
from trainer.config.fields import walk_keys
from trainer.import_utils import import_function


@pytest.mark.parametrize("name", ENGINES)
def test_the_path_of_an_engine_is_a_class_that_generates(name):
    engine = import_function(ENGINES[name].path, "rollout.engine")
    assert isinstance(engine, type) and callable(engine.generate) and callable(engine.sync_weights)


@pytest.mark.parametrize("name", ENGINES)
def test_transports_are_choices_of_weight_sync(name):
    rules = {key: rule for key, _, rule in walk_keys(Config())}
    assert set(ENGINES[name].transports) <= set(rules["rollout.weight_sync"].choices) - {"auto"}
    assert rules["rollout.engine"].choices == tuple(ENGINES)


def test_engines_with_a_feature_are_listed():
    assert engines_with("tensor_parallel") == engines_with("max_lora_rank") == "vllm"
    assert engines_with("path") == "vllm or transformers"
