"""Places at which a test can stop the process, to kill it exactly there.

`TRAINER_FAILPOINT=name,n,path` makes the n-th passing of the place `name` create the file `path` and then
sleep for ever; whoever set it sees the file and kills the processes. Without the variable a place costs one
look-up.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict

_passed: dict[str, itertools.count] = defaultdict(lambda: itertools.count(1))


def failpoint(name: str) -> None:
    """The place `name` has been reached."""
    spec = os.environ.get("TRAINER_FAILPOINT")
    if not spec:
        return
    wanted, nth, path = spec.rsplit(",", 2)
    if name == wanted and next(_passed[name]) == int(nth):
        with open(path, "w"):
            pass
        while True:
            time.sleep(3600)
