from __future__ import annotations

import pytest

from tests.support.checkpoints import write_two
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def real_checkpoints(tmp_path_factory):
    """Two checkpoints with DCP shards, of states 1 and 2."""
    root = tmp_path_factory.mktemp("real")
    run_ranks(1, write_two, str(root))
    return root
