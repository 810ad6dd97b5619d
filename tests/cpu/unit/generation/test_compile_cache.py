"""Each engine of a machine compiles into a directory of its own."""

from __future__ import annotations

import os
import signal

from tests.support.forks import ForkedCommand, fork_server
from trainer.generation.vllm_engine import claim_directory, use_own_cache


def claim() -> None:
    """Be an engine."""
    use_own_cache()
    print(os.environ["VLLM_CACHE_ROOT"], flush=True)
    signal.pause()


def test_running_engines_have_directories_of_their_own_that_later_ones_use_again(tmp_path):
    def start() -> ForkedCommand:
        env = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path)}
        return fork_server().start(f"{__name__}:claim", cwd=tmp_path, env=env, stderr=2)

    def place(engine: ForkedCommand) -> str:
        assert engine.stdout is not None
        return engine.stdout.readline().strip()

    def kill(engine: ForkedCommand) -> None:
        engine.send_signal(signal.SIGKILL)
        assert engine.wait() == -signal.SIGKILL

    first = start()
    assert place(first) == f"{tmp_path}/engine-0"
    second = start()
    assert place(second) == f"{tmp_path}/engine-1"
    kill(second)
    third = start()
    assert place(third) == f"{tmp_path}/engine-1"
    for engine in (first, third):
        kill(engine)
    assert claim_directory(str(tmp_path)) == f"{tmp_path}/engine-0"


def test_a_place_that_cannot_be_written_is_left_alone(tmp_path):
    (tmp_path / "file").touch()
    assert claim_directory(str(tmp_path / "file")) is None
