"""How long the driver waits for processes, and what it says when one of the cluster has died."""

from __future__ import annotations

import pytest

from trainer.cluster.worker_groups import Timeouts, timeouts_of
from trainer.config import Config
from trainer.errors import WorkerError
from trainer.process import time_limits


def test_the_config_says_how_long():
    t = Config().trainer
    t.heartbeat_timeout_s, t.rpc_timeout_s = 11.0, 12.0
    timeouts = timeouts_of(t, lambda: "x", lambda: {"10.0.0.1": "no answer"})
    assert (timeouts.heartbeat_s, timeouts.rpc_s) == (11.0, 12.0)
    assert timeouts.failed_process() == "x" and timeouts.failed_nodes() == {"10.0.0.1": "no answer"}


def test_imports_of_a_starting_process_may_keep_it_from_answering():
    limit = time_limits.IMPORTS_S
    for heartbeat_s in (1.0, limit + 1):
        timeouts = Timeouts(heartbeat_s, 1.0)
        assert timeouts.heartbeat_limit_s(is_starting=False) == heartbeat_s
        assert timeouts.heartbeat_limit_s(is_starting=True) == max(heartbeat_s, limit)


def test_a_process_of_the_cluster_that_died_ends_the_job_with_its_name():
    Timeouts(1.0, 1.0).check_cluster()
    with pytest.raises(WorkerError, match="^raylet died, and the job with it") as raised:
        Timeouts(1.0, 1.0, lambda: "raylet").check_cluster()
    assert raised.value.cause == "cluster" and "restart it with the same command" in str(raised.value)
