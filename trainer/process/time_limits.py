"""How long the project waits where no config key says it, in seconds. User code has limits of its own (`sandbox`).

Code reads these names from the module, so that a test can shorten a wait: `time_limits.POLL_INTERVAL_S`.
"""

from __future__ import annotations

import os

POLL_INTERVAL_S = 0.2  # between two looks at what sends no notice: the end of a process, an upload, a request to stop
JOIN_S = 0.02  # the same where requests may follow that join those which the engines generate

# Signals
SIGNAL_GRACE_S = 3.0
"""Time from a signal to the exception in the main thread if it passes no safe point; and time from the third signal
until the watching process kills a process that still runs."""
SAME_REQUEST_S = 1.0
"""`timeout` and schedulers send a signal to the process and to its group: signals within this time count as one."""

# Processes of the job
HEARTBEAT_S = 300.0
"""Age of a heartbeat of a rank or an engine after which it counts as dead. A stopped process, or one on a frozen
machine, sends none; a process that computes does."""
CALL_S = 14400.0
"""Longest time of one call of the ranks or engines: to start, to generate the completions of a step, to update."""
HANG_S = 600.0
"""Longest time without progress of the driver within the steps. Waits for ranks, engines and storage do not count."""
RESTART_WINDOW_S = 3600.0  # length of the time in which restarts count (`trainer.max_restarts`)
IMPORTS_S = 60.0
"""Least age of a heartbeat after which a starting process counts as dead: imports may keep it from answering."""
HEARTBEAT_INTERVAL_S = 2.0
HEARTBEAT_WARNING_S = 20.0  # age of a heartbeat after which a warning is logged
STOP_WAIT_S = 10.0  # age of a heartbeat after which a stop request no longer waits for the process
ECHO_S = 2.0  # longest wait for errors of other workers after one worker has failed. They may name the cause
STALL_CHECK_INTERVAL_S = 0.1
"""Between two looks at the progress of the driver: short enough to observe the first steps, however fast they are."""
PROCESS_EXIT_S = 20.0  # longest wait for killed processes, and for a process that kills its own before it exits
WORKER_EXIT_S = 120.0  # longest wait until the fork server has killed a worker with its processes
RESTART_FIRST_DELAY_S = 2.0  # wait before the second restart in a row. Each further restart doubles it
RESTART_LONGEST_DELAY_S = 300.0

# The cluster
NODE_ANSWER_S = 15.0
"""Time without an answer from a node after which it counts as lost, with all ranks and engines on it."""
RAY_START_S = 180.0
RAY_SHUTDOWN_S = 30.0  # longest wait for `ray.shutdown`, which may hang after its processes have died
PLACEMENT_S = 60.0  # longest wait for capacity, unless `trainer.placement_timeout_s` says otherwise
PLACEMENT_REMOVAL_S = 10.0  # longest wait until Ray has scheduled a placement group that is to be removed
CAPACITY_WAIT_S = 10.0
"""Longest wait for capacity for all processes before the job makes do with less: it starts fewer ranks, or ranks free
GPU memory for an engine."""
NODE_CHECK_INTERVAL_S = 1.0  # between two rounds of connections to the nodes

# Saves and storage
LOCK_LEASE_S = 60.0  # time without a renewal after which a job on another machine loses its lock on the run directory
UPLOAD_END_S = 600.0  # longest wait at the end of the run for the upload of the last checkpoint
SAVE_END_S = 60.0  # longest wait, after a failure, for the save under way. It completes if its ranks live
JOURNAL_FLUSH_S = 0.5
"""Between two looks for finished rollouts. What is found within this time is written together, unless a step waits."""
JOURNAL_CLOSE_S = 5.0  # longest wait at the end for deletions of records that are under way
JOURNAL_WAIT_S = 60.0
"""Longest wait for one more file of finished rollouts. After that they are not recorded until a later try."""
JOURNAL_RETRY_S = 60.0  # from the time rollouts cannot be recorded until the next try, at least
STORAGE_RETRY_S = 60.0  # no further attempt of a request to an object store begins after this time
STORAGE_LONGEST_BACKOFF_S = 10.0  # longest wait between two attempts of such a request
LOCK_RELEASE_S = 10.0  # longest wait at the end until the storage has taken the release of a lock
UPLOAD_FIRST_BACKOFF_S = 1.0  # wait after the first failed upload of a checkpoint. Each further failure doubles it
UPLOAD_LONGEST_BACKOFF_S = 60.0

# Rollouts
LOOP_END_S = 60.0  # longest wait for the end of rollouts that the run no longer needs
STREAM_QUIET_S = 50.0  # longest silence of a stream to an agent: proxies give up after 60 s, clients after 300 s

# Weights
IPC_RETRY_S = 0.01  # between two attempts of an engine to connect to the rank that offers weights on its GPU
ENGINE_REPORT_S = 0.2  # shortest time between two reports of finished completions: vLLM does nothing while it reports

# Inference servers
SERVER_ABSENCE_S = 300.0
"""Longest wait of an engine for its inference server, which may be starting again. Shorter than `HANG_S`."""
SERVER_LEASE_S = 60.0  # time without a sign of life of a job after which another one may use the server
SERVER_HANG_S = 120.0  # time without progress after which the engine of an inference server is ended and started again
SERVER_CONNECT_S = 10.0  # longest wait for a connection to an inference server
SERVER_SILENCE_S = 30.0  # longest time without a sign of life from an inference server that has a request
SERVER_RETRY_S = 0.5  # between two attempts to reach an inference server
SERVER_WARNING_S = 5.0  # a wait for an inference server that takes this long is logged
SERVER_POLL_S = 2.0  # between two looks of an inference server at its engine
SERVER_START_S = 1800.0
"""Time within which the engine of an inference server must have loaded its model, or new weights."""
SERVER_STOP_S = 10.0  # longest wait until the processes of an engine have ended by themselves
FLEET_POLL_S = 1.0  # between two looks of a job for engines that join or leave
FLEET_LEASE_S = 30.0  # time without a renewal after which an engine that has joined counts as gone

# Ranks
COLLECTIVE_S = 1800.0  # longest time of one collective of ranks, or of ranks and engines, before it fails

# Services for metrics
SCRAPE_S = 10.0  # longest wait until a request is there, and until an answer is taken
TRACKING_END_S = 60.0  # longest wait at the end until a service has taken the metrics

# Programs and files
GIT_S = 10.0  # longest time for a command of git about the state of the sources
RENDER_S = 20.0  # longest time for a chat template to render a chat

# What is shown
QUIET_S = 30.0
"""Outside of a terminal, the phase is named after this time without a line; then again after twice the time."""
LONG_STAGE_S = 3.0  # outside of a terminal, a stage of the start is named once it takes this long


def read_environment() -> None:
    """Take limits from the variable `TRAINER_TIME_LIMITS`, such as `HEARTBEAT_S=4 LOCK_LEASE_S=1`: tests of whole jobs
    shorten them so."""
    for word in os.environ.get("TRAINER_TIME_LIMITS", "").split():
        name, _, seconds = word.partition("=")
        assert name in globals(), f"there is no limit {name}"
        globals()[name] = float(seconds)
