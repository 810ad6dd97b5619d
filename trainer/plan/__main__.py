"""`trainer plan`: what a config needs of a cluster, and whether it fits, without a GPU."""

from __future__ import annotations

import sys

from trainer.config import Config
from trainer.config.command_line import run_app
from trainer.process.log_setup import guard_output, show

_HELP = """usage: trainer plan [GROUP=CHOICE ...] [KEY=VALUE ...] [plan.gpus=CLUSTER] [--json]

Print what a run with these overrides needs, without a GPU and without starting it: memory of each rank and engine by
phase and kind, host memory, sizes of checkpoints, the time of a step by phase, and what a kill costs. The first
sentence says whether the run fits, and if not, the smallest changes that make it fit.

  plan.gpus       8xH100 (one node of eight), 4x8xH100 (four such nodes), or cpu, this machine
  model.path      a directory with a config.json, an id of the Hub, or a known shape:
                  {models}
  --json          print JSON: sizes in bytes, times in seconds

docs/scale.md explains the numbers; docs/config.md lists the other keys of plan.
"""

_json: list[bool] = []
"""Whether JSON is printed."""


def main() -> int | None:
    """Print the plan; ends the process."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        from trainer.plan.known import known_models

        guard_output()
        print(_HELP.format(models=", ".join(known_models())), end="")
        return 0
    run_app(_plan, "plan", begin=_begin, trains=False)
    return None


def _begin(words: list[str]) -> list[str]:
    _json[:] = ["--json" in words]
    return [word for word in words if word != "--json"]


def _plan(cfg: Config) -> None:
    import gc
    import json

    gc.disable()  # collections take a tenth of a search, and this process ends after it
    from trainer.config.hydra import words_given
    from trainer.config.overrides import refuse_unread
    from trainer.plan.advice import find_changes, larger_cluster
    from trainer.plan.hardware import parse_cluster
    from trainer.plan.plan import make_plan
    from trainer.plan.report import as_json, as_text, verdict

    refuse_unread([word for word in words_given() if not word.lstrip("+").startswith("plan.")], cfg)
    cluster = parse_cluster(cfg.plan.gpus, cfg.plan.host_memory_gb, cfg.plan.shared_memory_gb)
    plan = make_plan(cfg, cluster)
    changes = None if plan.fits else find_changes(cfg, cluster)
    larger = None if plan.fits or changes else larger_cluster(cfg, cluster)
    sentence = verdict(plan, changes, larger)
    if _json[0]:
        show(json.dumps(as_json(cfg, plan, sentence, changes, larger), indent=2))
    else:
        show(as_text(cfg, plan, sentence))


if __name__ == "__main__":
    sys.exit(main())
