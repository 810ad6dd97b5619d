"""Keys of inference servers, and of the jobs that use them."""

from __future__ import annotations

import pytest

from tests.support.config import config_of
from trainer.errors import UserError

ONE = "http://127.0.0.1:8000"


def served(*words: str) -> list[str]:
    return ["rollout.engine=server", *words]


def test_there_is_one_engine_for_each_server():
    assert config_of(served(f"rollout.urls=[{ONE},'http://[::1]:8001']")).num_engines == 2
    assert config_of(served(f"rollout.urls=[{ONE}]", "rollout.num_engines=1")).num_engines == 1
    assert config_of([]).num_engines == 1 and config_of(["rollout=server"]).rollout.urls == [ONE]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rollout.engine=server"], r"rollout.urls=\[\]: rollout.engine=server needs the addresses of servers"),
        ([f"rollout.urls=[{ONE}]"], "rollout.engine=vllm uses no servers; choose server"),
        (served(f"rollout.urls=[{ONE}]", "rollout.num_engines=3"), "one engine for each of the 1 rollout.urls; leave"),
        (served("rollout.urls=[http://me:secret@gpu:1]"), "must hold no password; the token of the servers is the"),
        (served("rollout.urls=[ftp://gpu]"), "ftp://gpu is no address of a server; write http://HOST:PORT"),
        (served("rollout.urls=[gpu]"), "gpu is no address of a server"),
        (served("rollout.urls=['http://gpu:99999']"), "http://gpu:99999 is no address of a server; write"),
        (served("rollout.urls=['http://gpu/v1']"), "http://gpu/v1 is no address of a server"),
        (served(f"rollout.urls=[{ONE},{ONE}/]"), "names a server twice"),
        (["inference.port=0"], "inference.port=0: must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused(words, sentence):
    with pytest.raises(UserError, match=sentence):
        config_of(words)
