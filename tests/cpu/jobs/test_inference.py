"""Jobs that use inference servers: the same numbers as with engines of their own, whatever happens to the servers."""

from __future__ import annotations

import pytest

from tests.support.inference import Server
from tests.support.jobs import comparable, metrics, run_forked_job

SERVED = ["rollout.max_num_seqs=20"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("server") / "log", "inference.engine=transformers", *SERVED) as server:
        yield server.wait()


def test_a_job_on_a_server_has_the_numbers_of_one_with_its_own_engine(server, tmp_path):
    plain = run_forked_job("trainer.run_dir=plain", *SERVED, cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    served = run_forked_job(
        "trainer.run_dir=served", "rollout=server", f"rollout.urls=[{server.url}]", *SERVED, cwd=tmp_path
    )
    assert served.returncode == 0, served.stderr
    assert comparable(metrics(tmp_path / "served")) == comparable(metrics(tmp_path / "plain"))
    assert server.status()["job"] is None
