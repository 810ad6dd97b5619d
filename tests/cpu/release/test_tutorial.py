"""The tutorial, as a newcomer would follow it: every command of its four parts.

Those of part 4 that need GPUs are planned for these, and run on the CPU with a tiny model, two ranks and two engines.
Those for several nodes run on two, in namespaces of the kernel.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forks import fork_server
from tests.support.jobs import SMALL, comparable, environment, left_running, metrics, wait_until
from tests.support.nodes import Node, Nodes
from tests.support.pages import ROOT, files_of_page
from trainer.config import Config, compose
from trainer.models.tiny import TinyShape, build_tiny
from trainer.plan.hardware import parse_cluster
from trainer.plan.plan import make_plan

PARTS = sorted((ROOT / "docs/tutorial").glob("[1-4]-*.md"))
QUICK = ["rollout=transformers", "trainer.ray_address=processes", "logger.plot=false"]
SMALLER = [word for word in SMALL if not word.startswith(("trainer.total_steps", "trainer.ckpt_interval"))]

pytestmark = [pytest.mark.slow, pytest.mark.early]


def written(part: Path) -> list[str]:
    """The commands of a part as they stand there."""
    return re.findall(r"^```bash\n(.*?)^```", part.read_text(), flags=re.MULTILINE | re.DOTALL)


def blocks(part: Path) -> list[str]:
    """The commands of a part, smaller and without Ray and vLLM. What the page says of a key wins."""
    # A step is over sooner than a save on a busy machine, and the kill of part 3 comes behind a save.
    quick = " ".join(["trainer train", *SMALLER, *QUICK])
    return [
        block.replace("trainer train", quick).replace("python rows.py", f"{sys.executable} rows.py")
        for block in written(part)
    ]


@pytest.fixture(scope="module")
def lesson(tmp_path_factory):
    """Run blocks of commands in one directory, as a reader does; returns their output."""
    directory, programs = tmp_path_factory.mktemp("tutorial"), tmp_path_factory.mktemp("programs")
    fork_server().write_python(programs)
    env = {**environment(), "PATH": f"{programs}:{os.environ['PATH']}", "TRAINER_TEST_MARKER": str(directory)}

    def run(*commands: str, **more: str) -> str:
        output = ""
        for block in commands:
            done = subprocess.run(
                ["bash", "-euc", block],
                cwd=directory,
                env=env | more,
                capture_output=True,
                text=True,
                timeout=500,
            )
            output += done.stdout + done.stderr
            assert done.returncode == 0, output
            wait_until(lambda: not left_running(str(directory)))  # of a job that a block has killed
        return output

    run.directory = directory
    return run


def test_the_first_run(lesson):
    train, look, another = blocks(PARTS[0])
    lesson(train)
    written = {path.name for path in (lesson.directory / "outputs/first").iterdir()}
    named = re.findall(r"^\| `([\w.]+)/?` \|", PARTS[0].read_text(), flags=re.MULTILINE)
    assert len(named) == 7 and set(named) - {"report.png"} <= written
    assert "global_step_10" in lesson(look)
    assert "second" in lesson(another)


def test_the_readers_own_task_and_environment(lesson):
    assert files_of_page("docs/tutorial/2-own-task.md", lesson.directory) == [
        *("rows.py", "my_rewards.py", "second_chance.py")
    ]
    lesson(*blocks(PARTS[1]))
    rows = metrics(lesson.directory / "outputs/second_chance")
    assert len(rows) == 11 and "episode/second_tries/mean" in rows[-1]
    validation = lesson.directory / "outputs/second_chance/validation/step_10.jsonl"
    assert any('"again"' in json.dumps(json.loads(line)) for line in validation.read_text().splitlines())
    assert 0 < metrics(lesson.directory / "outputs/sorted")[-1]["reward/mean"] < 1


def test_a_killed_run_continues_and_ends_as_one_that_was_not_killed(lesson):
    killed, continued, whole = blocks(PARTS[2])
    # The job waits behind its seventh line: a busy machine may look there late.
    lesson(killed, TRAINER_FAILPOINT=f"logged,7,{lesson.directory}/reached")
    output = lesson(continued, whole)
    assert "resume verified: " in output
    runs = [comparable(metrics(lesson.directory / f"outputs/{name}")) for name in ("mine", "whole")]
    assert runs[0] == runs[1] and runs[0][-1]["step"] == 12

    # Part 4 goes on from here.
    lesson(blocks(PARTS[3])[0])
    rows = metrics(lesson.directory / "outputs/mine")
    assert rows[-1]["step"] == 15 and comparable(rows)[:13] == runs[0]
    assert "2 rank(s)" in (lesson.directory / "outputs/mine/log.txt").read_text()


def commands_for_gpus() -> tuple[str, list[list[str]]]:
    """The command of part 4 that asks whether it fits, and the overrides of those that train on GPUs."""
    _, one_node, nodes = written(PARTS[3])
    ask, *training = one_node.strip().splitlines()
    _, *several = nodes.replace("\\\n", "").strip().splitlines()
    commands = [shlex.split(line, comments=True) for line in (*training, *several)]
    assert all(words[:2] == ["trainer", "train"] for words in commands if words)
    return ask, [words[2:] for words in commands if words]


def layout(cfg: Config) -> tuple[int, int]:
    """Ranks, and engines with GPUs of their own."""
    return cfg.trainer.num_workers, 0 if cfg.rollout.colocate else cfg.num_engines


def test_what_needs_gpus_fits_them(lesson):
    ask, commands = commands_for_gpus()
    assert "It fits 8 H100" in lesson(ask)
    clusters = {layout(cfg): cfg for cfg in map(compose, commands)}
    assert set(clusters) == {(1, 0), (8, 0), (4, 4), (16, 8)}
    for (ranks, engines), cfg in clusters.items():
        count = ranks + engines
        assert make_plan(cfg, parse_cluster(f"{-(-count // 8)}x{min(count, 8)}xH100")).problems == ()


@pytest.fixture(scope="module")
def tiny_words(tmp_path_factory) -> list[str]:
    """What lets a command for GPUs train on the CPU: a tiny model, two questions, and few completions."""
    directory = tmp_path_factory.mktemp("tiny")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2}
    build_tiny(TinyShape(**shape, num_kv_heads=1, head_dim=16), str(directory / "model"))
    rows = [{"question": f"What is {n} and 1?", "answer": f"It is {n + 1}. #### {n + 1}"} for n in range(8)]
    (directory / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [
        *(f"model.path={directory}/model", f"data.train_files=[{directory}/rows.jsonl]"),
        *(f"data.val_files=[{directory}/rows.jsonl]", "data.val_size=4", "trainer.device=cpu"),
        *("trainer.ray_address=processes", "trainer.total_steps=2", "trainer.val_interval=2"),
        *("trainer.train_batch_size=4", "trainer.mini_batch_size=2", "rollout.n=2", "rollout.max_response_tokens=8"),
        *("rollout.engine=transformers", "reward.name=tests.support.hashed_reward:hashed", "logger.plot=false"),
    ]


@pytest.mark.parametrize("number", [1, 2])  # 0 is one rank, as in the other parts
def test_what_needs_gpus_trains_without_them_when_it_is_small(lesson, tiny_words, number):
    words = commands_for_gpus()[1][number]
    ranks, engines = (min(count, 2) for count in layout(compose(words)))
    small = [*tiny_words, f"trainer.num_workers={ranks}", f"rollout.num_engines={engines or ranks}"]
    small += [f"trainer.run_name=gpus_{number}", f"rollout.colocate={str(engines == 0).lower()}"]
    changed = {word.partition("=")[0] for word in small}
    lesson(shlex.join(["trainer", "train", *(w for w in words if w.partition("=")[0] not in changed), *small]))
    rows = metrics(lesson.directory / f"outputs/gpus_{number}")
    assert [row["step"] for row in rows][-2:] == [1, 2] and all(0 < row["reward/mean"] < 1 for row in rows[-2:])
    log = (lesson.directory / f"outputs/gpus_{number}/log.txt").read_text()
    assert f"{ranks} rank(s)" in log and f"{engines or ranks} transformers engine(s)" in log


@pytest.mark.timeout(900)
def test_several_nodes_train_in_the_cluster_that_the_page_tells_how_to_start(lesson, tiny_words, tmp_path):
    """On two machines. Where each has two processors, two ranks and two engines need both."""
    start, train = written(PARTS[3])[2].replace("\\\n", "").strip().splitlines()
    on_head, on_others = start.split("# on one node; on the others: ")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"  # the last two have `ip`
    env = environment() | {"PATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    log = tmp_path / "log"
    with Nodes() as nodes:
        head, other = nodes.add(), nodes.add()

        def run(node: Node, command: str) -> None:
            block = f"cd {lesson.directory} && {command.replace('HEAD', head.address)}"
            own = env | {"RAY_TMPDIR": str(node.directory)}  # the machines share the disk
            with log.open("w") as output:  # Ray's daemons keep it open
                words = node.command("bash", "-euc", block)
                done = subprocess.run(words, env=own, stdout=output, stderr=output, timeout=500)
            assert done.returncode == 0, log.read_text()

        for node, command in [(head, on_head), (other, on_others)]:
            run(node, f"ip route add default dev eth0 && {command}")
        small = [word for word in tiny_words if not word.startswith("trainer.ray_address=")]
        run(head, f"{train} trainer.num_workers=2 rollout.num_engines=2 trainer.run_name=nodes {shlex.join(small)}")
    assert [row["step"] for row in metrics(lesson.directory / "outputs/nodes")][-2:] == [1, 2]
