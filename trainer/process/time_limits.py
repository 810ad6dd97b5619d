"""How long the project waits where no config key says it, in seconds. User code has limits of its own (`sandbox`).

Code reads these names from the module, so that a test can shorten a wait: `time_limits.POLL_INTERVAL_S`.
"""

from __future__ import annotations

POLL_INTERVAL_S = 0.2
"""Between two looks at what sends no notice: the end of a process, an upload, a request to stop."""

# Saves and storage
SAVE_END_S = 60.0
"""Longest wait, after a failure, for the save under way. It completes if its ranks live."""
STORAGE_RETRY_S = 60.0
"""No further attempt of a request to an object store begins after this time."""
STORAGE_LONGEST_BACKOFF_S = 10.0
"""Longest wait between two attempts of such a request."""
UPLOAD_FIRST_BACKOFF_S = 1.0
"""Wait after the first failed upload of a checkpoint. Each further failure doubles it."""
UPLOAD_LONGEST_BACKOFF_S = 60.0

# Placement
CAPACITY_WAIT_S = 10.0
"""Longest wait for capacity for all processes before the job makes do with less: it starts fewer ranks, or ranks free
GPU memory for an engine."""

# Weights
IPC_RETRY_S = 0.01
"""Between two attempts of an engine to connect to the rank that offers weights on its GPU."""
ENGINE_REPORT_S = 0.2
"""Shortest time between two reports of finished completions: vLLM does nothing while it reports."""

# Programs and files
GIT_S = 10.0
"""Longest time for a command of git about the state of the sources."""
RENDER_S = 20.0
"""Longest time for a chat template to render a chat."""
DIAGNOSE_READ_S = 30.0
"""Longest time that `trainer diagnose` reads the newest checkpoint, unless `--seconds` says otherwise."""

# What is shown
QUIET_S = 30.0
"""Outside of a terminal, the phase is named after this time without a line; then again after twice the time."""
LONG_STAGE_S = 3.0
"""Outside of a terminal, a stage of the start is named once it takes this long."""
