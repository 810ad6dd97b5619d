"""Which groups in flight a step has taken, as a file of the journal: a resumed run takes the same ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from trainer.data.ledger import SampleIndex
from trainer.files.documents import is_count, parse_object

_SHAPE: dict[Any, Any] = {
    "history": str,
    "config": str,
    "groups": [
        {
            "row": {"dataset": is_count, "epoch": is_count, "index": is_count},
            "records": {str: {"version": is_count, "history": str}},
        }
    ],
}


@dataclass(frozen=True)
class TakenGroup:
    """A group that a step has taken."""

    row: SampleIndex
    records: Mapping[str, tuple[int, str]]
    """By the key of each record, that of its episodes and that of its baseline: version and history (`Journal.add`)."""


@dataclass(frozen=True)
class TakenGroups:
    """What a step has taken.

    Args:
        history: of the weights that the step begins with.
        config: digest of the settings that decide rollouts and rewards.
    """

    history: str
    config: str
    groups: Sequence[TakenGroup]

    def encode(self) -> bytes:
        groups = [
            {
                "row": dict(zip(("dataset", "epoch", "index"), astuple(group.row), strict=True)),
                "records": {
                    key: {"version": version, "history": history} for key, (version, history) in group.records.items()
                },
            }
            for group in self.groups
        ]
        return json.dumps({"history": self.history, "config": self.config, "groups": groups}).encode()

    @classmethod
    def decode(cls, data: bytes) -> TakenGroups:
        """Return what a file says.

        Raises:
            ValueError: the file is damaged.
        """
        content = parse_object(data, _SHAPE)
        groups = [
            TakenGroup(
                SampleIndex(**{name: group["row"][name] for name in ("dataset", "epoch", "index")}),
                {key: (record["version"], record["history"]) for key, record in group["records"].items()},
            )
            for group in content["groups"]
        ]
        return cls(content["history"], content["config"], groups)
