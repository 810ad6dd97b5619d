"""`python -m trainer.main`: compose, validate, connect Ray, train."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trainer.errors import NonFiniteError, NotSavedError, UserError, WorkerError, memory_ran_out, one_line
from trainer.output import guard_output, show_messages
from trainer.signals import EXIT_STATUS, INTERRUPTED_STATUS, SIGNALS, Stopped

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainer.config import Config

# Hydra, and whatever takes long to import, is imported where it is used: signals are heard from the first moment on.


def run_app(job: Callable[[Config, str], None]) -> None:
    """Compose the config from the command line and hand it, with the device, to `job`; then exit.

    Exit status: 0 done, 2 the user must mend something (one sentence on stderr), 1 anything else (with a
    traceback), 75 stopped early (see `trainer.signals`), 130 interrupted by a second signal.
    """
    guard_output()
    show_messages()
    with SIGNALS.listening():
        status = _run(job)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: while the interpreter ends, a late signal would replace the status by death of a signal.
        os._exit(status)


def _run(job: Callable[[Config, str], None]) -> int:
    """Run the job and tell how it ended; returns the exit status. Signals that come after that are ignored."""
    try:
        try:
            _compose_and_run(job)
        finally:
            SIGNALS.ignore()
    except Stopped as stopped:
        SIGNALS.ignore()  # this signal may have come in the line above
        print(stopped)
        return EXIT_STATUS
    except KeyboardInterrupt:
        SIGNALS.ignore()
        print("interrupted; the last checkpoint is as it was", file=sys.stderr)
        return INTERRUPTED_STATUS
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _compose_and_run(job: Callable[[Config, str], None]) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    from trainer.config import conf_dir, register, to_config

    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through to here instead of printing them itself

    @hydra.main(version_base="1.3", config_path=conf_dir(), config_name="config")
    def app(dict_config: DictConfig) -> None:
        nonlocal composed
        composed = True
        # Here as well, because Hydra would print a line of its own about a job that raises.
        with _errors_as_sentences():
            cfg = to_config(dict_config)
            if HydraConfig.get().mode == hydra.types.RunMode.MULTIRUN:
                print(f"[{HydraConfig.get().job.num}] {cfg.trainer.run_dir}", flush=True)
            _make_run_dir(cfg)
            with SIGNALS.held():  # torch would swallow an exception while it imports NumPy, and so lose the signal
                from trainer.parallel.mesh import pick_device  # the first import of torch: the config has passed

            device = pick_device(cfg.trainer.device)
            _check_devices(cfg, device)
            job(cfg, device)

    composed = False
    with _errors_as_sentences():
        try:
            app()
        except OSError as error:
            if composed or isinstance(error, HydraException):  # a missing config is an OSError too
                raise
            raise UserError(
                f"hydra.sweep.dir: {error.filename} cannot be written ({error.strerror}); work in another "
                "directory, or choose another with hydra.sweep.dir=DIRECTORY"
            ) from error


@contextlib.contextmanager
def _errors_as_sentences() -> Iterator[None]:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (UserError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        sys.exit(2)
    except (WorkerError, NonFiniteError, NotSavedError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        if not memory_ran_out(error):
            raise
        print(
            f"error: the driver has no memory left ({one_line(str(error)) or 'MemoryError'}); lower "
            "trainer.train_batch_size, or give the machine more memory, and restart the job with the same command",
            file=sys.stderr,
        )
        sys.exit(1)


def explain(error: BaseException) -> str:
    """One sentence for an error of the config: what is wrong, where, what is valid."""
    from hydra.errors import ConfigCompositionException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, ValidationError

    from trainer.config import OPEN_SECTIONS, valid_keys

    if isinstance(error, UserError):
        return str(error)
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    first_lines = [str(e).strip().splitlines()[0] for e in chain if str(e).strip()]
    for cause in chain:
        if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and cause.full_key:
            section = cause.full_key.rpartition(".")[0]
            if section in OPEN_SECTIONS:
                return f"{cause.full_key}: {section} takes keys of your choice; write +{cause.full_key}=VALUE"
            valid = ", ".join(valid_keys(section))
            return f"{cause.full_key}: no such key" + (f"; valid are {valid}" if valid else "")
        if isinstance(cause, ValidationError) and cause.full_key:
            return f"{cause.full_key}: {first_lines[-1].rstrip('.')}"
    if isinstance(error, (ConfigCompositionException, OverrideParseException)):
        text = " ".join(str(error).split())
        return text
    return first_lines[0]


def _make_run_dir(cfg: Config) -> None:
    run_dir = cfg.trainer.run_dir
    try:
        os.makedirs(run_dir, exist_ok=True)
        probe = os.path.join(run_dir, ".writable")
        with open(probe, "w"):
            pass
        os.remove(probe)
    except OSError as error:
        raise UserError(f"trainer.run_dir={run_dir}: cannot be written ({error.strerror}); choose another") from error


def _check_devices(cfg: Config, device: str) -> None:
    """Refuse before Ray starts what this machine cannot hold; a cluster to join is asked once it is joined."""
    if device != "cuda" or cfg.trainer.ray_address is not None:
        return
    import torch

    has = torch.cuda.device_count()
    if cfg.trainer.num_workers > has:
        raise UserError(
            f"trainer.num_workers={cfg.trainer.num_workers}: more ranks than CUDA devices, this machine has {has}; "
            "use fewer, trainer.device=cpu, or join a cluster with trainer.ray_address"
        )


def _job(cfg: Config, device: str) -> None:
    with SIGNALS.held():
        from trainer.loop import run

    run(cfg, device)


if __name__ == "__main__":
    run_app(_job)
