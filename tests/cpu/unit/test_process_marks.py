"""`make check` runs the tests that start no process of Python: which ones get the mark, and what fails without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support import process_marks
from tests.support.jobs import run_forked_job, run_job
from tests.support.process_marks import refuse_processes, watch
from tests.support.ranks import run_ranks
from tests.support.rewards import reward_pool
from trainer.cluster.ray_cluster import RayCluster


def helper() -> None:
    run_ranks(1, print)


class Helpers:
    def start(self) -> None:
        helper()


CLUSTERS = {"ray": RayCluster}
INTERPRETER = "executable"


@pytest.mark.parametrize(
    ("test", "is_marked"),
    [
        (lambda: run_job(cwd=None), True),
        (lambda: run_forked_job(cwd=None), True),
        (lambda: [helper() for _ in range(2)], True),
        (lambda: Helpers().start(), True),
        (lambda kind: CLUSTERS[kind](None, "cpu"), True),
        (lambda: reward_pool("length"), True),
        (lambda: subprocess.run([sys.executable, "-c", ""]), True),
        (lambda: subprocess.run(["sleep", "1"]), False),
        (lambda: print(INTERPRETER), False),
    ],
    ids=["job", "forked job", "ranks", "ranks of a method", "Ray", "sandbox", "command", "sleep", "nothing"],
)
def test_what_a_test_calls_decides_about_its_mark(test: Callable, is_marked: bool):
    assert process_marks._starts_processes(test) == is_marked


@pytest.fixture
def unmarked(request):
    """This test, as if it were without the mark."""
    process_marks._running[:] = [request.node]
    yield
    watch(request.node)


def test_a_process_of_python_is_refused_with_a_sentence(unmarked):
    with pytest.raises(
        pytest.fail.Exception, match=r"test_a_process_.* starts a process of Python \(-m trainer train\)"
    ):
        subprocess.Popen([sys.executable, "-m", "trainer", "train"])


def test_other_programs_are_not_refused(unmarked):
    subprocess.run(["true"], check=True)
    refuse_processes("open", ("a file",))


def test_marked_tests_may_start_what_they_like(request):
    request.node.add_marker(process_marks.MARK)
    watch(request.node)
    refuse_processes("subprocess.Popen", (sys.executable, [sys.executable, "-m", "trainer", "train"], "", {}))
