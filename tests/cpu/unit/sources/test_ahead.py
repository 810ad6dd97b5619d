"""Which weights sample which step and which rows, whatever is killed; and threads that fail, hang or are stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.replies import Replies, sampling_source, source_of
from trainer.checkpoint.components import Restore
from trainer.checkpoint.manifest import Checkpoint, files_at
from trainer.config import EnvironmentConfig
from trainer.data.ledger import Ledger, SampleIndex
from trainer.errors import UserError
from trainer.generation.engine import Completion, Request
from trainer.models.tokenizer import load_tokenizer
from trainer.process import time_limits
from trainer.process.signals import SIGNALS
from trainer.sources.ahead import BatchesAhead, BatchProgress, BatchThread, CancelledBatch, steps_to_begin
from trainer.sources.batches import StepBatch
from trainer.sources.evaluation import RolloutEvaluator
from trainer.sources.sampling import SamplingSource, prompt_ledger


@pytest.mark.parametrize(
    ("version", "ahead", "total", "known", "expected"),
    [
        (1, 1, 9, (), [1, 2]),  # a run that begins
        (2, 1, 9, (2,), [3]),  # its second step
        (5, 2, 9, (5, 6), [7]),
        (5, 2, 6, (5, 6), []),  # the last steps
        (5, 1, 9, (5, 6, 7), []),  # the checkpoint was saved with more steps ahead
        (5, 3, 9, (5,), [6, 7, 8]),  # with fewer
        (5, 0, 9, (), [5]),
        (10, 2, 9, (), []),
    ],
)
def test_the_batches_that_begin_with_new_weights(version, ahead, total, known, expected):
    assert steps_to_begin(version, ahead, total, known) == expected


class Versions(Replies):
    """Engines with a version. A prompt of `dull` gets equal replies."""

    synced_bytes = 0

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer, lambda *_: "")
        self.version, self.open, self.dull = 0, 0, frozenset[str]()
        self.before_request: Any = lambda request: None
        self.aborted = threading.Event()

    def start(self, version: int, is_initial: bool, may_defer: bool) -> None:
        self.sync_weights(version, "abort")

    def sync_weights(self, version: int, running: str) -> None:
        assert self.open == 0, "weights change while a batch is generated"
        self.version = version

    def abort(self) -> None:
        self.aborted.set()

    def stream(self, requests: Sequence[Request], idle_s: float = math.inf) -> Iterator[dict[int, Completion]]:
        self.open += 1
        try:
            for index, request in enumerate(requests):
                self.before_request(request)
                prompt = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=True)
                length = 1 if prompt in self.dull or index % 2 == 0 else 2 + request.seed % 5
                yield {index: Completion([65] * length, [-1.0] * length, "stop", self.version)}
        finally:
            self.open -= 1


@contextlib.contextmanager
def versioned(
    root: Path, model: str, ahead: int = 1, reward: str = "tests.support.named_rewards:length"
) -> Iterator[tuple[SamplingSource, Versions]]:
    with source_of(root, model, lambda *_: "") as plain:
        cfg = plain.cfg
    cfg.rollout.ahead, cfg.trainer.train_batch_size, cfg.trainer.total_steps = ahead, 2, 6
    cfg.reward.name = reward
    engines = Versions(load_tokenizer(model))
    with sampling_source(cfg, engines, model) as source:
        yield source, engines


@pytest.fixture(scope="module")
def shared(tmp_path_factory, model) -> Iterator[tuple[SamplingSource, Versions]]:
    with versioned(tmp_path_factory.mktemp("shared"), model) as found:
        yield found


def save(source: SamplingSource, step: int, root: Path) -> Checkpoint:
    """Save what the source saves after a step. The files stay at `root`."""
    staging = files_at(str(root / f"step {step}"))
    (part,) = source.parts()
    staging.write("data.json", json.dumps(source.state_dict()).encode())
    entries = part.begin(staging)()
    return Checkpoint(staging.path, step, {"files": [{"path": entry.path} for entry in entries]})


def load(source: SamplingSource, checkpoint: Checkpoint) -> None:
    source.load_state_dict(json.loads(checkpoint.files.read("data.json")))
    (part,) = source.parts()
    part.load(checkpoint, Restore())


Trained = tuple[list[str], list[float | None], set[int], list[SampleIndex]]


def train(
    source: SamplingSource, first: int, last: int, kill_at: int | None, root: Path | None
) -> tuple[dict[int, Trained], Checkpoint | None]:
    """Train steps, and save every second one; returns what each step trained on, and the last checkpoint."""
    trained: dict[int, Trained] = {}
    saved = None
    source.start(first, is_initial=first == 1)
    for step in range(first, last + 1):
        episodes = source.next(step)
        if step == kill_at:
            break
        source.publish(step + 1)
        used = [row.index for row in source._batches[step].used]
        source.commit(step)
        versions = {version for episode in episodes for version in episode.samples[0].weight_versions}
        trained[step] = [e.uid for e in episodes], [e.reward for e in episodes], versions, used
        if step % 2 == 0 and root is not None:
            saved = save(source, step, root)
    return trained, saved


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 12),
    wanted=st.integers(1, 4),
    dull=st.sets(st.integers(0, 11)),
    lives=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 7)), min_size=1, max_size=4),
    is_dynamic=st.booleans(),
)
def test_every_step_has_its_weights_and_rows_whatever_is_killed(
    shared, tmp_path_factory, size, wanted, dull, lives, is_dynamic
):
    """Each life has a `rollout.ahead` of its own and ends with a kill. If it is always the same, nothing differs."""
    source, engines = shared
    cfg, steps = source.cfg, 6
    engines.dull = frozenset(f"p{index}" for index in dull)
    cfg.trainer.train_batch_size, cfg.trainer.total_steps = wanted, steps
    cfg.algorithm.dynamic_sampling, cfg.algorithm.max_gen_batches = is_dynamic, 2

    def begin() -> None:
        source.ledger = prompt_ledger(cfg, source.prompts[:size])
        source.load_state_dict(source.ledger.state_dict())

    def run_killed(aheads: Sequence[int]) -> dict[int, Trained]:
        root, committed, checkpoint = tmp_path_factory.mktemp("saves"), {}, None
        moments = [kill for _, kill in lives] + [None]
        for ahead, kill_at in zip(aheads, moments, strict=True):
            cfg.rollout.ahead = ahead
            begin()
            first, held = 1, set()
            if checkpoint is not None:
                load(source, checkpoint)
                first, held = checkpoint.step + 1, set(source._ahead.steps)
            committed = {step: one for step, one in committed.items() if step < first}
            trained, saved = train(source, first, steps, kill_at, root)
            for step, (_, _, versions, _) in trained.items():
                assert step in held or versions == {max(first, step - ahead)}
            committed |= trained
            checkpoint = saved or checkpoint
        rows = [row for step in sorted(committed) for row in committed[step][3]]
        assert len(set(rows)) == len(rows) and [*committed] == list(range(1, steps + 1))
        source.ledger = prompt_ledger(cfg, source.prompts[:size])
        assert rows == source.ledger.peek(len(rows)), "a row is skipped, or comes too early"
        return committed

    aheads = [ahead for ahead, _ in lives]
    run_killed([*aheads, aheads[-1]])
    cfg.rollout.ahead = aheads[0]
    begin()
    expected, _ = train(source, 1, steps, None, None)
    assert run_killed([aheads[0]] * (len(lives) + 1)) == expected


@pytest.mark.parametrize("engine, joins", [("transformers", False), ("vllm", False), ("vllm", True)])
def test_an_evaluation_runs_beside_a_batch_unless_the_company_of_requests_changes_bits(tmp_path, model, engine, joins):
    """A transformers engine generates one batch after another. One of vLLM mixes all requests that it has.

    With a stream of episodes in the run, an engine of vLLM sees to it that their company changes nothing.
    """
    with versioned(tmp_path, model) as (source, engines):
        source.cfg.rollout.engine, source.cfg.trainer.val_interval = engine, 1
        if joins:
            environment = EnvironmentConfig(name="a:A", schedule="stream")
            source.runner.cfg = dataclasses.replace(source.cfg, environment=environment)
        source.start(1, is_initial=True)
        source.next(1)
        source.publish(2)
        takes_turns = engine == "vllm" and not joins
        evaluated, begun, most = threading.Event(), threading.Event(), []

        def wait(request: Request) -> None:
            most.append(engines.open)
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                evaluated.wait(0.2 if takes_turns else 5)

        engines.before_request = wait
        source.commit(1)  # step 3 begins
        begun.wait()
        prompts, source.cfg.trainer.val_interval = source.prompts[:2], 1
        RolloutEvaluator(source.cfg, source.runner, prompts).evaluate(1)
        evaluated.set()
        source.next(2)
        source.publish(3)
        assert max(most) == (1 if takes_turns else 2)


def held_up(completion: str, answer: str) -> float:
    """A reward that takes as long as there is a file."""
    while os.path.exists(os.environ["TEST_HELD_UP"]):
        time.sleep(0.01)
    return float(len(completion))


def test_rewards_of_a_batch_are_computed_while_the_next_one_is_generated(tmp_path, model, monkeypatch):
    file, generates = tmp_path / "file", threading.Event()
    monkeypatch.setenv("TEST_HELD_UP", str(file))
    with versioned(tmp_path, model, reward=f"{__name__}:held_up") as (source, engines):

        def look(request: Request) -> None:
            name = threading.current_thread().name
            if name == "batch of step 2" and not file.exists():
                assert source._ahead.thread(1).has_ended(30)
                file.touch()
            if name == "batch of step 3":
                generates.set()

        engines.before_request = look
        source.start(1, is_initial=True)
        source.next(1)
        source.publish(2)
        source.commit(1)
        assert generates.wait(30) and file.exists() and not source._ahead.thread(2).has_ended()
        file.unlink()
        assert len(source.next(2)) == 4


def test_environments_answer_the_last_replies_while_the_next_batch_is_generated(tmp_path, model):
    """They answer only after the engines have got new weights."""
    gate, lines = (
        tmp_path / "gate",
        [json.dumps({"prompt": f"p{i}", "until": str(tmp_path / "gate")}) for i in range(12)],
    )
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with versioned(tmp_path, model) as (plain, _):
        cfg = plain.cfg
    cfg.data.train_files = [str(tmp_path / "rows.jsonl")]
    cfg.environment = EnvironmentConfig(name="tests.support.environments:AsyncEcho", max_turns=1, timeout_s=20)
    cfg.rollout.max_prompt_tokens = 64
    engines = Versions(load_tokenizer(model))
    with sampling_source(cfg, engines, model) as source:
        source.start(1, is_initial=True)
        source.publish(2)
        assert engines.version == 2
        gate.touch()
        assert {episode.status for episode in source.next(1)} == {"turns"}


def test_the_main_thread_hangs_if_the_thread_of_a_batch_hangs(monkeypatch):
    """So the watching process ends a job whose curriculum never returns."""
    monkeypatch.setattr(time_limits, "POLL_INTERVAL_S", 0.01)
    moves, end = threading.Event(), threading.Event()

    def make(progress: BatchProgress) -> StepBatch:
        while not end.wait(0.002):
            if moves.is_set():
                progress.check()
        return StepBatch([], [], {})

    counts = []
    for does_move in (False, True):
        (moves.set if does_move else moves.clear)()
        end.clear()
        batch = BatchThread(3, 2, "history", make, None)
        before = SIGNALS.safe_points
        threading.Timer(0.5, end.set).start()
        assert batch.result() == StepBatch([], [], {})
        counts.append(SIGNALS.safe_points - before)
    assert counts[0] <= 1 and counts[1] > 3


def test_a_batch_that_is_cancelled_ends_and_so_do_those_behind_it(monkeypatch):
    monkeypatch.setattr(time_limits, "POLL_INTERVAL_S", 0.01)
    batches, aborted, made = BatchesAhead(), threading.Event(), []

    def make(progress: BatchProgress) -> StepBatch:
        made.append(progress.step)
        aborted.wait()
        progress.check()
        raise AssertionError("it is not needed")

    for step in (1, 2, 3):
        batches.begin(step, 1, "history", make)
    threads = [batches.thread(step) for step in (1, 2, 3)]
    batches.cancel(aborted.set)
    assert batches.steps == set() and made in ([1], []) and all(thread.has_ended() for thread in threads)
    with pytest.raises(CancelledBatch):
        threads[2].result()


def test_a_batch_behind_one_that_has_failed_is_not_made():
    batches = BatchesAhead()

    def fail(progress: BatchProgress) -> StepBatch:
        raise UserError(f"step {progress.step}")

    for step in (5, 6):
        batches.begin(step, 5, "history", fail)
    batches.wait_generated()  # the step that is trained now does not fail
    with pytest.raises(UserError, match="^step 5$"):
        batches.thread(5).result()
    with pytest.raises(CancelledBatch, match="the rollouts of step 5 have failed"):
        batches.thread(6).result()


def test_a_request_that_begins_while_the_run_goes_back_is_ended_too(monkeypatch):
    monkeypatch.setattr(time_limits, "POLL_INTERVAL_S", 0.01)
    aborts, batches = [], BatchesAhead()

    def make(progress: BatchProgress) -> StepBatch:
        while not aborts:  # it has looked whether it is needed before
            time.sleep(0.001)
        count = len(aborts)
        while len(aborts) < count + 1:  # a request that the first abort has not seen
            time.sleep(0.001)
        raise RuntimeError("aborted")

    batches.begin(1, 1, "history", make)
    thread = batches.thread(1)
    batches.cancel(lambda: aborts.append(1))
    assert thread.has_ended() and len(aborts) > 1


def test_the_rewards_of_held_batches_count_in_the_largest_reward(tmp_path, model):
    with versioned(tmp_path, model) as (source, _):
        source.start(1, is_initial=True)
        source.next(1)
        source.publish(2)
        source.commit(1)
        checkpoint = save(source, 1, tmp_path)
        load(source, checkpoint)
        source.cfg.rollout.ahead, source.runner.largest_reward = 0, -1.0
        episodes = source.next(2)
        assert source.runner.largest_reward == max(episode.reward for episode in episodes)


def test_two_threads_that_come_to_an_epoch_at_once_ask_the_curriculum_once():
    """It may take long: the training thread asks how far the epoch is while a batch ahead draws rows."""
    asked, both = [], threading.Barrier(3)

    def slow(rows, epoch, rewards):
        asked.append(epoch)
        time.sleep(0.2)
        return range(len(rows))

    ledger = Ledger(list("abcd"), 1, "prompts", lambda: "", curriculum=slow, curriculum_name="slow")
    drawn = []

    def draw() -> None:
        both.wait()
        drawn.append(ledger.peek(2))

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    both.wait()
    for thread in threads:
        thread.join()
    assert asked == [0] and drawn[0] == drawn[1]
