"""Recovery of a run from failures of its ranks: record, decide, wait, restart or end."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial

from trainer.config import TrainerConfig
from trainer.errors import DivergedError, NonFiniteError, NonRetryableError, WorkerError, describe_with_place
from trainer.metrics.advice import Divergence
from trainer.process import time_limits
from trainer.process.failures import INCIDENTS, INFRASTRUCTURE, Decision, Restarts, classify, decide, describe
from trainer.process.signals import SIGNALS, Stopped
from trainer.run.saves import Saves
from trainer.run.state import StopRequest

LOG = logging.getLogger(__name__)


class Recovery:
    """The failures of a run, and the restarts of its ranks. Advice names the section `optimizer`.

    The ranks run, or have failed (`accept`) until they run again (`complete`), or the run ends (`accept` raises;
    a request to stop). An incident is recorded when it is over.

    Forbidden: a restart that cures nothing (`failures.decide`), after a request to stop, or, before the ranks have
    loaded their models once, for anything but failed machines; a second failure before the first one is recorded.
    """

    def __init__(self, trainer: TrainerConfig, stop: StopRequest, optimizer: str):
        self._run_dir = trainer.run_dir
        self._origin = "newest copy" if trainer.copy_steps else "last commit"
        self._restarts = Restarts(trainer.max_restarts, time_limits.RESTART_WINDOW_S)
        self._stop = stop
        self._optimizer = optimizer
        self._failure: Exception | None = None
        self._delay_s = 0.0
        self._step = 0
        self._step_began = time.monotonic()
        self.lost_s = 0.0  # seconds of the finished steps that are trained again

    def run(
        self,
        build: Callable[[], None],
        train: Callable[[], None],
        restart: Callable[[Exception], None],
        saves: Saves,
    ) -> None:
        """Build the ranks and train. After a failure that new ranks may cure, restart them and train again. Raises
        Stopped: the run was asked to stop. Raises Exception: what new ranks do not cure."""
        begin, is_loaded = build, False
        while True:
            try:
                begin()
                is_loaded = True
                return train()
            except Exception as error:
                SIGNALS.moment = "restarting"
                self.accept(error, saves.last_good, is_loaded)
                begin = partial(restart, error)
            except Stopped as reason:
                self._record_restart("restarted the ranks without success")
                self._record(reason, "stopped")
                raise

    @property
    def restarted(self) -> bool:
        """Whether the ranks were started again at least once."""
        return self._restarts.count > 0

    def begin_step(self, step: int) -> None:
        """Note that `step` is under way."""
        self._step, self._step_began = step, time.monotonic()
        INCIDENTS.step = step

    def accept(self, error: Exception, last_good: str, is_loaded: bool = True) -> None:
        """Accept a failure that a restart of the ranks may cure; record and raise any other.

        Args:
            last_good: path of the newest checkpoint; empty: none yet.
            is_loaded: the ranks have loaded their models in this process before. A model that cannot be loaded is no
                accident.

        Raises:
            NonRetryableError: the run itself is at fault.
            Exception: `error`.
        """
        self._record_restart("restarted the ranks without success")
        if not is_loaded and classify(error)[0] != INFRASTRUCTURE:
            raise error
        if self._stop.reason is not None:
            self._record(error, "ended the run, which was asked to stop")
            raise error
        decision, self._restarts = decide(self._restarts, error, self._step, time.monotonic())
        if decision.refusal:
            self._record(error, "ended the run")
            raise self._ending(error, decision, last_good)
        self._failure, self._delay_s = error, decision.delay_s
        fact = error.message if isinstance(error, WorkerError) else describe_with_place(error)
        after = f" in {decision.delay_s:g} s" if decision.delay_s else ""
        count = f"restart {self._restarts.count}; trainer.max_restarts={self._restarts.limit}"
        LOG.warning("%s; the ranks start again%s, from the %s (%s)", fact, after, self._origin, count)

    def wait(self) -> None:
        """Wait for the time that the next restart is put off. Raises Stopped: a signal arrived."""
        end = time.monotonic() + self._delay_s
        while (left := end - time.monotonic()) > 0:
            SIGNALS.check()
            time.sleep(min(left, time_limits.POLL_INTERVAL_S))

    def complete(self) -> None:
        """Record the failure that is cured, if there is one: the ranks run, with the state of the last commit."""
        self._record_restart("restarted the ranks")

    def diverged(self, divergence: Divergence, saved: Sequence[int]) -> DivergedError:
        """Return the exception that ends a run which has diverged. Of the checkpoints of the steps in `saved`, its
        message names the one to go back to."""
        good = max((step for step in saved if step < divergence.first_step), default=None)
        lower = f"a lower {self._optimizer}.lr"
        if good is None:
            advice = f"no checkpoint is from before that, so start a new run, for example with {lower}"
        else:
            command = f"trainer checkpoint rollback {shlex.quote(self._run_dir)} --to {good}"
            advice = (
                f"`{command}` goes back; then change a setting in the command, for example {lower}, and add "
                f"trainer.allow_config_change=[{self._optimizer}.lr] and trainer.resume_mode=latest"
            )
        return DivergedError(f"the run has diverged: {divergence}; {advice}")

    def _record_restart(self, action: str) -> None:
        """Record the failure that the last restart was for, unless that is done."""
        if self._failure is not None:
            self._record(self._failure, action)
            self._failure = None

    def _record(self, error: BaseException, action: str) -> None:
        ended = action.startswith(("ended", "stopped"))
        cost_s = 0.0 if ended else self.lost_s + time.monotonic() - self._step_began
        INCIDENTS.record(describe(error, self._step, action, cost_s))

    def _ending(self, error: Exception, decision: Decision, last_good: str) -> Exception:
        """Return the exception that ends the run."""
        if isinstance(error, NonFiniteError):
            kept = f"the last good checkpoint is {last_good}" if last_good else "there is no checkpoint yet"
            ending: Exception = NonRetryableError(
                f"step {self._step}: {error}; nothing was overwritten, {kept}. A lower {self._optimizer}.lr or "
                f"{self._optimizer}.max_grad_norm may help."
            )
        elif decision.repeated:
            fact = str(error) if isinstance(error, WorkerError) else describe_with_place(error)
            ending = NonRetryableError(f"{decision.refusal}: {fact}")
        else:
            if self.restarted:
                LOG.warning("the ranks do not start again: %s", decision.refusal)
            return error
        ending.__cause__ = error
        return ending
