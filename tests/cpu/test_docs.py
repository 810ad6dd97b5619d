"""What the documents tell a reader to type, open or set still exists."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from tests.cpu.test_architecture import ALLOWED
from tests.support.pages import files_of_page
from tools.algorithms_doc import page
from trainer.__main__ import COMMANDS, JOBS
from trainer.config import TASKS, Config, compose, valid_keys
from trainer.config.command_line import parsed, refuse_unread
from trainer.evaluate.subject import PATH as EVALUATION_TASK
from trainer.evaluate.subject import parse_words
from trainer.objectives import make_objective

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = [README, *(ROOT / name for name in ("CONTRIBUTING.md", "examples/README.md"))]
DOCUMENTS += sorted((ROOT / "benchmarks").glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))
WITH_OPTIONS = [
    *(ROOT / "trainer/algorithms").glob("*.py"),
    ROOT / "trainer/config/algorithm.py",
    ROOT / "trainer/objectives/check.py",
]
SCRIPTS = sorted((ROOT / "examples").rglob("*.sh"))
EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))

# Stands in for `python` and `trainer`: writes one line a call, its words separated by tabs, and makes the export
# and the name of the checkpoint for the next command of a script. It fails when the user's PYTHONPATH is lost. A server
# stays up if SERVES is set.
STUB = r"""#!/usr/bin/env bash
(IFS=$'\t'; printf "%s\n" "${0##*/}"$'\t'"$*") >> "$CALLS"
for argument; do
  case "$argument" in
    trainer.run_dir=*) run="${argument#*=}"; mkdir -p "$run/exports/global_step_3/policy" "$run/checkpoints"
      echo 3 > "$run/checkpoints/latest_ckpt_global_step.txt" ;;
  esac
done
[[ ":$PYTHONPATH:" == *":$USERS_OWN:"* ]] || exit 1
[[ -z "${SERVES:-}" || "$*" != *"trainer inference"* ]] || exec sleep 60
"""


def code_blocks(text: str) -> str:
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
    return re.sub(r" &$", "", blocks, flags=re.MULTILINE)


def commands(document: Path) -> list[str]:
    """Shell commands of the trainer, in code blocks and in running text. Those with placeholders are left out."""
    text = document.read_text()
    lines = code_blocks(text).replace("\\\n", " ").splitlines()
    words = [line for line in re.findall(r"`([^`\n]+)`", text) if not re.search(r"[…|]|[A-Z]{3}|\.\.\.| \w+$", line)]
    return [line for line in lines + words if re.match(r"(python -m )?trainer[. ]\w+ ", line)]


def calls(tmp_path: Path, *bash: str) -> list[list[str]]:
    """The commands that a shell command gives, by running it with stubs in the place of the programs."""
    (tmp_path / "bin").mkdir()
    stub, log = tmp_path / "bin/python", tmp_path / "calls"
    stub.write_text(STUB)
    stub.chmod(0o755)
    (tmp_path / "bin/trainer").symlink_to(stub)
    own = {"CALLS": str(log), "USERS_OWN": str(tmp_path / "modules"), "PYTHONPATH": str(tmp_path / "modules")}
    environment = {**os.environ, **own, "PATH": f"{stub.parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", *bash], cwd=tmp_path, env=environment, check=True, timeout=30)
    return [line.split("\t") for line in log.read_text().splitlines()]


def values_of(override: Override) -> list[str]:
    """The values of a sweep; of an interval, its ends."""
    if override.is_interval_sweep():
        return [str(override.value().start), str(override.value().end)]
    return list(override.sweep_string_iterator())


def command_and_arguments(words: list[str]) -> tuple[str, list[str]]:
    """The command of `trainer` and its arguments, in any of the forms of a call."""
    if words[:2] == ["python", "-m"]:
        modules = {path.partition(":")[0].removesuffix(".__main__"): name for name, (path, _) in COMMANDS.items()}
        words = ["trainer", modules[words[2]], *words[3:]] if words[2] in modules else words[2:]
    assert words[0] == "trainer" and words[1] in COMMANDS, words
    return words[1], words[2:]


CHECKED: set[tuple[str, ...]] = set()
"""The commands that have been checked."""


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose the overrides of a job, with each value of a sweep. Parse the arguments of other commands.

    A command that stands in several documents is checked once.
    """
    command, arguments = command_and_arguments(words)
    if (command, *arguments) in CHECKED:
        return
    CHECKED.add((command, *arguments))
    if command == "evaluate":
        return check_evaluation(arguments, monkeypatch)
    if command not in (*JOBS, "plan") or command == "engine":
        return check_arguments(command, arguments, monkeypatch)
    if "--help" in arguments:
        return
    flags = parsed(arguments)
    sweeps = flags.multirun
    overrides = OverridesParser.create().parse_overrides(flags.overrides)
    overrides = [override for override in overrides if not override.is_hydra_override()]
    task = [f"trainer.task={command}"] if command in TASKS else []
    fixed = [*task, *(override.input_line for override in overrides if not override.is_sweep_override())]

    def compose_words(words: list[str]) -> Config:
        flags.overrides, flags.multirun = words, False
        for name in ("config", "config_dir"):
            if (path := getattr(flags, name)) is not None:
                setattr(flags, name, str(ROOT / path))
        return compose(flags.overrides, flags.config, flags.config_dir)

    trains = command not in ("inference", "plan")
    swept = [override for override in overrides if override.is_sweep_override()]
    assert sweeps or not swept, f"{swept[0].input_line} sweeps without -m"
    values = [values_of(override) for override in swept]
    for place in range(max(map(len, values), default=1)):
        chosen = [f"{o.key_or_group}={own[min(place, len(own) - 1)]}" for o, own in zip(swept, values, strict=True)]
        check_job([*fixed, *chosen], compose_words, trains)


