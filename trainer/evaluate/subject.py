"""`trainer evaluate`: what it evaluates, from the words of its command line, and what it reads of the config."""

from __future__ import annotations

import json
import os
import posixpath
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.config import Config, TaskSpec
from trainer.config.command_line import parsed, refuse_unread, run_app
from trainer.config.fields import matches
from trainer.config.hydra import conf_dir, find_groups, store_recorded, words_given
from trainer.config.schema import KEYS, MAPPINGS, NAME, SECTIONS
from trainer.errors import UserError
from trainer.files.uris import is_url, problem_of
from trainer.import_utils import import_numpy
from trainer.process.log_setup import ToolParser, guard_output, show

if TYPE_CHECKING:
    from trainer.checkpoint.manifest import Checkpoint

PATH = f"{__name__}:EVALUATION"
"""The value of `trainer.task`."""
READ = (
    *(f"trainer.{name}" for name in ("task", "run_name", "run_dir", "seed", "device", "deterministic", "ray_address")),
    *(f"trainer.{name}" for name in ("placement_timeout_s", "max_restarts", "profile", "policy.lora.*")),
    *(f"model.{name}" for name in ("path", "cache_dir", "check", "trust_remote_code", "chat_template*")),
    *("reward.*", "environment.*"),
    *(f"data.{name}" for name in ("val_*", "prompt_key", "answer_key", "messages_key", "synthetic*", "train_size")),
    "data.system_prompt",
    *(f"rollout.{name}" for name in ("engine*", "urls", "num_engines", "tensor_parallel_size")),
    *(f"rollout.{name}" for name in ("max_*_tokens", "temperature", "top_*", "val_n", "dtype", "max_logprob_diff")),
    *(f"rollout.{name}" for name in ("max_num_seqs", "gpu_memory_utilization")),
    *("rollout.lora_sync", "rollout.journal", "logger.trace*"),
)
"""The keys that an evaluation reads. A new key is refused until it stands here."""
_OF_RUN = ("trainer.run_name", "trainer.run_dir", "trainer.task", "model.chat_template", "model.chat_template_kwargs")
"""Keys of `READ` that an evaluation does not take from a run. The tokenizer in a checkpoint has the template."""
FOLDER = "evaluations"
"""Directory of evaluations: in the run of a checkpoint on a disk, else in `outputs`."""

_HELP = """usage: trainer evaluate RUN|CHECKPOINT|MODEL [--best | --step N] [KEY=VALUE ...]
       trainer evaluate model.path=MODEL data=… [GROUP=CHOICE ...] [KEY=VALUE ...]

Evaluate without training, and write results and transcripts to trainer.run_dir:

  RUN         a run directory or URL: its newest checkpoint, the best one (--best), or that of a step
  CHECKPOINT  a global_step_N directory or URL
  MODEL       a Hugging Face directory, such as an export, or an id of the Hub; name the data, too

A run or checkpoint brings its config, which KEY=VALUE overrides (docs/config.md). An evaluation that was killed
continues when the same command is given again. docs/evaluation.md explains the rest.
"""


def _build(config: Any) -> NoReturn:
    raise UserError(f"trainer.task={PATH}: is no training; give the command trainer evaluate")


def _unused() -> tuple[str, ...]:
    """Return patterns of all keys that are not read, and of the sections and mappings of which no key is."""
    read = [key for key in KEYS if matches(key, READ)]
    whole = [name for name in (*SECTIONS, *MAPPINGS) if name and NAME not in name]
    none = [f"{name}.*" for name in whole if not any(f"{key}.".startswith(f"{name}.") for key in read)]
    return (*(key for key in KEYS if key not in read and NAME not in key), *none)


EVALUATION = TaskSpec(_build, generates=True, trains=False, unused=_unused())
"""A task that starts no ranks: it generates with the weights that it is given, and changes none."""


