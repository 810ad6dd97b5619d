"""The limits that user code meets, besides the time limit of a call, which the config gives."""

from __future__ import annotations

# Calls and their processes
MAX_ATTEMPTS = 2
"""A call that ends its process is tried again once: something else may have killed the process."""
MAX_TIMEOUTS = 30
"""After this many calls of a round that have taken too long, for each process, the others are not tried."""
MAX_ASYNC_SESSIONS = 256
"""Sessions of one process whose `async` calls may be under way at the same time."""
CANCEL_S = 5.0  # longest time for the end of an agent that was cancelled; then its process is replaced
ASYNC_GRACE_S = 2.0
"""A process stops a call that is `async` by itself. After this time the pool ends the process instead."""
START_S = 600.0  # longest time for the imports of a process
MAX_FAILED_STARTS = 3  # this many processes in a row may die before they are ready; then the run fails

THREADS_LEFT = 32  # a worker is replaced if so many calls whose time was over still run in threads

# The end of a process
STOP_S = 10.0  # longest time for the reaper to end the processes that user code has started
DEATH_S = 1.0  # longest time between the end of a worker's pipe and the end of the worker

# Messages and output
PIPE_S = 10  # longest time for the rest of a message once it has begun
LARGEST_MESSAGE = 1 << 24  # bytes of the longest message of a process, unless its pool says otherwise
OUTPUT_LINES = 20  # printed lines that are logged after each round
OUTPUT_BYTES = 4000

# Values
LARGEST_REWARD = 1e12
"""Largest absolute reward. The sum of 10^9 squares of it is finite in float32."""
MAX_TERMS = 64
"""Terms of one reward. A step of an environment may have four times as many metrics."""
MAX_MESSAGES = 1024  # messages of one step of an environment
MAX_MESSAGE_EXTRAS = 1 << 20
"""Characters of all that the messages of a step hold besides their contents, as JSON."""
MAX_STATE = 1 << 20  # bytes of what an environment saves after a step
MAX_TOOL_CALLS = 64  # calls of one reply that are made
