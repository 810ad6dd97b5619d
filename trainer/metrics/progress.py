"""The display of a running job: live on a terminal, one line a step elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rich import progress as rich_progress
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from trainer.config.tasks import ACCURACY
from trainer.metrics.names import PHASES, is_accuracy_of_set, pass_at
from trainer.metrics.timing import Timer, clock
from trainer.process import time_limits
from trainer.process.log_setup import LOG_FILE, escape, messages_to
from trainer.process.signals import SIGNALS
from trainer.process.startup import running_stage

LOG = logging.getLogger(__name__)
_REFRESHES_PER_S = 2
_STEPS_FOR_ETA = 20

# Label, metric, format with the width it has in a line. The most important come first: lines are read from the left.
_CELLS = (
    ("reward", "reward/mean", "6,.3f"),
    ("length", "response_length/mean", "5,.1f"),
    ("kl", "policy/kl", "7.1e"),
    ("grad", "policy/grad_norm", "5,.3f"),
    ("tok/s", "perf/tokens_per_s", "6,.0f"),
    ("s/step", "time/step", "4,.1f"),
)
_REWARD, _LOSS = "val/reward/mean", "val/loss"
_LABELS = {_REWARD: "reward ", _LOSS: "loss "}


class Progress:
    """Shows how far a run is and how it does. A context manager.

    On a terminal: a bar with the time left and the running phase, and a table of the main metrics; messages are printed
    above it. Elsewhere (a pipe, a log file): one aligned line a step, and the running phase when a step takes long.

    Args:
        completed: steps done by earlier processes of this run.
        history: their lines of `metrics.jsonl`; the best validation so far is found there.
        shown: metrics of the run's own task that are shown, too.
    """

    def __init__(
        self,
        total_steps: int,
        completed: int = 0,
        history: Iterable[Mapping[str, Any]] = (),
        timer: Timer | None = None,
        shown: Sequence[str] = (),
    ) -> None:
        of_task = [(name.rpartition("/")[2], name, "6,.3f") for name in shown]
        self._cells = (*_CELLS[:1], *of_task, *_CELLS[1:])
        self._total = total_steps
        self._completed = completed
        self._timer = timer or Timer()
        self._metrics: dict[str, float] = {}
        self._vals: dict[str, tuple[float, float]] = {}  # by metric: the last value, the best
        for row in history:
            self._remember_val(row)
        self._step_ends: deque[float] = deque(maxlen=_STEPS_FOR_ETA + 1)
        self._shown_at = time.monotonic()
        self._display: _Display | None = None
        self._exit = ExitStack()

    def __enter__(self) -> Progress:
        self._step_ends.append(time.monotonic())
        if sys.stdout.isatty() and not Console().is_dumb_terminal:
            left, phase = _TextNow(lambda: self._left(unit=" left"), "dim"), _TextNow(self._phase, "cyan")
            display = _Display(self._below, rich_progress.BarColumn(), rich_progress.MofNCompleteColumn(), left, phase)
            self._display = self._exit.enter_context(display)
            self._display.add_task("", total=self._total, completed=self._completed)
            self._exit.enter_context(messages_to(lambda text: display.console.print(Text(text), soft_wrap=True)))
        else:
            is_over = threading.Event()
            thread = threading.Thread(target=self._break_silence, args=[is_over], name="progress", daemon=True)
            with SIGNALS.blocked():
                thread.start()
            self._exit.callback(thread.join)
            self._exit.callback(is_over.set)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()
        self._display = None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that a step is done (0: the validation before training), with its metrics."""
        self._completed = step
        self._remember_val(metrics)
        # One assignment: the display's thread may be drawing. What this step did not measure keeps its last value.
        self._metrics = {**self._metrics, **metrics}
        if step == 0:
            self._step_ends.clear()  # the time before the first step is no step
        self._step_ends.append(time.monotonic())
        if self._display is not None:
            self._display.update(self._display.task_ids[0], completed=step, refresh=True)
        else:
            print(self._line(metrics), flush=True)
        LOG_FILE.write(self._line(metrics))
        self._shown_at = time.monotonic()

    def _break_silence(self, is_over: threading.Event) -> None:
        last_logged, patience_s = self._shown_at, time_limits.QUIET_S
        while not is_over.wait(min(1.0, time_limits.QUIET_S)):
            if self._shown_at > last_logged:
                last_logged, patience_s = self._shown_at, time_limits.QUIET_S
            if time.monotonic() - last_logged > patience_s and (running := self._timer.running()) is not None:
                last_logged, patience_s = time.monotonic(), 2 * patience_s
                LOG.info("step %d/%d: %s for %s …", self._completed + 1, self._total, running[0], clock(running[1]))

    def _remember_val(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            is_shown = name in (ACCURACY, _REWARD, _LOSS) or name.startswith(pass_at("")) or is_accuracy_of_set(name)
            if value is not None and is_shown:
                best = min if name == _LOSS else max
                self._vals[name] = value, best(value, self._vals.get(name, (value, value))[1])

    def _line(self, metrics: Mapping[str, float]) -> str:
        parts = [f"step {self._completed:>{len(str(self._total))}}/{self._total}"]
        parts += [f"{label} {metrics[name]:{spec}}" for label, name, spec in self._cells if name in metrics]
        parts += [f"val {val}" if (val := self._val()) else "", self._left("left ")]
        return "  ".join(part for part in parts if part)

    def _val(self) -> str:
        """What is shown of validations: the last and the best value."""
        measured = [name for name in (ACCURACY, _REWARD, _LOSS) if name in self._vals]
        sets = [
            f"{name.split('/')[1]} {value:.3f}" for name, (value, _) in self._vals.items() if is_accuracy_of_set(name)
        ]
        if not measured:
            return " ".join(sets)
        name = measured[0]
        value, best = self._vals[name]
        passes = [n for n in self._vals if n.startswith(pass_at(""))][-1:]  # the last: a resume may change k
        others = "".join(f" {n.removeprefix('val/')} {self._vals[n][0]:.3f}" for n in passes)
        others += "".join(f" {text}" for text in sets)
        return f"{_LABELS.get(name, '')}{value:.3f} best {best:.3f}{others}"

    def _left(self, label: str = "", unit: str = "") -> str:
        """The time left, from the mean of the last steps, whatever happened between them; empty before the first."""
        seconds = seconds_left(self._step_ends, self._total - self._completed, time.monotonic())
        return "" if seconds is None else f"{label}{clock(seconds)}{unit}"

    def _phase(self) -> str:
        """The running phase or stage of the start, and its time so far, as `starting Ray 0:04`."""
        if running := self._timer.running():
            return f"{running[0]} {clock(running[1])}"
        stage = running_stage()
        return f"{escape(stage[0], lines=False)} {clock(time.monotonic() - stage[1])}" if stage else ""

    def _below(self) -> Iterable[RenderableType]:
        """The main metrics, and each phase's share of the step: `rollout 45%  update 38%  …`, largest first."""
        metrics = self._metrics
        cells = [(label, f"{metrics[name]:{spec}}".strip()) for label, name, spec in self._cells if name in metrics]
        if self._vals:
            cells.insert(1, ("validation", self._val()))
        table = Table.grid(padding=(0, 2))
        for start in range(0, len(cells), 4):
            row = cells[start : start + 4]
            table.add_row(*(text for label, value in row for text in (Text(label, style="dim"), Text(value))))
        yield table
        if (step := metrics.get("time/step", 0.0)) > 0:
            shares = {phase: metrics.get(f"time/{phase}", 0.0) / step for phase in PHASES}
            largest_first = sorted((phase for phase in PHASES if shares[phase] > 0), key=lambda phase: -shares[phase])
            yield Text("  ".join(f"{phase} {shares[phase]:.0%}" for phase in largest_first), style="dim")


def seconds_left(ends: Sequence[float], steps: int, now: float) -> float | None:
    """Return the seconds until `steps` more steps are done, from when the first of the last steps began, and each of
    them ended; None: no step has been measured."""
    if len(ends) < 2:
        return None
    per_step = (ends[-1] - ends[0]) / (len(ends) - 1)
    return max(0.0, per_step * steps - (now - ends[-1]))


class _Display(rich_progress.Progress):
    def __init__(self, below: Callable[[], Iterable[RenderableType]], *columns: rich_progress.ProgressColumn):
        self._below = below
        super().__init__(*columns, refresh_per_second=_REFRESHES_PER_S, redirect_stderr=sys.stderr.isatty())

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from self._below()


class _TextNow(rich_progress.ProgressColumn):
    def __init__(self, text: Callable[[], str], style: str):
        super().__init__()
        self._text, self._style = text, style

    def render(self, task: rich_progress.Task) -> Text:
        return Text(self._text(), style=self._style)
