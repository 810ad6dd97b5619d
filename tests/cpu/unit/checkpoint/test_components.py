"""The parts of a checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from tests.support.checkpoints import manager, save
from tests.support.odd_files import ODD_JSON, config, replace, resume
from tests.support.runs import OpenRun
from trainer.checkpoint.components import (
    Restore,
    assets_component,
    config_component,
    files_component,
    is_allowed,
    json_component,
    models_component,
    read_config,
    start_weights_component,
)
from trainer.checkpoint.manifest import Checkpoint, CorruptCheckpointError, verify
from trainer.config import LOAD_COMPONENTS, Config, ModelConfig
from trainer.errors import UserError
from trainer.files.documents import dump_yaml, parse_yaml
from trainer.files.redaction import redact


def test_a_change_is_allowed_by_its_key_or_section_and_not_by_a_prefix_of_its_name():
    assert is_allowed("algorithm.kl_coef", ["algorithm.kl_coef"]) and is_allowed("algorithm.kl_coef", ["algorithm"])
    for near in ("algorithm.kl", "algo", "algorithm.kl_coef.x", "kl_coef"):
        assert not is_allowed("algorithm.kl_coef", [near]), near


@pytest.fixture
def checkpoint(tmp_path) -> Checkpoint:
    parts = [json_component(name, dict, lambda _: None) for name in NAMES]
    run = {"roles": ["policy"], "ranks": 1, "replicas": 1, "config_digest": "0", "score": None, "parent": None}
    return verify(save(manager(tmp_path), 1, parts, **run))


NAMES = ("config", "start_weights", "trainer_state", "data", "models", "huggingface", "ahead", "notes")


def test_the_parts_that_hold_the_restored_kinds_are_chosen(checkpoint, model):
    cfg = Config(model=ModelConfig(path=str(model)))
    extra = [json_component("ahead", dict, lambda _: None, kinds=("data",)), files_component("notes", dict)]
    parts = [
        config_component(cfg),
        start_weights_component(cfg, str(model)),
        json_component("trainer_state", dict, lambda _: None),
        json_component("data", dict, lambda _: None, kinds=("data",)),
        models_component(TrainWorkers()),
        assets_component({}),
        *extra,
    ]
    for kinds, names in (
        (LOAD_COMPONENTS, {"start_weights", "trainer_state", "data", "models", "ahead", "notes"}),
        (("weights",), {"start_weights", "models"}),
        (("optimizer", "rng"), {"models"}),
        (("data", "state"), {"trainer_state", "data", "ahead", "notes"}),
        (("data",), {"data", "ahead"}),
    ):
        chosen = Restore(frozenset(kinds)).chosen(parts, checkpoint)
        assert {part.name for part in chosen} == names | {"config"}, kinds


def test_a_part_that_another_kind_of_run_saves_is_left_out(checkpoint, caplog):
    caplog.set_level("INFO")
    later = files_component("later", dict, if_missing="has no notes: they begin empty")
    assert Restore().chosen([later, later], checkpoint) == []
    assert caplog.messages[-1] == f"{checkpoint.path} has no notes: they begin empty"


class TrainWorkers:
    """Records what is loaded."""

    saved_roles = ["policy", "critic"]

    def __init__(self) -> None:
        self.loaded: list[tuple] = []

    def load(self, role, files, what, steps_added=0) -> None:
        self.loaded.append((role, files.directory, what, steps_added))


def test_models_are_restored_by_role(checkpoint, caplog):
    caplog.set_level("INFO")
    restore = Restore(frozenset({"weights", "data"}), fork=True, added_steps={"policy": 3})
    ranks = TrainWorkers()
    models_component(ranks).load(checkpoint, restore)
    assert ranks.loaded == [("policy", checkpoint.path, {"weights"}, 3)]
    assert caplog.messages[-1] == "the checkpoint holds no critic: it starts from scratch"


def test_a_checkpoint_without_a_part_is_refused(checkpoint, tmp_path):
    with pytest.raises(UserError, match="the checkpoint has no ledger; it holds config, start_weights"):
        manager(tmp_path).load(checkpoint, [json_component("ledger", dict, lambda _: None)])


DEEP_YAML = "a: " + "[" * 5_000 + "]" * 5_000


def test_a_state_of_another_shape_is_refused(run_dir, capsys):
    checkpoint = run_dir / "checkpoints/global_step_2"
    for content in ODD_JSON:
        replace(checkpoint, "trainer_state.json", content)
        verify(str(checkpoint))
        assert "global_step_2: trainer_state.json is damaged" in str(resume(run_dir)), content[:20]


ODD_YAML = [
    "", "text", "- 1", "3", "a: 1", "trainer: text", "algorithm: null", "a: [", "a: !!python/object:os.system x",
    "a: !!timestamp x", "a: 2020-99-99", "a: !!int x", "a: !!bool x", "a: &x {b: *x}", "a: &x {}\nb: *x", DEEP_YAML,
    "\0", "? [1]\n: 2", "a: !!binary x", "a: !!float ''", "%YAML 9",
]  # fmt: skip


def test_a_config_that_is_no_mapping_of_sections_is_refused(run_dir, capsys):
    checkpoint = run_dir / "checkpoints/global_step_2"
    for number, text in enumerate(ODD_YAML):
        replace(checkpoint, "config.yaml", text.encode())
        with pytest.raises(CorruptCheckpointError, match="global_step_2: config.yaml is damaged"):
            read_config(verify(str(checkpoint)))
        if number % 7 == 0:
            assert "global_step_2: config.yaml is damaged" in str(resume(run_dir)), text[:20]


def test_the_config_of_a_run_is_read_as_it_was_written():
    text = dump_yaml(redact(asdict(Config())))
    assert parse_yaml(text) == yaml.safe_load(text)


def test_a_model_with_several_templates_is_saved_with_all_of_them(tmp_path):
    with OpenRun(config(tmp_path)) as run:
        run.components = [assets_component({"additional_chat_templates/tool_use.jinja": b"x"})]
        run.save(1)
        saved = Path(
            run.directory.checkpoints.store.path(1), "policy/huggingface/additional_chat_templates/tool_use.jinja"
        )
        assert saved.read_text() == "x"
