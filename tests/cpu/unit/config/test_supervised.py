"""Keys of `sft.*`: the source of the examples, and what each source needs."""

from __future__ import annotations

from tests.cpu.unit.config.contradictions import test_contradictions_are_refused_in_one_sentence  # noqa: F401
from tests.support.config import config_of

CONTRADICTIONS = [
    (["sft.source=rollouts"], "sft.source=rollouts: needs data.train_files"),
    (["sft.min_reward=1"], "sft.min_reward=1.0: .*sft.source=rollouts"),
    (["sft.max_weight=2"], "sft.max_weight=2.0: .*sft.source=rollouts"),
]


def test_rollouts_may_be_filtered_and_weighed():
    files = ["data=files", "data.train_files=[a,b]", "data.val_files=[c]"]
    config_of([*files, "sft.source=rollouts", "sft.min_reward=1", "sft.max_weight=2"])
