"""What `trainer evaluate` evaluates, from the words of its command line."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from trainer.config.hydra import conf_dir, find_groups, store_recorded
from trainer.config.overrides import parsed
from trainer.errors import UserError
from trainer.evaluate.task import EVALUATION, PATH
from trainer.files.uris import is_url, problem_of
from trainer.process.log_setup import ToolParser

if TYPE_CHECKING:
    from trainer.checkpoint.manifest import Checkpoint

FOLDER = "evaluations"
"""Directory of evaluations: in the run of a checkpoint on a disk, else in `outputs`."""
_OF_ASSETS = ("model.chat_template", "model.chat_template_kwargs")
"""Keys that the tokenizer in a checkpoint has applied already."""
_PER_RUN = ("trainer.run_name", "trainer.run_dir", "trainer.task", "inference.*", *_OF_ASSETS)
"""Keys that an evaluation does not take from the run, besides those that it does not read."""
_GIVES_REWARDS = ("rl",)


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

    Args:
        words: those of the user: perhaps a path, `--best` or `--step N`, flags of Hydra, and overrides.

    Raises:
        UserError: nothing is named, or it cannot be evaluated.
    """
    path, step, best, rest = parse_words(words)
    given = {word.lstrip("+~").partition("=")[0] for word in rest if not word.startswith("-")}
    if path is not None and "model.path" in given:
        raise UserError(f"{path}: model.path names a model to evaluate, too; leave one of them out")
    if path is None and "model.path" not in given:
        raise UserError("name what to evaluate: a run, a checkpoint, an export, or model.path=PATH")
    is_run = path is not None and _is_run_or_checkpoint(path)
    if not is_run:
        if step is not None or best:
            raise UserError("--best and --step choose a checkpoint of a run, and no run is named")
        name = path or next(word.partition("=")[2] for word in rest if word.lstrip("+").startswith("model.path="))
        return Subject(name), _words_of_model(path, name, rest, given)
    assert path is not None
    from trainer.checkpoint.components import read_config
    from trainer.checkpoint.inspection import choose_checkpoint

    checkpoint, _ = choose_checkpoint(path, step, best)
    config = read_config(checkpoint)
    words = _words_of_checkpoint(path, checkpoint, config, rest, given)
    return Subject(checkpoint.path, checkpoint.step, checkpoint), words


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
    paths = [
        word for word in flags.overrides if not word.startswith(("+", "~")) and ("=" not in word or _is_path(word))
    ]
    if len(paths) > 1:
        raise UserError(f"{paths[1]}: one model is evaluated at a time, and {paths[0]} is named, too")
    path = (paths[0] if paths[0].endswith("://") else paths[0].rstrip("/") or paths[0]) if paths else None
    return path, own.step, own.best, [word for word in rest if word not in paths]


def _is_path(word: str) -> bool:
    """Return whether a word with `=` in it is a path, as that of a run of a sweep is, and no override."""
    name = word.partition("=")[0]
    return is_url(word) or os.path.exists(word) or "/" in name and not name.startswith("hydra/")


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
    if os.path.exists(os.path.join(path, "adapter_config.json")) and not _has_config(path):
        raise UserError(f"{path}: holds an adapter alone; evaluate the checkpoint, or export it with merged weights")
    return not _has_config(path)


def _has_config(path: str) -> bool:
    return os.path.exists(os.path.join(path, "config.json"))


def _words_of_model(path: str | None, name: str, rest: list[str], given: set[str]) -> list[str]:
    names_data = any(key == "data" or key.startswith(("data.", "experiment")) for key in given)
    if not names_data and not any(word.startswith("--config") for word in rest):
        is_here = path is None or os.path.isdir(path)
        where = "" if is_here else "no such directory here; if it is a model of the Hub, "
        raise UserError(
            f"{name}: {where}name the data to evaluate it on, such as data=gsm8k, data.val_files=[FILE] or "
            "data.val_sets"
        )
    reads_files = any(key == "data.val_files" or key.startswith("data.val_sets") for key in given)
    is_chosen = {"data", "data.synthetic", "experiment"} & given or any(word.startswith("--config") for word in rest)
    words = ["data=files"] if reads_files and not is_chosen else []
    words += [f"model.path={_quoted(path)}"] if path is not None else []
    return [*words, *_own_words(f"outputs/{FOLDER}/{_plain(name)}", given), *rest]


