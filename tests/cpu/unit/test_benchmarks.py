"""The benchmarks: the driver and the rendezvous are measured at small sizes, and the jobs of the others are composed.

The largest sizes, and the jobs themselves, are run by `make bench`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import pickle
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks import (
    age,
    ahead,
    driver_scale,
    journal,
    learning,
    learning_kinds,
    learning_tool,
    lost_rank,
    plan,
    recovery,
    rendezvous,
    resume_vs_trl,
    step_time,
    trace,
    vs_trl,
    warm_servers,
)
from trainer.config import compose
from trainer.config.command_line import refuse_unread
from trainer.config.schema import is_name

ROOT = Path(__file__).parents[3]
PEER = argparse.Namespace(seed=1, steps=28, save_every=5, lr=1e-3, data="/rows.jsonl", overrides=[])


def size(answers: list) -> int:
    return sum(len(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)) for answer in answers)


def test_the_driver_moves_the_arrays_of_all_ranks_and_engines():
    ranks, engines, prompts, n, tokens = 4, 2, 64, 4, 256
    parts = {part.name: part for part in driver_scale.measure(ranks, engines, prompts, n, tokens)}
    numbers = 4 * prompts * n * tokens  # bytes of one number for each token
    scored = numbers + numbers // 2  # the reference scores all rows; the update scores the first mini-batch itself
    assert parts["a call of all ranks"].received == size([None] * ranks)
    files = [driver_scale.FakeRank(rank).finish_save() for rank in range(ranks)]
    assert parts["begin and end of a save"].received == size([*files, *[None] * ranks])
    for name, sent, received in (
        ("requests to engines and back", 0, 2 * numbers * 3 // 4),  # tokens and log-probs of the completions
        ("scores of two roles, advantages", 2 * scored, scored),  # tokens and mask
        ("update", None, numbers // 2),
    ):
        assert received <= parts[name].received < 1.1 * received, name
        assert sent is None or sent <= parts[name].sent <= 1.1 * sent, name
    assert parts["update"].sent > 2 * numbers


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "processes"), [(4, 2), (2, 3)])
def test_all_ranks_meet_at_the_store(ranks, processes):
    found = rendezvous.measure(ranks, processes, groups=2)
    assert len(found) == ranks
    for connected, read, met in found:
        assert 0 < connected <= read <= met
    assert max(read for _, read, _ in found) <= min(met for _, _, met in found), "one has not waited for the others"


def jobs() -> Iterator[tuple[str, Callable[[str], object]]]:
    """Yield the module of each benchmark with what starts one of its jobs in a directory."""
    for workload in ahead.WORKLOADS.values():
        for words in workload.settings.values():
            yield "ahead", partial(ahead.run, workload, words, [])
    for words in journal.WORKLOADS.values():
        yield "journal", partial(journal.train, steps=3, overrides=words)
    for name in plan.JOBS:
        yield "phases", lambda directory, name=name: plan.compare_job(name, "/model", directory, 6)
    for preset, steps_ahead in (("grpo", 0), ("ppo", 1)):
        yield "learning", partial(learning.Job(preset, steps_ahead, 1).run, 40, [])
    for words in learning_tool.jobs([1]).values():
        yield "learning_tool", partial(learning_tool.run, overrides=words)
    for number in range(8):
        yield "learning_kinds", partial(train_kind, number)
    for words in ((), ("rollout.journal=false",)):
        yield "recovery", lambda directory, words=words: recovery.run(directory, 3, 1.0, *words)
    for words in recovery.TRAJECTORIES.values():
        yield "recovery", lambda _, words=words: subprocess.run(recovery.trajectory_command("run", words), check=True)
    yield "lost_rank", lambda directory: lost_rank.run("/model", f"{directory}/run", 3, "trainer.copy_steps=true")
    words = [*age.JOB, "trainer.total_steps=10"]
    yield "age", lambda directory: age.measure(".", [*words, f"trainer.run_dir={directory}"])
    yield "resume_vs_trl", lambda directory: resume_vs_trl.Ours(PEER, "/model", PEER.data).run(Path(directory))
    for algorithm in ("grpo", "ppo"):
        yield "step_time", partial(step_time.run, algorithm, 2, 3)
    yield "trace", partial(trace.train, steps=3, overrides=[])
    for dtype in ("float32", "bfloat16"):
        yield "vs_trl", partial(vs_trl.run_ours, "/model", dtype, PEER)
    yield "warm_servers", lambda directory: warm_servers.serving(list(warm_servers.COMMON), directory).__enter__()
    for words in warm_servers.ways("http://127.0.0.1:8000").values():
        given = [*warm_servers.COMMON, "trainer.resume_mode=latest", "trainer.ray_address=processes", *words]
        yield "warm_servers", lambda _, given=given: warm_servers.start(given).wait()


def train_kind(number: int, directory: str) -> None:
    bench, rollouts = learning_kinds.Benchmark(directory), Path(directory) / "rollouts"
    rollouts.mkdir()
    (rollouts / "step_1.arrow").touch()
    bench.train(learning_kinds.kinds(bench, "/start", "/teacher", "/player", directory, 1)[number], "job", 1)


@pytest.fixture
def pop_command(tmp_path, monkeypatch) -> Callable[[], list[str]]:
    """Give the test a program in place of Python that keeps its words, and fails. The function returns them, once."""
    program, words = tmp_path / "program", tmp_path / "words"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > '{words}'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))

    def pop() -> list[str]:
        found = words.read_text().splitlines()
        words.unlink()
        return found

    return pop


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted({name for name, _ in jobs()}))
def test_the_jobs_of_a_benchmark_read_all_their_words(tmp_path, pop_command, name):
    for number, start in enumerate([start for one, start in jobs() if one == name]):
        directory = tmp_path / str(number)
        directory.mkdir()
        # The benchmark says that its job has failed.
        with contextlib.suppress(SystemExit, AssertionError, subprocess.CalledProcessError):
            start(str(directory))
        flag, module, *words = pop_command()
        assert flag == "-m" and module in ("trainer", "trainer.inference")
        words = [word for word in words if word != "train"]
        config = compose(words)
        if module != "trainer.inference":  # a server reads the words of its jobs too
            refuse_unread(words, config)


def test_every_benchmark_that_starts_a_job_is_among_them():
    starting = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if '"-m"' in path.read_text()}
    assert starting == {name for name, _ in jobs()}


def test_the_keys_that_benchmarks_set_are_in_the_schema():
    """A wrong name would be a new attribute, which nothing reads."""
    found = 0
    for path in (ROOT / "benchmarks").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                before, cfg, key = ast.unparse(node).rpartition("cfg.")
                if cfg and before in ("", "self."):
                    found += 1
                    assert is_name(key), f"{path.name}:{node.lineno}: {key}"
    assert found > 30
