"""Named points at which a test can stop the process and kill it.

With `TRAINER_FAILPOINT=name,n,path`, the n-th call of `failpoint(name)` creates the file `path` and waits until the
test deletes it. The test waits for the file, and then kills the processes or lets them continue. Several points are
separated by semicolons. Without the variable, a call costs one look-up.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict

_passed: dict[str, itertools.count] = defaultdict(lambda: itertools.count(1))


def failpoint(name: str) -> None:
    """Stop here if the environment requests a stop at `name`."""
    points = os.environ.get("TRAINER_FAILPOINT")
    if not points:
        return
    wanted = [point.rsplit(",", 2) for point in points.split(";")]
    paths = {int(nth): path for point, nth, path in wanted if point == name}
    if paths and (path := paths.get(next(_passed[name]))) is not None:
        with open(path, "w"):
            pass
        while os.path.exists(path):
            time.sleep(0.05)
