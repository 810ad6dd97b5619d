"""The table of engines names classes that exist, and ways of syncing that can be chosen."""

from __future__ import annotations

import pytest

from tests.support.config import config_of
from trainer.config import ENGINES, EngineSpec
from trainer.config.engines import engines_with, find_engine
from trainer.errors import UserError
from trainer.generation.engine import BUILT_IN
from trainer.import_utils import import_function


@pytest.mark.parametrize("name", ENGINES)
def test_a_built_in_engine_has_a_class_that_generates(name):
    engine = import_function(BUILT_IN[ENGINES[name].path], "rollout.engine")
    assert isinstance(engine, type) and callable(engine.generate) and callable(engine.sync_weights)


def test_engines_with_a_feature_are_listed():
    assert engines_with("tensor_parallel") == engines_with("max_lora_rank") == "vllm"
    assert engines_with("path") == "vllm or transformers or server"


MODULE = """
from trainer.config import EngineSpec

class Engine:
    def __init__(self, *arguments):
        self.arguments = arguments

    def generate(self, requests): ...

    sync_weights = set_version = sleep = wake = shutdown = generate

class Half(Engine):
    wake = None

SPEC = EngineSpec("my_engines:Engine", gpus=False)
NUMBER = int
text = "no engine"
def function(): ...
"""


def test_an_engine_of_the_user_is_named_by_the_path_of_its_class_or_spec(tmp_path, monkeypatch):
    (tmp_path / "my_engines.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_engine("my_engines:Engine") == EngineSpec("my_engines:Engine")
    assert not find_engine("my_engines:SPEC").gpus
    for name, problem in (("text", "has no function text"), ("function", "is a function; it must be an EngineSpec")):
        with pytest.raises(UserError, match=f"rollout.engine=my_engines:{name}: .*{problem}"):
            config_of([f"rollout.engine=my_engines:{name}"])
    with pytest.raises(UserError, match="rollout.engine=my_engines:Half: the class has no method wake; an engine has"):
        config_of(["rollout.engine=my_engines:Half"])
    with pytest.raises(UserError, match="rollout.colocate=True: rollout.engine=my_engines:SPEC takes no GPUs"):
        config_of(["rollout.engine=my_engines:SPEC", "rollout.colocate=true"])