def _words_of_checkpoint(
    path: str, checkpoint: Checkpoint, config: dict[str, Any], rest: list[str], given: set[str]
) -> list[str]:
    """Store the config of the checkpoint for Hydra; return the overrides that choose it."""
    for word in rest:
        if word.startswith("--config"):
            raise UserError(f"{word}: the config is that of {path}; override keys of it instead")
    groups = find_groups(conf_dir())
    for group in groups:
        if group in given:
            raise UserError(f"{group}={_value(rest, group)}: the config is that of {path}; override keys of it instead")
    _check_rewards(path, config, given)
    recorded_choice = store_recorded(_read_part(config, given))
    step, recorded = f"global_step_{checkpoint.step}", config.get("trainer", {}).get("run_dir")
    run_dir = f"outputs/{FOLDER}/{_plain(str(recorded or path))}/{step}"
    if not is_url(path):
        of_run = path if not _is_step(path) else posixpath.dirname(posixpath.abspath(path))
        of_run = posixpath.dirname(of_run) if posixpath.basename(of_run) == "checkpoints" else of_run
        run_dir = posixpath.join(of_run, FOLDER, step)
    return [recorded_choice, *_own_words(run_dir, given), *rest]


def _is_step(path: str) -> bool:
    return posixpath.basename(path).startswith("global_step_")


def _check_rewards(path: str, config: dict[str, Any], given: set[str]) -> None:
    """Refuse a run whose rewards come from its task, unless the command names others."""
    task = config.get("trainer", {}).get("task", "rl")
    names = {"reward.name", "environment.name"}
    if task not in _GIVES_REWARDS and not names & given and not config.get("environment", {}).get("name"):
        raise UserError(
            f"{path}: the rewards of its task {task} are not known to an evaluation; name one with reward.name=NAME or "
            "environment.name=PATH"
        )


def _read_part(config: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """Return the part of a recorded config that an evaluation reads."""
    dropped = (*EVALUATION.unused, *_PER_RUN)
    if "data.val_files" in given and "data.synthetic" not in given:
        dropped += ("data.synthetic", "data.synthetic_args*", "data.val_size")

    def part(section: dict[str, Any], prefix: str) -> dict[str, Any]:
        read = {}
        for name, value in section.items():
            key = f"{prefix}{name}"
            if any(fnmatchcase(shown, pattern) for shown in (key, f"{key}.") for pattern in dropped):
                continue
            read[name] = part(value, f"{key}.") if isinstance(value, dict) else value
        return read

    return part(config, "")


def _own_words(run_dir: str, given: set[str]) -> list[str]:
    words = [f"trainer.task={_quoted(PATH)}", "trainer.run_name=evaluation"]
    return words + ([] if {"trainer.run_dir", "trainer.run_name"} & given else [f"trainer.run_dir={_quoted(run_dir)}"])


def _value(words: Sequence[str], name: str) -> str:
    return next(word.partition("=")[2] for word in words if word.lstrip("+").partition("=")[0] == name)


def _quoted(text: str) -> str:
    """Return a text as Hydra's grammar takes it."""
    return json.dumps(text, ensure_ascii=False).replace("${", "\\${")


def _plain(name: str) -> str:
    """Return the last two parts of a path or id as one file name."""
    parts = [part for part in name.strip("'\"").split("/") if part not in ("", ".", "..", "policy")]
    return "-".join(parts[-2:]) or "model"
