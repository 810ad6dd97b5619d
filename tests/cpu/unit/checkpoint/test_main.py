"""The command line of the checkpoints."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.support.checkpoints import manager, save
from trainer.checkpoint.__main__ import main


@pytest.mark.parametrize(("hours", "age"), [(-50, "2 d"), (-3, "3 h"), (1, "in the future"), (10**5, "in the future")])
def test_a_checkpoint_from_a_clock_ahead_has_an_age_in_the_future(hours, age, tmp_path, capsys):
    saved_at = (datetime.now(UTC) + timedelta(hours=hours)).isoformat(timespec="seconds")
    save(manager(tmp_path), 1, ranks=1, saved_at=saved_at)
    assert main(["ls", str(tmp_path)]) == 0
    assert f" {age} " in capsys.readouterr().out
