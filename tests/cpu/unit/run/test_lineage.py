"""The record of the checkpoint that a fork started from."""

from __future__ import annotations

from tests.support.odd_files import ODD_JSON, resume


def test_a_lineage_that_is_none_is_refused(run_dir):
    lineage = run_dir / "lineage.json"
    for content in ODD_JSON:
        lineage.write_bytes(content)
        assert f"{lineage}: is damaged" in resume(run_dir)
