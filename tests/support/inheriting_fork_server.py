"""A fork server for tests, which start many jobs and kill each job with one signal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

import psutil

from trainer.cluster.fork_server import ForkServer, run_fork_server


class InheritingForkServer(ForkServer):
    """A fork server that is a fork of this process and stays in its process group.

    This process must not have threads yet. Workers inherit the modules that this process has imported.
    """

    def _start(self, remote: Connection, preload: Sequence[str], env: Mapping[str, str]) -> psutil.Process:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            self._connection.close()
            run_fork_server(remote.fileno(), preload)
        return psutil.Process(child)