def check_job(words: list[str], compose_words: Callable[[list[str]], Config], trains: bool) -> None:
    """Compose the overrides of one job, and check what a job checks of them before it starts."""
    cfg = compose_words(words)
    if trains:
        refuse_unread(words, cfg)
    make_objective(cfg).check()


def check_evaluation(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse the words, and compose the overrides with a model in the place of the run."""
    if words[0] == "compare":
        return check_arguments("evaluate", words, monkeypatch)
    path, _, _, overrides = parse_words(words)
    model = [] if path is None else ["model.path=MODEL"]
    composed = [*model, f'trainer.task="{EVALUATION_TASK}"', *overrides]
    refuse_unread(composed, compose(composed))


def check_arguments(command: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command read its arguments, and no more."""
    read: list[argparse.Namespace] = []

    def parse(parser: argparse.ArgumentParser, given: list[str] | None = None, *_: object) -> argparse.Namespace:
        read.append(real(parser, given))
        raise KeyboardInterrupt

    real = argparse.ArgumentParser.parse_args
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", [f"trainer {command}", *arguments])
        module, _, function = COMMANDS[command][0].partition(":")
        getattr(import_module(module), function)()
    assert read


@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if path.stem != "extending"],  # see test_extending_docs.py
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_commands_in_the_documents_are_understood(document, tmp_path, monkeypatch):
    lines = commands(document)
    files_of_page(str(document.relative_to(ROOT)), tmp_path)  # the functions that the commands name
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    if document == README:
        assert len(lines) > 8, "the commands are no longer found"
    if lines:
        made = calls(tmp_path, "-c", "\n".join(lines))
        assert len(made) == len(lines)
        for words in made:
            check(words, monkeypatch)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_overrides_reach_every_stage_of_an_example(script, tmp_path, monkeypatch):
    """The script keeps PYTHONPATH, too (see `STUB`)."""
    monkeypatch.setenv("SERVES", "1")
    made = calls(tmp_path, str(script), "experiment=smoke", "trainer.seed=7")
    own = [words for words in made if words[:2] == ["python", "-m"] and words[2].startswith("examples.")]
    assert all((ROOT / f"{words[2].replace('.', '/')}.py").is_file() for words in own)  # programs of the example
    made = [words for words in made if words not in own]
    stages = [words for words in made if command_and_arguments(words)[0] in JOBS]
    assert stages
    for words in made:
        check(words, monkeypatch)
    for words in stages:
        assert {"experiment=smoke", "trainer.seed=7"} <= set(words)
        for override in words:
            key, _, value = override.partition("=")
            assert key != "trainer.run_dir" or value.startswith("outputs/smoke/")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiments_compose_alone_and_with_the_smoke_test(experiment):
    alone = compose([f"experiment={experiment}"])
    both = compose([f"experiment=[{experiment},smoke]"] if experiment != "smoke" else ["experiment=smoke"])
    assert both.trainer.total_steps == 2 and both.trainer.run_dir.startswith("outputs/smoke/")
    assert (both.model.path, both.reward.name, both.rollout.num_engines) == (
        alone.model.path,
        alone.reward.name,
        alone.rollout.num_engines,
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_keys_named_in_the_documents_exist(document):
    sections = "|".join(key for key in valid_keys())
    for key in re.findall(rf"`\+*((?:{sections})(?:\.[a-z_]+)+)(?:=[^`]*)?`", document.read_text()):
        value = Config()
        is_module = (ROOT / key.replace(".", "/")).with_suffix(".py").exists()
        if not is_module and not key.endswith((".py", ".json")):
            if key.startswith("algorithm.options."):
                option = re.compile(rf"\b{key.removeprefix('algorithm.options.')}\"?: ")
                assert key.endswith(".factor") or any(option.search(path.read_text()) for path in WITH_OPTIONS), key
                continue
            for part in key.split("."):
                if isinstance(value, dict):  # its keys are the user's
                    break
                assert hasattr(value, part), key
                value = getattr(value, part)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if not target.startswith(("http", "#")):
            assert (document.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_place_named_in_the_documents_exists(document):
    text = document.read_text()
    for path in re.findall(r"`((?:trainer|conf|tests|docs|examples|benchmarks|tools)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"\b(test_\w+\.py)\b", text):
        assert list((ROOT / "tests").rglob(name)), name
    for module in re.findall(r"python -m ((?:trainer|tests|tools|benchmarks)[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_every_file_named_in_the_architecture_page_exists():
    names = re.findall(r"`([a-z_]+/(?:[a-z_]+\.py)?|[a-z_]+\.py)`", (ROOT / "docs/architecture.md").read_text())
    assert len(names) > 50, "the names are no longer found"
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for name in set(names) - tests:
        assert (ROOT / "trainer" / name).exists() or (ROOT / name).is_dir(), name


def test_the_architecture_page_lists_every_room_from_top_to_bottom():
    """Each room stands above the rooms that it imports."""
    page = (ROOT / "docs/architecture.md").read_text().partition("## The rooms")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| (`.*?`) \|", page, flags=re.MULTILINE)
    rooms = [name.removesuffix("/").removesuffix(".py") for cell in listed for name in re.findall(r"`(.*?)`", cell)]
    rooms = [room for room in rooms if room in ALLOWED]
    assert sorted(rooms) == sorted(ALLOWED)
    order = {room: place for place, room in enumerate(rooms)}
    for room, below in ALLOWED.items():
        assert all(order[room] < order[other] or {room, other} == {"main", "sft"} for other in below), room


def test_the_readme_links_to_every_page():
    linked = set(re.findall(r"\]\((docs/[\w./-]+)\)", README.read_text()))
    assert linked >= {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}


def test_every_example_is_listed():
    text = (ROOT / "examples/README.md").read_text()
    for script in SCRIPTS:
        assert f"`bash {script.relative_to(ROOT)}`" in text, script
    for file in (ROOT / "examples").rglob("*.*"):
        folder_or_file = file.relative_to(ROOT / "examples").parts[0]
        if "__pycache__" not in file.parts and folder_or_file != "README.md":
            assert f"({folder_or_file}" in text, file


def test_make_bench_runs_every_benchmark_that_needs_no_gpu():
    """Benchmarks are the modules with a command line, without the job of the peer, which two of them start."""
    named = re.search(r"^BENCH \?= (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split()
    runnable = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert sorted(named) == sorted(
        runnable - {"gpu", "gpu_plan", "learning", "learning_kinds", "learning_tool", "trl_job"}
    )


def test_every_make_target_in_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)\b(?=`|$|\s+#)", README.read_text(), flags=re.MULTILINE))
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_the_algorithms_page_is_fresh():
    assert (ROOT / "docs/algorithms.md").read_text() == page() + "\n", "run `make docs`"


def test_the_tests_that_contributing_names_exist_and_each_folder_of_tests_is_named():
    named = set(re.findall(r"`(tests/[^`]*)`", (ROOT / "CONTRIBUTING.md").read_text()))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []
    folders = {f"tests/{path.name}/" for path in (ROOT / "tests").iterdir() if (path / "__init__.py").exists()}
    folders = folders - {"tests/cpu/"} | {
        f"tests/cpu/{path.parent.name}/" for path in (ROOT / "tests/cpu").glob("*/__init__.py")
    }
    assert folders <= named
    promises = {str(path.relative_to(ROOT)) for path in (ROOT / "tests/cpu/kills").glob("test_*.py")}
    assert promises <= named, "a new promise needs a row"
