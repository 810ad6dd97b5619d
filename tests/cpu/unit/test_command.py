"""The command `trainer`."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.jobs import environment
from trainer import __version__
from trainer.__main__ import COMMANDS, JOBS, main


def trainer(*words: str, **options) -> subprocess.CompletedProcess[str]:
    """Run `trainer WORDS` in a process of its own."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [sys.executable, "-m", "trainer", *words]
    return subprocess.run(command, text=True, timeout=300, env=environment(), check=False, **options)


@pytest.fixture
def said(monkeypatch, capsys):
    """The status and the texts on stdout and stderr of a command in this process."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trainer", *words])
        status = main() or 0
        return status, *capsys.readouterr()

    return call


def test_help_names_every_command_and_imports_next_to_nothing():
    code = (
        "import sys, trainer.__main__\n"
        "sys.argv = ['trainer']\n"
        "assert trainer.__main__.main() == 0\n"
        "sys.exit(str({'torch', 'numpy', 'yaml', 'hydra', 'omegaconf', 'trainer.config'} & set(sys.modules) or ''))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stderr.strip() == "" and done.stdout.startswith("usage: trainer COMMAND")
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS) and len(done.stdout.splitlines()) < 25


def test_version_and_help_of_each_command(said):
    assert said("--version") == (0, f"trainer {__version__}\n", "")
    for command in COMMANDS:
        if command not in JOBS:  # these need a main thread without handlers
            try:
                text = said(command, "--help")[1]
            except SystemExit as end:
                assert end.code == 0
                continue
            assert text.startswith(f"usage: trainer {command}"), command


def test_a_first_word_that_is_no_command_gets_one_sentence(said):
    for words, sentence in {
        ("trian",): "trian: no such command; did you mean train?",
        ("chekpoint", "ls", "x"): "chekpoint: no such command; did you mean checkpoint?",
        ("nothing",): "nothing: no such command; choose one of train, sft, dpo, rm, ",
        ("algorithm=ppo", "trainer.run_name=a b"): "write trainer train algorithm=ppo 'trainer.run_name=a b'",
        ("--cfg", "job"): "--cfg: a command comes first; write trainer train --cfg job",
    }.items():
        status, out, err = said(*words)
        assert (status, out) == (2, "") and err.startswith("error: ") and sentence in err and err.count("\n") == 1


def test_wrong_arguments_get_one_sentence_with_the_command_whose_help_lists_them(said):
    tools = [command for command in COMMANDS if command not in JOBS and command != "plan"]
    lacking = ("diagnose", "compare", "view", "report", "rollouts", "checkpoint")
    wrong = [*([command, "--nothing"] for command in tools), *([command] for command in lacking)]
    wrong += [["checkpoint", "ls"], ["checkpoint", "sl", "x"]]
    for words in wrong:
        status, out, err = said(*words)
        assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, words
        (named,) = re.findall(r"`trainer (.+?) --help`", err)
        assert named in (words[0], " ".join(words[:2])), words


def test_a_command_whose_reader_has_closed_the_pipe_ends_quietly():
    for words in (["checkpoint", "--help"], ["train", "--cfg", "job"]):
        reading, writing = os.pipe()
        os.close(reading)
        done = trainer(*words, stdout=writing)
        os.close(writing)
        assert (done.returncode, done.stderr) == (0, ""), words


def test_a_job_handles_signals_before_it_imports_anything_else():
    code = (
        "import signal, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'trainer.main':\n"
        "            ours = {name for name in sys.modules if name.startswith('trainer.')}\n"
        "            assert len(ours) < 10 and 'trainer.config' not in ours, ours\n"
        "            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None)\n"
        "            sys.exit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from trainer.__main__ import main\n"
        "sys.argv = ['trainer', 'train']\n"
        "main()\n"
        "sys.exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
