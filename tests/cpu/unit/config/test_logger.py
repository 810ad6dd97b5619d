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


def test_prometheus_gets_a_port_of_the_loopback_interface_or_another_address():
    for address in ("0", "65536", "-1", "here", "0.0.0.0:"):
        with pytest.raises(UserError, match=f"logger.prometheus={address}: must be a port"):
            config_of([f"logger.prometheus='{address}'"])
    for given, address in (("9400", "127.0.0.1"), ("0.0.0.0:9400", "0.0.0.0"), ("[::1]:9400", "::1")):
        assert config_of([f"logger.prometheus='{given}'"]).logger.prometheus_address == (address, 9400)
    assert config_of(["logger.prometheus=9400"]).logger.prometheus == "9400"


def test_a_service_is_a_name_or_an_import_path():
    assert config_of(["logger.services=[tensorboard,'mine:Sink']"]).logger.sinks == ["mine:Sink"]
    with pytest.raises(UserError, match=r"logger.services=.*: choose from wandb, .*, or an import path"):
        config_of(["logger.services=[wanb]"])


def test_a_resume_may_change_what_is_shown():
    changes = {key: rule.change for key, rule in resume_rules(config_of([])).items() if key.startswith("logger.")}
    assert changes == {f"logger.{key}": "harmless" for key, *_ in walk_keys(LoggerConfig())}
    assert {"logger.plot", "logger.services"} <= set(changes)
