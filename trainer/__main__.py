"""`trainer COMMAND`, or `python -m trainer COMMAND`: the one command line of the project.

Each command is imported when it is chosen, so that help appears quickly and signals are handled from the start.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from trainer import __version__
from trainer.process.signals import SIGNALS

COMMANDS = {
    "train": ("trainer.main:main", "train with rewards or environments: GRPO, PPO and others"),
    "sft": ("trainer.main:main_sft", "train on examples, or on kept completions"),
    "dpo": ("trainer.main:main_dpo", "train on preferences: pairs of a better and a worse answer"),
    "rm": ("trainer.main:main_rm", "train a reward model on such pairs"),
    "evaluate": ("trainer.evaluate.subject:main", "evaluate a model, an export or a checkpoint"),
    "inference": ("trainer.inference.__main__:main", "serve a model to jobs and people, while jobs come and go"),
    "engine": ("trainer.inference.engine:main", "start an engine that joins a running job, and leaves it on a signal"),
    "plan": ("trainer.plan.__main__:main", "say what a run needs of a cluster, whether it fits, and how long it takes"),
    "diagnose": ("trainer.reports.diagnose:main", "say what happened to a run, and what to do next"),
    "compare": ("trainer.reports.compare:main", "print a table of runs, and draw their curves"),
    "view": ("trainer.view.__main__:main", "write one HTML file with the curves, episodes and tokens of runs"),
    "report": ("trainer.reports.report:main", "draw the picture of a run"),
    "rollouts": ("trainer.data.rollout_io:main", "print kept rollouts as JSON lines"),
    "checkpoint": ("trainer.checkpoint.__main__:main", "list, verify, show, compare, export, prune, roll back"),
    "config": ("trainer.config.reference:main", "print the reference of all config keys"),
}
"""Function and purpose of each command. The function reads `sys.argv`, and returns the exit status or None."""
JOBS = ("train", "sft", "dpo", "rm", "evaluate", "inference", "engine")
"""Commands that run long. They handle signals."""
_HELP = """usage: trainer COMMAND [ARGUMENT ...]

Commands:
{commands}

  trainer COMMAND --help    explain a command
  trainer --version         print the version

Start with `trainer train`, the demo. README.md and docs/ explain the rest.
"""


def main() -> int | None:
    """Run the command that `sys.argv` names; returns its exit status, None for success."""
    words = sys.argv[1:]
    command = words[0] if words else "--help"
    if command in JOBS:
        SIGNALS.listen()  # before the other imports, which take a part of a second
    if os.getcwd() not in sys.path:  # for modules of the user, which hide no others: `trainer` is this package
        sys.path.append(os.getcwd())
    if command in COMMANDS:
        sys.argv = [f"trainer {command}", *words[1:]]
        module, _, function = COMMANDS[command][0].partition(":")
        return getattr(import_module(module), function)()
    from trainer.process.log_setup import guard_output, show

    guard_output()
    if command in ("--help", "-h", "help"):
        lines = [f"  {name:12}{purpose}" for name, (_, purpose) in COMMANDS.items()]
        print(_HELP.format(commands="\n".join(lines)), end="")
        return 0
    if command in ("--version", "-V"):
        print(f"trainer {__version__}")
        return 0
    import shlex

    from trainer.errors import did_you_mean

    if "=" in command or command.startswith("-"):
        problem = f"a command comes first; write trainer train {shlex.join(words)}"
    else:
        problem = f"no such command; {did_you_mean(command, COMMANDS) or 'choose one of ' + ', '.join(COMMANDS)}"
    show(f"error: {command}: {problem}", error=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
