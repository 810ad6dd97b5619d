"""Profiles of a process by torch (`trainer.profile`)."""

from __future__ import annotations

import logging
import os
import pickle
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trainer.errors import one_line
from trainer.process.tracing import TRACER

LOG = logging.getLogger(__name__)

DIRECTORY = "profile"  # directory below the run directory
_MOST_EVENTS = 100_000  # allocations in the history of a profiled step; each takes some KB in the file


def step_directory(run_dir: str, step: int) -> str:
    return os.path.join(run_dir, DIRECTORY, f"step_{step}")


class TorchProfiler:
    """Profiles what the thread that starts it does, with the kernels on its GPU."""

    def __init__(self, device: str):
        self._device = device
        self._profile: profile | None = None
        self._path = ""

    def start(self, directory: str, name: str) -> None:
        """Begin a profile, which `stop` writes to `{directory}/{name}.json.gz`.

        On a GPU, `stop` also writes the allocations and what is then in memory, to `{name}.memory.pickle`. If there can
        be no profile, a warning says why.
        """
        assert self._profile is None, "stop the profile before starting another"
        self._path = os.path.join(directory, name)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device == "cuda" else [])]
        try:
            os.makedirs(directory, exist_ok=True)
            if self._device == "cuda":
                _record(enabled="all", context="all", max_entries=_MOST_EVENTS)
            started = profile(activities=activities, record_shapes=True, profile_memory=True, acc_events=True)
            started.start()
        except (OSError, RuntimeError) as error:
            warn_not_written(self._path, error)
        else:
            self._profile = started

    def stop(self) -> None:
        """End the profile, if there is one, and write it. If that fails, a warning says why."""
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        try:
            running.stop()
            with TRACER.span("write the profile", "profile"):
                running.export_chrome_trace(self._path + ".json.gz")
                if self._device == "cuda":
                    memory = torch.cuda.memory._snapshot()
                    with open(self._path + ".memory.pickle", "wb") as file:
                        pickle.dump(memory, file)
        except (OSError, RuntimeError) as error:
            warn_not_written(self._path, error)
        if self._device == "cuda":
            _record(enabled=None)


def warn_not_written(path: str, error: Exception) -> None:
    LOG.warning("trainer.profile: %s is not written (%s)", path, one_line(str(error)))


def _record(**options: Any) -> None:
    try:
        torch.cuda.memory._record_memory_history(stacks="python", **options)  # it costs 2 us an allocation
    except RuntimeError as error:  # some allocators cannot, such as cudaMallocAsync
        LOG.info("the allocations of the GPU's memory are not recorded: %s", one_line(str(error)))
