"""A module whose import makes the file that `IMPORTING` names, and never ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

Path(os.environ["IMPORTING"]).touch()
while True:
    time.sleep(60)
