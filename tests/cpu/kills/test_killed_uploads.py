"""A run that is killed in every phase of a save to an object store, and continued on another machine."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from pathlib import Path

import pytest

from tests.support.buckets import make_bucket, use_s3
from tests.support.forks import fork_server
from tests.support.jobs import environment
from tests.support.toy import toy_config, toy_run
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.store import open_store
from trainer.process import time_limits

pytestmark = pytest.mark.slow

_STRAIGHT = ["begin", "parts_written", "manifest_written", "published", "hinted", "deleting"]
_names = itertools.count()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, and its initial weights."""
    model = tmp_path_factory.mktemp("start")
    run = tmp_path_factory.mktemp("whole")
    return toy_run(toy_config(run), model).learner.ranks.number, rows(run), model


@pytest.mark.parametrize(
    ("failpoint", "tiers"),
    [(f"save:{name}", False) for name in _STRAIGHT] + [("upload:published", True)],
)
def test_a_killed_run_continues_on_another_machine_as_if_uninterrupted(
    s3_url, whole, tmp_path, monkeypatch, failpoint, tiers
):
    number, expected, model = whole
    use_s3(monkeypatch, s3_url)
    root = make_bucket(f"killed-{next(_names)}") + "/run"
    stopped, local = tmp_path / "stopped", str(tmp_path / "disk") if tiers else ""
    nth = {"save:deleting": 1, "upload:published": 2}.get(failpoint, 3)  # uploads may skip steps, but not the last one
    kill_at(failpoint, nth, stopped, tmp_path / "first", root, local, model)
    steps = open_store(root).steps()
    for step in steps:
        manifests.verify(open_store(root).path(step), "hash")  # the older or the newer state, and both whole
    assert steps, "something was committed before"
    shutil.rmtree(tmp_path / "first")
    if tiers:
        shutil.rmtree(local)
    second = tmp_path / "second"
    monkeypatch.setattr(time_limits, "LOCK_LEASE_S", 1.0)
    continued = toy_run(toy_config(second, ckpt_path=root, max_ckpts_to_keep=2), model)
    assert continued.learner.ranks.number == number
    assert rows(second) == expected
    assert open_store(root).orphans() == {}


def kill_at(failpoint: str, nth: int, stopped: Path, run: Path, root: str, local: str, model: Path) -> None:
    environ = {**environment(), "TRAINER_FAILPOINT": f"{failpoint},{nth},{stopped}"}
    log = stopped.parent / "log"
    with log.open("w") as output:
        arguments = (str(run), root, local, str(model))
        job = fork_server().start(
            "tests.cpu.kills.test_killed_uploads:job", *arguments, cwd=log.parent, env=environ, stdout=output
        )
    while not stopped.exists():
        assert job.poll() is None, log.read_text()
        time.sleep(0.02)
    job.kill_group()
    job.wait()


def job(run: str, ckpt: str, local: str, model: str) -> None:
    tiers = {"ckpt_cache_dir": local} if local else {}
    toy_run(toy_config(Path(run), ckpt_path=ckpt, max_ckpts_to_keep=2, **tiers), Path(model))


def rows(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(("time/", "perf/"))} for line in lines]
