"""Check the environment of the config before anything expensive starts."""

from __future__ import annotations

import json

from trainer.config import EnvironmentConfig
from trainer.environments.base import check_options
from trainer.errors import UserError, one_line
from trainer.sandbox.process import run_code

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
    done = run_code(
        config.python,
        f"""
import psutil
from trainer.environments.base import check_options
from trainer.errors import UserError
try:
    check_options({config.name!r}, json.loads({json.dumps(dict(config.kwargs))!r}))
except UserError as error:
    sys.exit({_REFUSED!r} + str(error))
""",
    )
    if done.returncode == 0:
        return
    last = one_line((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    if last.startswith(_REFUSED):
        raise UserError(f"{last.removeprefix(_REFUSED)} (in the interpreter {config.python})")
    problem = f"cannot run environments ({last}); it needs Python 3.11 or newer, and the package psutil"
    raise UserError(f"environment.python={config.python}: {problem}")
