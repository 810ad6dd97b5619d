"""The record of the checkpoint that a fork started from."""

from __future__ import annotations

import pytest

from tests.support.odd_files import ODD_JSON, resume


@pytest.mark.parametrize("content", [*ODD_JSON, None], ids=range(len(ODD_JSON) + 1))
def test_a_lineage_that_is_none_is_refused(run_dir, content):
    lineage = run_dir / "lineage.json"
    if content is None:
        lineage.mkdir()
    else:
        lineage.write_bytes(content)
    assert f"{lineage}: is damaged" in resume(run_dir)
