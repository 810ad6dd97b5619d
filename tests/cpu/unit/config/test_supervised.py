"""Keys of `sft.*` and `dpo.*`: the source of the examples and what it needs, and options that a loss does not read."""

from __future__ import annotations

from tests.cpu.unit.config.contradictions import test_contradictions_are_refused_in_one_sentence  # noqa: F401
from tests.support.config import config_of

DPO = ("trainer.task=dpo", "data=files", "data.train_files=[a]", "trainer.val_interval=-1")
CONTRADICTIONS = [
    (["sft.source=rollouts"], "sft.source=rollouts: needs data.train_files"),
    (["sft.min_reward=1"], "sft.min_reward=1.0: .*sft.source=rollouts"),
    (["sft.max_weight=2"], "sft.max_weight=2.0: .*sft.source=rollouts"),
    (
        [*DPO, "dpo.loss_type=ipo", "dpo.label_smoothing=0.1"],
        "dpo.label_smoothing=0.1: dpo.loss_type=ipo does not",
    ),
    ([*DPO, "dpo.loss_type=exo_pair"], "dpo.label_smoothing=0.0: exo_pair needs it"),
    ([*DPO, "dpo.simpo_gamma=1"], "dpo.simpo_gamma=1.0: dpo.loss_type=sigmoid does not read it; .*choose simpo"),
]


def test_rollouts_may_be_filtered_and_weighed():
    files = ["data=files", "data.train_files=[a,b]", "data.val_files=[c]"]
    config_of([*files, "sft.source=rollouts", "sft.min_reward=1", "sft.max_weight=2"])
    assert len(config_of([*DPO, "dpo.loss_type=ipo"]).roles) == 2
    assert len(config_of([*DPO, "dpo.loss_type=simpo", "dpo.simpo_gamma=1"]).roles) == 1, "no reference"
