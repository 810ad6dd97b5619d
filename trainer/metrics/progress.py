"""What a person watching a run sees: a live display on a terminal, one line a step elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer.metrics.names import PHASES

_REFRESH_S = 0.5
_STEPS_FOR_ETA = 20


def _fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{digits}f}"


# Label, metric, format, width to which a line pads the value. Order of importance: lines are read from left.
_CELLS: tuple[tuple[str, str, Callable[[float], str], int], ...] = (
    ("reward", "reward/mean", _fixed(3), 6),
    ("loss", "sft/loss", _fixed(3), 6),
    ("length", "response_length/mean", _fixed(1), 5),
    ("kl", "policy/kl", lambda value: f"{value:.1e}", 7),
    ("grad", "policy/grad_norm", _fixed(3), 5),
    ("tok/s", "perf/tokens_per_s", _fixed(0), 6),
    ("s/step", "time/step", _fixed(1), 4),
)


class Progress:
    """Shows how far a run is and how it does. A context manager.

    On a terminal: a bar with the time left, and a table of the numbers that matter. Elsewhere (a pipe, a log
    file): one aligned line a step. Without `enabled` neither, only what is said with `note`.
    """

    def __init__(
        self,
        total_steps: int,
        enabled: bool = True,
        completed: int = 0,
        history: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        """
        Args:
            total_steps: steps of the whole run.
            completed: steps done by earlier processes of this run.
            history: their lines of `metrics.jsonl`; the best validation so far is found there.
        """
        self._total = total_steps
        self._enabled = enabled
        self._completed = completed
        self._metrics: dict[str, float] = {}
        self._val: float | None = None
        self._best: float | None = None
        for row in history:
            self._remember_val(row)
        self._phase: tuple[str, float] | None = None  # name and start
        self._step_ends: deque[float] = deque(maxlen=_STEPS_FOR_ETA + 1)
        self._live: Live | None = None
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)
        self._done = threading.Event()

    def __enter__(self) -> Progress:
        self._step_ends.append(time.monotonic())
        console = Console()
        if self._enabled and sys.stdout.isatty() and not console.is_dumb_terminal:
            self._live = Live(
                console=console,
                get_renderable=self._render,
                auto_refresh=False,  # rich's thread would outlive the display for a moment; ours is joined
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start(refresh=True)
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._done.set()
            self._ticker.join()
            live, self._live = self._live, None
            live.stop()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done (0: the validation before training) with these metrics."""
        self._completed = step
        self._remember_val(metrics)
        # One assignment: the ticker may be drawing. What this step did not measure keeps its last value.
        self._metrics = {**self._metrics, **metrics}
        if step == 0:
            self._step_ends.clear()  # what came before the first step says nothing about a step's length
        self._step_ends.append(time.monotonic())
        if self._live is not None:
            self._live.refresh()
        elif self._enabled:
            print(self._line(metrics), flush=True)

    def note(self, text: str) -> None:
        """Print a line of text above the display; it stays."""
        if self._live is not None:
            self._live.console.print(Text(text), soft_wrap=True)
        else:
            print(text, flush=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show that `name` is running; an outer phase comes back when an inner one ends."""
        outer, self._phase = self._phase, (name, time.monotonic())
        try:
            yield
        finally:
            self._phase = outer

    def _remember_val(self, metrics: Mapping[str, Any]) -> None:
        accuracy = metrics.get("val/accuracy")
        if accuracy is not None:
            self._val = accuracy
            self._best = accuracy if self._best is None else max(self._best, accuracy)

    def _seconds_left(self) -> float | None:
        """From the mean of the last steps, whatever happened between them; None before the first."""
        if len(self._step_ends) < 2:
            return None
        per_step = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        since = time.monotonic() - self._step_ends[-1]
        return max(0.0, per_step * (self._total - self._completed) - since)

    def _val_text(self) -> str:
        return "" if self._val is None else f"{self._val:.3f} best {self._best:.3f}"

    def _line(self, metrics: Mapping[str, float]) -> str:
        width = len(str(self._total))
        parts = [f"step {self._completed:>{width}}/{self._total}"]
        parts += [f"{label} {show(metrics[name]):>{w}}" for label, name, show, w in _CELLS if name in metrics]
        if self._val is not None:
            parts.append(f"val {self._val_text()}")
        left = self._seconds_left()
        if left is not None:
            parts.append(f"left {_clock(left)}")
        return "  ".join(parts)

    def _tick(self) -> None:
        """Redraw while nothing happens: the running phase's clock shows that the run is alive."""
        live = self._live
        assert live is not None
        while not self._done.wait(_REFRESH_S):
            live.refresh()

    def _render(self) -> Group:
        left = self._seconds_left()
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._total, completed=self._completed, width=40)
        state = Text()
        if self._phase is not None:
            name, start = self._phase
            state = Text(f"{name} {_clock(time.monotonic() - start)}", style="cyan")
        head.add_row(
            bar,
            Text(f"{self._completed}/{self._total}", style="bold"),
            Text("" if left is None else f"{_clock(left)} left", style="dim"),
            state,
        )
        return Group(head, self._table(), Text(_shares(self._metrics), style="dim"))

    def _table(self) -> Table:
        cells = [(label, show(self._metrics[name])) for label, name, show, _ in _CELLS if name in self._metrics]
        if self._val is not None:
            cells.insert(1, ("val accuracy", self._val_text()))
        table = Table.grid(padding=(0, 2))
        for start in range(0, len(cells), 4):
            row = cells[start : start + 4]
            table.add_row(*(text for label, value in row for text in (Text(label, style="dim"), Text(value))))
        return table


def _shares(metrics: Mapping[str, float]) -> str:
    """`rollout 45%  update 38%  …`: each phase's share of the step, largest first."""
    step = metrics.get("time/step", 0.0)
    seconds = {phase: metrics[f"time/{phase}"] for phase in PHASES if metrics.get(f"time/{phase}", 0.0) > 0}
    if step <= 0:
        return ""
    ordered = sorted(seconds, key=lambda phase: -seconds[phase])
    return "  ".join(f"{phase} {seconds[phase] / step:.0%}" for phase in ordered)


def _clock(seconds: float) -> str:
    """`1:05`, `2:03:04`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
