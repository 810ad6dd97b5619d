"""`trainer plan`: what a config needs of a cluster, and whether it fits, without a GPU."""

from __future__ import annotations

import sys

from trainer.config import Config
from trainer.config.command_line import run_app
from trainer.process.log_setup import guard_output, show

_HELP = """usage: trainer plan [GROUP=CHOICE ...] [KEY=VALUE ...] [plan.gpus=CLUSTER]

Print what a run with these overrides needs, without a GPU and without starting it: memory of each rank and engine by
phase and kind, host memory, disk, and the time of a step. The first sentence says whether the run fits, and which of a
few whole layouts is the best if it does not, or if another one is faster.

  plan.gpus       8xH100 (one node of eight), 4x8xH100 (four such nodes), or cpu, this machine
  model.path      a directory with a config.json, an id of the Hub, or a shape that comes with the project:
                  {models}

docs/scale.md explains the numbers; docs/config.md lists the other keys of plan.
"""


def main() -> int | None:
    """Print the plan; ends the process."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        from trainer.plan.model_shape import shipped_models

        guard_output()
        print(_HELP.format(models=", ".join(shipped_models())), end="")
        return 0
    run_app(_plan, "plan", trains=False)
    return None


def _plan(cfg: Config) -> None:
    from trainer.config.command_line import refuse_unread
    from trainer.config.hydra import words_given
    from trainer.plan.hardware import parse_cluster
    from trainer.plan.plan import make_plan
    from trainer.plan.report import as_text, timed_layouts

    refuse_unread([word for word in words_given() if not word.lstrip("+").startswith("plan.")], cfg)
    cluster = parse_cluster(cfg.plan.gpus)
    show(as_text(cfg, make_plan(cfg, cluster), timed_layouts(cfg, cluster)))


if __name__ == "__main__":
    sys.exit(main())
