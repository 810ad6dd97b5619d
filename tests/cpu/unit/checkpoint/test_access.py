"""Access of ranks on other machines to the location of the checkpoints: real ranks, one with a host name of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.another_store import use_another_store
from tests.support.buckets import KEY
from tests.support.disks import DISK, Process
from tests.support.odd_files import config
from tests.support.ranks import local_cluster
from tests.support.runs import OpenRun, configured
from trainer.checkpoint.store import check_access, give_access
from trainer.errors import UserError
from trainer.learner.train_workers import TrainWorkers

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def ranks(tmp_path) -> Iterator[TrainWorkers]:
    """Rank 0 is on the machine of the driver. Rank 1 is on another one, which has no variables of object stores."""
    cfg = config(tmp_path / "run")
    with local_cluster(2, cfg, "cpu") as cluster:
        ranks = TrainWorkers(cluster.cfg, cluster)
        try:
            ranks.ask([1], Process(), "move", "elsewhere")
        except PermissionError as error:
            pytest.skip(str(error))
        ranks.ask([1], Process(), "forget", "AWS_")
        yield ranks


def test_ranks_use_the_credentials_of_the_driver(bucket_behind_proxy, ranks, tmp_path, monkeypatch):
    root = f"{bucket_behind_proxy}/run"
    monkeypatch.setenv("AWS_PROFILE_OF_NO_ONE", "chosen by the driver")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    ranks.ask([1], Process(), "set", "AWS_DEFAULT_REGION", "eu-central-1")
    give_access([None, root], ranks)
    check_access("trainer.ckpt_path", root, ranks)

    def seen(name: str) -> str | None:
        return ranks.ask([1], Process(), "get", name)[1]

    assert seen("AWS_ACCESS_KEY_ID") == KEY and seen("AWS_PROFILE_OF_NO_ONE") == "chosen by the driver"
    assert seen("AWS_DEFAULT_REGION") == "eu-central-1"
    assert seen("GOOGLE_APPLICATION_CREDENTIALS") is None, "the file is not there"
    assert ranks.ask([0], Process(), "get", "AWS_PROFILE_OF_NO_ONE")[0] == "chosen by the driver"
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of the driver's own key")
    give_access([root], ranks)
    assert seen("AWS_SESSION_TOKEN") is None, "it has a key, which that token does not go with"


def test_ranks_elsewhere_get_the_variables_of_another_kind_of_store(ranks, tmp_path, monkeypatch):
    """Its one entry names them. A machine with a key of its own keeps its own."""
    use_another_store(monkeypatch, tmp_path)
    for name in ("MEM_ACCOUNT", "MEM_KEY", "MEMORY", "AWS_REGION"):
        monkeypatch.setenv(name, "of the driver")
    ranks.ask([1], Process(), "forget", "MEM")
    give_access(["mem://bucket/run", str(tmp_path)], ranks)
    names = ("MEM_ACCOUNT", "MEM_KEY", "MEMORY", "AWS_REGION")
    seen = {name: ranks.ask([1], Process(), "get", name)[1] for name in names}
    assert seen == {"MEM_ACCOUNT": "of the driver", "MEM_KEY": "of the driver", "MEMORY": None, "AWS_REGION": None}
    ranks.ask([1], Process(), "set", "MEM_KEY", "its own")
    give_access(["mem://bucket/run"], ranks)
    assert ranks.ask([1], Process(), "get", "MEM_KEY")[1] == "its own"


def test_a_machine_without_access_to_the_object_store_is_named_at_the_start(bucket_behind_proxy, ranks):
    root = f"{bucket_behind_proxy}/run"
    ranks.ask([1], Process(), "set", "AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    give_access([None, root], ranks)
    with pytest.raises(UserError, match=rf"trainer.ckpt_path={root}: ranks on elsewhere cannot .*127.0.0.1:9.*store$"):
        check_access("trainer.ckpt_path", root, ranks)


def test_a_machine_that_does_not_see_the_directory_is_named_at_the_start(ranks, tmp_path, monkeypatch):
    """Each process sees another directory. Rank 0 is not asked: it is where the driver is."""
    for name in ("driver", "rank"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "driver")
    ranks.ask([1], Process(), "live_on", str(tmp_path / "rank"))
    with OpenRun(configured(tmp_path / "run", ckpt_path=DISK), {"step": 0}) as run:
        for lock in (None, "of an earlier run there"):
            with pytest.raises(UserError, match=f"{DISK}: ranks on elsewhere cannot write .*mount it on all of them"):
                run.directory.check_access(ranks)
            (tmp_path / "rank/disk").mkdir(exist_ok=True)
            (tmp_path / "rank/disk/.lock").write_text(str(lock))
        ranks.ask([1], Process(), "live_on", str(tmp_path / "driver"))
        run.directory.check_access(ranks)
        ranks.ask([1], Process(), "live_on", str(tmp_path / "rank"))
        run.directory.check_access(ranks)  # it is checked once
    with OpenRun(configured(tmp_path / "run", ckpt_path="of the driver", resume_mode="latest"), {"step": 0}) as run:
        run.directory.check_access(ranks)
