"""The ranks as the loop sees them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from tests.support.ranks import local_cluster
from trainer.config import Config
from trainer.learner.train_workers import TrainWorkers, _accepted
from trainer.parallel.batching import RankUpdate


def test_the_ranks_describe_their_axes():
    cfg = Config()
    cfg.trainer.context_parallel_size = 2
    with local_cluster(2, cfg, "cpu") as cluster:
        ranks = TrainWorkers(cluster.cfg, cluster)
        axes = {"dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 1}
        assert ranks.description == {"roles": ["policy"], "ranks": 2, "replicas": 1, "axes": axes}


def test_what_a_model_computes_otherwise_is_said_and_kept_for_manifests(caplog):
    verdicts = {"model.path=/a": ("another window", ["layer 7"]), "judge=/b": (None, [])}
    with caplog.at_level("INFO"):
        accepted = _accepted(verdicts)
    assert accepted == ["model.path=/a: another window"]
    assert [record.getMessage() for record in caplog.records] == [
        "model.path=/a: not compared with its own class: layer 7",
        "model.path=/a: another window; model.check=accept trains it nevertheless",
    ]


class Asked:
    """A value whose method runs in the rank processes."""

    def say(self, word: str) -> tuple[str, int]:
        return word, os.getpid()


def test_rank_processes_are_asked_by_their_number():
    with local_cluster(3, Config(), "cpu") as cluster:
        ranks = TrainWorkers(cluster.cfg, cluster)
        all_answers = ranks.ask(None, Asked(), "say", "x")
        assert sorted(all_answers) == [0, 1, 2] and len(set(all_answers.values())) == 3
        assert all(word == "x" for word, _ in all_answers.values())
        for numbers in ({1, 2}, {0, 2}):
            assert ranks.ask(numbers, Asked(), "say", "x") == {number: all_answers[number] for number in numbers}
        assert ranks.ask((), Asked(), "say", "x") == {}
        ranks.release()
        with pytest.raises(OSError, match="the ranks have ended"):
            ranks.ask(None, Asked(), "say", "x")


def test_the_driver_reads_the_result_of_an_update_without_the_model_classes():
    update = RankUpdate({"loss": 1.0}, np.arange(2), np.zeros((2, 3), np.float32), 6)
    code = (
        "import pickle, sys\n"
        "import trainer.learner.learner\n"
        f"assert pickle.loads({pickle.dumps(update)!r}).tokens == 6\n"
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
