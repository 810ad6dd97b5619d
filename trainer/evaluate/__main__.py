"""`trainer evaluate`: evaluate a model, an export or a checkpoint."""

from __future__ import annotations

from trainer.process.signals import SIGNALS

if __name__ == "__main__":
    SIGNALS.listen()  # before the other imports, which take a part of a second

import sys

from trainer.config import Config
from trainer.config.command_line import run_app
from trainer.evaluate.subject import Subject, find_subject
from trainer.import_utils import import_numpy
from trainer.process.log_setup import guard_output, show

_HELP = """usage: trainer evaluate RUN|CHECKPOINT|MODEL [--best | --step N] [KEY=VALUE ...]
       trainer evaluate model.path=MODEL data=… [GROUP=CHOICE ...] [KEY=VALUE ...]

Evaluate without training, and write results and transcripts to trainer.run_dir:

  RUN         a run directory or URL: its newest checkpoint, the best one (--best), or that of a step
  CHECKPOINT  a global_step_N directory or URL
  MODEL       a Hugging Face directory, such as an export, or an id of the Hub; name the data, too

A run or checkpoint brings its config, which KEY=VALUE overrides (docs/config.md). An evaluation that was killed
continues when the same command is given again. docs/evaluation.md explains the rest.
"""


def main() -> int | None:
    """Do what the command line says; ends the process of a job."""
    words = sys.argv[1:]
    if not words or {"--help", "-h"} & set(words):
        guard_output()
        print(_HELP, end="")
        return 0
    subjects: list[Subject] = []

    def begin(words: list[str]) -> list[str]:
        subject, overrides = find_subject(words)
        subjects.append(subject)
        return overrides

    run_app(lambda cfg: _evaluate(cfg, subjects[0]), "evaluate", begin=begin)
    return None


def _evaluate(cfg: Config, subject: Subject) -> None:
    from trainer.config.hydra import words_given
    from trainer.config.overrides import refuse_unread
    from trainer.metrics.timing import StartUp
    from trainer.process.startup import stage

    with StartUp():
        refuse_unread(words_given(), cfg)
        import_numpy()  # before torch does
        with stage("importing torch and transformers"):
            from trainer.evaluate.job import print_results, run_evaluation
            from trainer.parallel.mesh import pick_device
        results = run_evaluation(cfg, subject, pick_device(cfg.trainer.device, cfg.engine))
    print_results(results)
    show(f"results: {cfg.trainer.run_dir}; `trainer rollouts {cfg.trainer.run_dir}` prints the transcripts")


if __name__ == "__main__":
    sys.exit(main())
