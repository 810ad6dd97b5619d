"""The command `trainer`."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.jobs import environment
from trainer import __version__
from trainer.__main__ import COMMANDS, JOBS


def trainer(*words: str, program: tuple[str, ...] = ("-m", "trainer"), **options) -> subprocess.CompletedProcess[str]:
    """Run `trainer WORDS`."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(
        [sys.executable, *program, *words], text=True, timeout=300, env=environment(), check=False, **options
    )


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(words):
    done = trainer(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: trainer COMMAND")
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout
    assert len(done.stdout.splitlines()) < 25


def test_help_imports_next_to_nothing():
    code = (
        "import sys, trainer.__main__\n"
        "sys.argv = ['trainer']\n"
        "assert trainer.__main__.main() == 0\n"
        "sys.exit(str({'torch', 'numpy', 'yaml', 'hydra', 'omegaconf', 'trainer.config'} & set(sys.modules) or ''))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stderr.strip() == ""


def test_the_version():
    done = trainer("--version")
    assert (done.returncode, done.stdout) == (0, f"trainer {__version__}\n")


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["trian"], "trian: no such command; did you mean train?"),
        (["chekpoint", "ls", "x"], "chekpoint: no such command; did you mean checkpoint?"),
        (["nothing"], "nothing: no such command; choose one of train, sft, "),
        (["algorithm=ppo", "trainer.run_name=a b"], "write trainer train algorithm=ppo 'trainer.run_name=a b'"),
        (["--cfg", "job"], "--cfg: a command comes first; write trainer train --cfg job"),
    ],
)
def test_a_first_word_that_is_no_command_gets_one_sentence(words, sentence):
    done = trainer(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and sentence in done.stderr and done.stderr.count("\n") == 1


UNKNOWN = [
    *([command, "--nothing"] for command in COMMANDS if command != "evaluate"),
    *(["evaluate", "model.path=x", "data=gsm8k", "--nothing"], ["evaluate", "compare", "a", "b", "--nothing"]),
    *(["view", "x", "--nothing"], ["checkpoint", "ls", "x", "--nothing"], ["checkpoint", "sl", "x"]),
]
LACKING = [
    *([command] for command in ("diagnose", "compare", "view", "report", "rollouts", "checkpoint")),
    *(["checkpoint", "ls"], ["evaluate", "compare", "a"]),
]


@pytest.mark.parametrize("words", [*UNKNOWN, *LACKING], ids=" ".join)
def test_wrong_arguments_get_one_sentence_with_the_command_whose_help_lists_them(words):
    done = trainer(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    (named,) = re.findall(r"`trainer (.+?) --help`", done.stderr)
    assert named in (words[0], " ".join(words[:2]))


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_and_its_module_print_the_same_help(command):
    of_command, module = trainer(command, "--help"), COMMANDS[command][0].removesuffix(".__main__")
    assert (of_command.returncode, of_command.stderr) == (0, "")
    assert of_command.stdout.startswith(f"usage: trainer {command}")
    if not module.startswith(("trainer.config.", "trainer.data.", "trainer.reports.")):  # `python -m` runs the others
        of_module = trainer("--help", program=("-m", module))
        assert (of_module.returncode, of_module.stdout, of_module.stderr) == (0, of_command.stdout, "")


@pytest.mark.parametrize("words", [[], *([command, "--help"] for command in COMMANDS), ["train", "--cfg", "job"]])
def test_a_command_whose_reader_has_closed_the_pipe_ends_quietly(words):
    reading, writing = os.pipe()
    os.close(reading)
    done = trainer(*words, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", JOBS)
def test_a_job_handles_signals_before_it_imports_anything_else(command):
    code = (
        "import signal, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {COMMANDS[command][0].removesuffix('.__main__')!r}:\n"
        "            ours = {name for name in sys.modules if name.startswith('trainer.')}\n"
        "            modules = {'__main__', 'process', 'process.signals', 'process.time_limits', 'errors'}\n"
        "            assert ours == {f'trainer.{name}' for name in modules}, ours\n"
        "            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None)\n"
        "            sys.exit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from trainer.__main__ import main\n"
        f"sys.argv = ['trainer', {command!r}]\n"
        "main()\n"
        "sys.exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
