"""Benchmarks. Each prints what `benchmarks/history.md` keeps."""

import os

# Progress bars of libraries would stand between the lines of the tables. Libraries read these when they are imported.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