@dataclass(frozen=True)
class Subject:
    """A model to evaluate."""

    name: str
    """What messages call it: the path or the Hugging Face id."""
    step: int = 0
    """Of the checkpoint. It keys all draws, so they are those of the run's own validation at that step. 0: a model is
    evaluated as the initial weights of a run are."""
    checkpoint: Checkpoint | None = None
    """None: it is the Hugging Face model of `model.path`."""


def find_subject(words: Sequence[str]) -> tuple[Subject, list[str]]:
    """Return what the command line names, and the overrides for Hydra.

    Raises:
        UserError: nothing is named, or it cannot be evaluated.
    """
    path, step, best, rest = parse_words(words)
    given = {word.lstrip("+~").partition("=")[0]: word for word in rest}
    if path is not None and "model.path" in given:
        raise UserError(f"{path}: model.path names a model to evaluate, too; leave one of them out")
    if path is None and "model.path" not in given:
        raise UserError("name what to evaluate: a run, a checkpoint, an export, or model.path=PATH")
    subject = Subject(path or given["model.path"].partition("=")[2])
    if path is None or not _is_run_or_checkpoint(path):
        if step is not None or best:
            raise UserError("--best and --step choose a checkpoint of a run, and no run is named")
        chosen, run_dir = _words_of_model(path, subject.name, given), f"outputs/{FOLDER}/{_plain(subject.name)}"
    else:
        from trainer.checkpoint.components import read_config
        from trainer.checkpoint.inspection import choose_checkpoint
        from trainer.checkpoint.tensors import NamedFiles
        from trainer.models.checks import refuse_classifier

        checkpoint, _ = choose_checkpoint(path, step, best)
        model = NamedFiles(checkpoint).json("policy/huggingface/config.json", {})
        refuse_classifier(model.get("architectures"), checkpoint.path)
        config = read_config(checkpoint)
        subject = Subject(checkpoint.path, checkpoint.step, checkpoint)
        chosen, run_dir = [_store_config(path, config, given)], _directory_in(path, checkpoint.step, config)
    own = [f"trainer.task={_quoted(PATH)}", "trainer.run_name=evaluation"]
    own += [] if {"trainer.run_dir", "trainer.run_name"} & given.keys() else [f"trainer.run_dir={_quoted(run_dir)}"]
    return subject, [*chosen, *own, *rest]


def parse_words(words: Sequence[str]) -> tuple[str | None, int | None, bool, list[str]]:
    """Return the path, the value of `--step`, whether there is `--best`, and the other words."""
    parser = ToolParser(prog="trainer evaluate", add_help=False, allow_abbrev=False)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--best", action="store_true")
    chosen.add_argument("--step", type=int)
    own, rest = parser.parse_known_args(list(words))
    flags = parsed(rest, "evaluate")
    if flags.multirun:
        raise UserError("--multirun: an evaluation is one job; give one command for each")
    paths = [word for word in flags.overrides if _is_path(word)]
    if len(paths) > 1:
        raise UserError(f"{paths[1]}: one model is evaluated at a time, and {paths[0]} is named, too")
    path = (paths[0] if paths[0].endswith("://") else paths[0].rstrip("/") or paths[0]) if paths else None
    return path, own.step, own.best, [word for word in rest if word not in paths]


def _is_path(word: str) -> bool:
    """Return whether a word is a path and no override. That of a run of a sweep has `=` in it."""
    name, equals, _ = word.partition("=")
    if word.startswith(("+", "~")):
        return False
    return not equals or is_url(word) or os.path.exists(word) or "/" in name and not name.startswith("hydra/")


def _is_run_or_checkpoint(path: str) -> bool:
    if is_url(path):
        if (problem := problem_of(path)) is not None:
            raise UserError(f"{path}: {problem}")
        return True
    if not os.path.isdir(path):
        if os.path.exists(path) or path.startswith((".", "/", "~")) or path.count("/") > 1:
            problem = "is a file" if os.path.exists(path) else "no such directory"
            raise UserError(f"{path}: {problem}; name a run, a checkpoint, an export or the id of a model")
        return False  # the id of a model of the Hub
    is_model = os.path.exists(os.path.join(path, "config.json"))
    if os.path.exists(os.path.join(path, "adapter_config.json")) and not is_model:
        raise UserError(f"{path}: holds an adapter alone; evaluate the checkpoint, or export it with merged weights")
    return not is_model


