"""Check the environment of the config before anything expensive starts."""

from __future__ import annotations

import json
import os
import subprocess

from trainer.config import EnvironmentConfig
from trainer.environments.base import check_options
from trainer.errors import UserError, describe_error, one_line
from trainer.sandbox.limits import START_S
from trainer.sandbox.process import preamble

_REFUSED = "refused: "


def check_environment(config: EnvironmentConfig) -> None:
    """Check that the environment can be imported, and takes `environment.kwargs`.

    With `environment.python` this happens in a process of that interpreter.

    Raises:
        UserError: it cannot, or that interpreter cannot run environments.
    """
    assert config.name is not None
    if config.python is None:
        check_options(config.name, config.kwargs)
        return
    key = f"environment.python={config.python}"
    if not os.path.isfile(config.python) or not os.access(config.python, os.X_OK):
        raise UserError(f"{key}: is no interpreter; name a file such as .venv-other/bin/python")
    code = f"""{preamble(config.python)}
import psutil
from trainer.environments.base import check_options
from trainer.errors import UserError
try:
    check_options({config.name!r}, json.loads({json.dumps(dict(config.kwargs))!r}))
except UserError as error:
    sys.exit({_REFUSED!r} + str(error))
"""
    command = [config.python, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{key}: cannot run environments ({describe_error(error)})") from error
    if done.returncode == 0:
        return
    last = one_line((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    if last.startswith(_REFUSED):
        raise UserError(f"{last.removeprefix(_REFUSED)} (in the interpreter {config.python})")
    raise UserError(f"{key}: cannot run environments ({last}); it needs Python 3.11 or newer, and the package psutil")
