"""Keys of `logger.*`: names of runs in W&B, and that none of them changes a run."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.config import config_of
from trainer.config import LoggerConfig
from trainer.config.fields import resume_rules, walk_keys
from trainer.errors import UserError
from trainer.metrics.sinks import group_of


def test_a_run_has_its_name_in_wandb_and_no_group_outside_of_a_sweep():
    cfg = config_of(["trainer.run_name=mine"])
    assert (cfg.logger.name, cfg.logger.project, cfg.logger.services) == ("mine", "trainer", [])
    assert group_of(cfg.logger, {"trainer": {"run_name": "mine"}}) is None
    assert group_of(LoggerConfig(name="mine-lr=1"), {"trainer": {"run_name": "mine"}}) == "mine"
    assert config_of(["trainer.run_name=mine", "logger.name=other"]).logger.name == "other"


@pytest.mark.parametrize("section", ["mlflow", "trackio"])
def test_a_service_whose_package_is_missing_is_refused_with_the_extra_that_has_it(section, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as refused:
        config_of([f"logger={section}"])
    problem = f"the package {section} is missing; install the extra `{section}` (docs/install.md)"
    assert str(refused.value) == f"logger.services=['{section}']: {problem}"


@pytest.mark.parametrize("port", [0, 65536, -1])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(UserError, match=rf"logger.prometheus_port={port}: must be at "):
        config_of([f"logger.prometheus_port={port}"])


def test_a_run_within_a_run_has_no_service():
    logger = LoggerConfig(prometheus_port=9000, services=["wandb", "mlflow", "trackio"])
    assert logger.without_services() == LoggerConfig()


def test_a_resume_may_change_what_is_shown():
    changes = {key: rule.change for key, rule in resume_rules(config_of([])).items() if key.startswith("logger.")}
    assert changes == {f"logger.{key}": "harmless" for key, *_ in walk_keys(LoggerConfig())}
    assert {"logger.progress", "logger.services", "logger.sink.kwargs"} <= set(changes)