def _words_of_model(path: str | None, name: str, given: dict[str, str]) -> list[str]:
    """Return the overrides that choose a model, and data from files where the command line names files alone."""
    is_chosen = {"data", "data.synthetic", "experiment", "--config"} & given.keys()
    if not is_chosen and not any(key.startswith("data.") for key in given):
        is_here = path is None or os.path.isdir(path)
        where = "" if is_here else "no such directory here; if it is a model of the Hub, "
        raise UserError(
            f"{name}: {where}name the data to evaluate it on, such as data=gsm8k, data.val_files=[FILE] or "
            "data.val_sets"
        )
    reads_files = any(key == "data.val_files" or key.startswith("data.val_sets") for key in given)
    words = ["data=files"] if reads_files and not is_chosen else []
    return words + ([f"model.path={_quoted(path)}"] if path is not None else [])


def _store_config(path: str, config: dict[str, Any], given: dict[str, str]) -> str:
    """Store what an evaluation reads of the config of a checkpoint for Hydra; return the override that chooses it."""
    for key in ("--config", "--config-dir", *find_groups(conf_dir())):
        if key in given:
            raise UserError(f"{given[key]}: the config is that of {path}; override keys of it instead")
    task = config["trainer"]["task"]
    names_rewards = config["environment"]["name"] or {"reward.name", "environment.name"} & given.keys()
    if task != "rl" and not names_rewards:
        raise UserError(
            f"{path}: the rewards of its task {task} are not known to an evaluation; name one with reward.name=NAME or "
            "environment.name=PATH"
        )
    dropped = (*EVALUATION.unread, *_OF_RUN)
    if "data.val_files" in given and "data.synthetic" not in given:
        dropped += ("data.synthetic", "data.synthetic_args*", "data.val_size")

    def part(section: dict[str, Any], prefix: str) -> dict[str, Any]:
        read = {}
        for name, value in section.items():
            key = f"{prefix}{name}"
            if not matches(key, dropped) and not matches(f"{key}.", dropped):
                read[name] = part(value, f"{key}.") if isinstance(value, dict) else value
        return read

    return store_recorded(part(config, ""))


def _directory_in(path: str, step: int, config: dict[str, Any]) -> str:
    """Return where the evaluation of a checkpoint goes: into its run on a disk."""
    if is_url(path):
        return f"outputs/{FOLDER}/{_plain(config['trainer']['run_dir'])}/global_step_{step}"
    run = path
    if posixpath.basename(path).startswith("global_step_"):
        run = posixpath.dirname(posixpath.abspath(path))
    run = posixpath.dirname(run) if posixpath.basename(run) == "checkpoints" else run
    return posixpath.join(run, FOLDER, f"global_step_{step}")


def _quoted(text: str) -> str:
    """Return a text as Hydra's grammar takes it."""
    return json.dumps(text, ensure_ascii=False).replace("${", "\\${")


def _plain(name: str) -> str:
    """Return the last two parts of a path or id as one file name."""
    parts = [part for part in name.strip("'\"").split("/") if part not in ("", ".", "..", "policy")]
    return "-".join(parts[-2:]) or "model"


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
    from trainer.metrics.timing import logged_stages
    from trainer.process.startup import stage

    with logged_stages():
        refuse_unread(words_given(), cfg)
        import_numpy()  # before torch does
        with stage("importing torch and transformers"):
            from trainer.evaluate.job import print_results, run_evaluation
            from trainer.parallel.mesh import pick_device
        results = run_evaluation(cfg, subject, pick_device(cfg.trainer.device, cfg.engine))
    print_results(results)
    show(f"results: {cfg.trainer.run_dir}; `trainer rollouts {cfg.trainer.run_dir}` prints the transcripts")
