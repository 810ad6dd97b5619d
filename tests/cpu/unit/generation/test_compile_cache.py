"""Each engine of a machine compiles into a directory of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from trainer.generation.vllm_engine import claim_directory

CLAIMS = """
import os, sys
from trainer.generation.vllm_engine import use_own_cache
use_own_cache()
print(os.environ["VLLM_CACHE_ROOT"], flush=True)
sys.stdin.read()
"""


def test_running_engines_have_directories_of_their_own_that_later_ones_use_again(tmp_path):
    def start() -> subprocess.Popen:
        env = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", CLAIMS], env=env, **pipes)

    def place(engine: subprocess.Popen) -> str:
        assert engine.stdout is not None
        return engine.stdout.readline().strip()

    first = start()
    assert place(first) == f"{tmp_path}/engine-0"
    with start() as second:
        assert place(second) == f"{tmp_path}/engine-1"
        second.kill()
    with start() as third, first:
        assert place(third) == f"{tmp_path}/engine-1"
    assert claim_directory(str(tmp_path)) == f"{tmp_path}/engine-0"


def test_a_place_that_cannot_be_written_is_left_alone(tmp_path):
    (tmp_path / "file").touch()
    assert claim_directory(str(tmp_path / "file")) is None
