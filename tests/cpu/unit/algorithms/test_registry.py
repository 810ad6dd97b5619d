"""Names of algorithms, in the config and in the documents."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from trainer.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    aggregate,
    kl_penalty,
    overlong_penalty,
    resolve,
)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
    with pytest.raises(ValueError, match="token_mean"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1), "mean")
    with pytest.raises(ValueError, match="algorithm.policy_loss=magic: choose one of clip, gspo"):
        resolve(POLICY_LOSSES, "magic", "algorithm.policy_loss")
    with pytest.raises(ValueError, match="algorithm.policy_loss=no.such:thing: cannot be imported"):
        resolve(POLICY_LOSSES, "no.such:thing", "algorithm.policy_loss")
    assert resolve(POLICY_LOSSES, "math:exp", "algorithm.policy_loss") is math.exp
    with pytest.raises(ValueError, match="overlong_buffer=0"):
        overlong_penalty(torch.tensor([3]), 10, 0, 1.0)
    with pytest.raises(ValueError, match="dual_clip=0.5"):
        POLICY_LOSSES["clip"](*(torch.ones(1, 1),) * 4, dual_clip=0.5)


def test_every_name_has_its_section():
    text = (Path(__file__).resolve().parents[4] / "docs/algorithms.md").read_text()
    sections = set(re.findall(r"^#+ .*?`([\w+]+)`", text, flags=re.MULTILINE))
    sections |= set(re.findall(r"`([\w+]+)`", " ".join(re.findall(r"^#+ .*$", text, flags=re.MULTILINE))))
    names = {
        *ADVANTAGES,
        *POLICY_LOSSES,
        *AGGREGATIONS,
        *KL_ESTIMATORS,
        *CORRECTIONS,
        "fixed",
        "adaptive",
        "overlong_penalty",
        "informative_groups",
    }
    assert names <= sections, sorted(names - sections)
