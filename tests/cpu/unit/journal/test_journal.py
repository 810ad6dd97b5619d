"""The journal: what is durable, what is found again, what is deleted."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.checkpoint.storage import open_storage
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.journal.history import Identity, after, identity
from trainer.journal.journal import Journal

SETTINGS = Identity("rollouts", "updates")


def group(name: str, tokens: int = 3, reward: float | None = 0.5) -> list[Episode]:
    sample = Sample(
        np.arange(tokens, dtype=np.int32), np.ones(tokens, np.float32), np.zeros(tokens, np.float32), (1, 1)
    )
    return [Episode(f"{name}:{i}", name, [sample], reward) for i in range(2)]


def opened(root: Path, step: int = 0, history: str = "start", settings: Identity = SETTINGS, **options: Any) -> Journal:
    journal = Journal(str(root), settings, options.pop("fence", lambda: None), **options)
    journal.start(step, history)
    return journal


def train(journal: Journal, steps: Iterator[int] | range) -> dict[int, bool]:
    """Train steps of two groups each; returns whether both were found."""
    found = {}
    for step in steps:
        keys = [journal.key(step, name) for name in "ab"]
        known = journal.replay.find(step, keys)
        made = {key: known.get(key) or group(f"{step}{name}") for key, name in zip(keys, "ab", strict=True)}
        journal.add(step, {key: one for key, one in made.items() if key not in known})
        journal.wait()
        journal.trained([episode for one in made.values() for episode in one])
        found[step] = len(known) == 2
    return found


def files(root: Path) -> list[str]:
    return sorted(os.listdir(root / ".journal"))


def steps_on_disk(root: Path) -> set[int]:
    return {int(name.split("-")[0].removeprefix("step_")) for name in files(root) if name.startswith("step_")}


def test_steps_behind_the_checkpoint_come_back_and_the_next_is_generated(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    first = opened(tmp_path)
    assert not any(train(first, range(1, 5)).values())
    histories = [after("start", [*group("1a"), *group("1b")], SETTINGS)]
    again = opened(tmp_path, 1, histories[0])
    assert train(again, range(2, 6)) == {2: True, 3: True, 4: True, 5: False}
    assert "of steps 2 to 4, 6 groups came from the journal and 0 were generated" in caplog.text
    assert "not used" not in caplog.text


def test_a_resumed_run_that_finds_no_records_says_so_and_a_new_one_does_not(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    opened(tmp_path / "new", tells_lack=True)
    opened(tmp_path / "evaluation", 5, "of a checkpoint")
    assert not caplog.messages
    opened(tmp_path / "fork", 5, "of the parent", tells_lack=True)
    assert caplog.messages == ["rollout.journal: there are no records of the steps after 5"]


def ahead(journal: Journal, step: int, older: str) -> bool:
    """Sample the step after `step` by older weights, and then evaluate `step`; returns whether both were found."""
    keys = {
        older: journal.key(step + 1, "ahead", history=older),
        journal.history: journal.key(step, "val", history=journal.history),
    }
    steps = dict(zip(keys, (step + 1, step), strict=True))
    with ThreadPoolExecutor(1) as other:  # the thread that samples is not the one that trains
        known = {of: other.submit(journal.replay.find, steps[of], [key]).result() for of, key in keys.items()}
        for of, key in keys.items():
            if not known[of]:
                other.submit(journal.add, steps[of], {key: group(f"{step}{of}")}, of).result()
    journal.wait()
    return all(known.values())


def test_steps_ahead_come_back_by_the_history_of_older_weights_in_any_order(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    histories = ["start"]
    for found in (False, True):
        journal = opened(tmp_path)
        for step in range(1, 4):
            journal.trained(group(str(step)))
            histories.append(journal.history)
            assert ahead(journal, step, histories[step - 1]) == found
        journal.close()
    assert "6 groups came from the journal and 0 were generated" in caplog.text and "not used" not in caplog.text
    assert not opened(tmp_path).replay.find(2, [journal.key(2, "ahead", history=histories[1])]), "other weights"


def test_only_the_thread_that_trains_knows_the_weights_of_now(tmp_path):
    journal = opened(tmp_path)
    calls = [
        lambda: journal.history,
        lambda: journal.key(1),
        lambda: journal.add(1, {"k": group("a")}),
        lambda: journal.trained([]),
        journal.wait,
        journal.close,
    ]
    with ThreadPoolExecutor(1) as other:
        for call in calls:
            with pytest.raises(AssertionError, match="only the thread that trains"):
                other.submit(call).result()
    journal.close()


def test_what_a_late_thread_adds_after_the_end_starts_no_thread(tmp_path):
    journal = opened(tmp_path)
    journal.add(1, {"k": group("a")})
    journal.close()
    before = set(threading.enumerate())
    with ThreadPoolExecutor(1) as other:
        other.submit(journal.add, 1, {"late": group("b")}, "start").result()
    assert set(threading.enumerate()) <= before


def test_a_wait_ends_while_another_thread_adds_without_end(tmp_path):
    journal, is_over = opened(tmp_path), threading.Event()

    def add() -> None:
        for number in itertools.count():
            if is_over.wait(0.01):
                return
            journal.add(number, {str(number): group("a")}, "start")

    with ThreadPoolExecutor(1) as other:
        adding = other.submit(add)
        journal.add(1, {"mine": group("a")})
        journal.wait()
        is_over.set()
        adding.result()
    journal.close()
    assert opened(tmp_path).replay.find(1, ["mine"])


@pytest.mark.parametrize("was_killed", [False, True])
def test_a_step_waits_until_its_record_would_survive_the_machine(tmp_path, monkeypatch, was_killed):
    """Content, name and directory are synchronised, in this order; a kill of the process alone could not show it."""
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.replace

    def record(call: str, path: str) -> None:
        if path.startswith(str(tmp_path)):
            calls.append((call, path))

    def record_fsync(handle: int) -> None:
        record("fsync", os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def record_rename(source: str, target: str) -> None:
        record("rename", target)
        rename(source, target)

    if was_killed:  # when it had made the directory
        (tmp_path / ".journal").mkdir()
    journal = opened(tmp_path)
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_rename)
    journal.add(1, {"a": group("a")})
    journal.wait()
    folder = str(tmp_path / ".journal")
    path = os.path.join(folder, *files(tmp_path))
    written = [("fsync", f"{path}.tmp"), ("rename", path), ("fsync", folder)]
    assert calls == [*written, ("fsync", str(tmp_path))]
    journal.close()


def test_groups_of_a_step_that_was_cut_off_come_back(tmp_path):
    journal = opened(tmp_path)
    key, other = journal.key(1, "a"), journal.key(1, "b")
    journal.add(1, {key: group("a")})
    journal.wait()
    found = opened(tmp_path).replay.find(1, [key, other])
    assert list(found) == [key] and found[key][0].uid == "a:0"


def test_an_evaluation_that_the_run_leaves_out_is_of_no_other_history(tmp_path, caplog):
    """The run had ended with step 1 and evaluated it; now it trains on."""
    caplog.set_level(logging.INFO)
    journal = opened(tmp_path)
    train(journal, range(1, 2))
    journal.add(1, {journal.key(1, "val"): group("val")})
    journal.close()
    train(opened(tmp_path), range(1, 4))
    assert "2 groups came from the journal and 0 were generated; not used: 1 of another config, code" in caplog.text


@pytest.mark.parametrize(("history", "settings"), [("another", SETTINGS), ("start", Identity("other", "updates"))])
def test_records_of_another_history_or_config_are_not_used(tmp_path, caplog, history, settings):
    caplog.set_level(logging.INFO)
    train(opened(tmp_path), range(1, 2))
    journal = opened(tmp_path, 0, history, settings)
    assert train(journal, range(1, 2)) == {1: False}
    journal.close()
    assert "0 groups came from the journal and 2 were generated; not used: 2 of another config" in caplog.text


def test_another_update_changes_the_history_of_the_next_step_and_not_its_own(tmp_path):
    train(opened(tmp_path), range(1, 4))
    assert train(opened(tmp_path, settings=Identity("rollouts", "other")), range(1, 3)) == {1: True, 2: False}


@given(
    st.dictionaries(st.sampled_from(["rollout.n", "reward.name", "trainer.seed"]), st.integers(0, 2)),
    st.dictionaries(st.sampled_from(["rollout.n", "reward.name", "trainer.seed"]), st.integers(0, 2)),
    st.sampled_from(["w", "v"]),
)
def test_settings_have_the_same_identity_only_if_they_are_equal(one, other, weights):
    same = one == other and weights == "w"
    assert (identity(one, {}, "w") == identity(other, {}, weights)) == same
    assert (identity({}, one, "w").updates == identity({}, other, weights).updates) == same


@pytest.mark.parametrize("damage", ["cut", "changed", "renamed"])
def test_a_damaged_file_is_named_and_its_groups_are_generated_again(tmp_path, caplog, damage):
    caplog.set_level(logging.INFO)
    train(opened(tmp_path), range(1, 3))
    path = next(path for path in (tmp_path / ".journal").iterdir() if path.name.startswith("step_1-"))
    data = path.read_bytes()
    if damage == "renamed":
        path.rename(path.with_name(f"step_1-7-{'0' * 32}.arrow"))
        path = path.with_name(f"step_1-7-{'0' * 32}.arrow")
    else:
        path.write_bytes(data[:-9] if damage == "cut" else data[:50] + bytes([data[50] ^ 1]) + data[51:])
    journal = opened(tmp_path)
    assert train(journal, range(1, 3)) == {1: False, 2: True}, "the same groups again give the same history"
    journal.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and path.name in warnings[0]
    assert "2 groups came from the journal and 2 were generated" in caplog.text


def test_records_are_kept_behind_the_oldest_step_that_a_resume_may_begin_at(tmp_path):
    journal = opened(tmp_path)
    train(journal, range(1, 6))
    journal.remove_until(lambda: 0)
    journal.remove_until(lambda: 3)
    assert journal.settled(10)
    assert steps_on_disk(tmp_path) == {4, 5}


def test_a_run_that_goes_back_generates_anew(tmp_path):
    journal = opened(tmp_path)
    train(journal, range(1, 5))
    journal.remove_after(2)
    assert steps_on_disk(tmp_path) == {1, 2}


def test_a_job_that_lost_its_directory_records_nothing_and_hears_of_it(tmp_path):
    def fence() -> None:
        raise UserError("lost the run directory")

    journal = opened(tmp_path, fence=fence)
    journal.add(1, {journal.key(1): group("a")})
    with pytest.raises(UserError, match="lost the run directory"):
        journal.wait()
    assert not (tmp_path / ".journal").exists()


def test_a_journal_that_is_off_keeps_the_history_alone(tmp_path):
    off, on = opened(tmp_path / "off", is_on=False), opened(tmp_path / "on")
    train(off, range(1, 3)), train(on, range(1, 3))
    assert off.history == on.history and not (tmp_path / "off").exists()


def test_a_directory_that_cannot_be_written_stops_the_journal_with_one_warning(tmp_path, caplog):
    (tmp_path / ".journal").write_text("a file is here")
    journal = opened(tmp_path)
    train(journal, range(1, 4))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "training continues" in warnings[0]


def test_the_journal_gives_its_room_to_a_checkpoint_until_the_ranks_start_again(tmp_path, caplog):
    caplog.set_level("WARNING")
    journal = opened(tmp_path)
    train(journal, range(1, 4))
    with ThreadPoolExecutor(1) as saves:
        for _ in range(2):
            saves.submit(journal.free_space).result()
    train(journal, range(4, 6))
    assert files(tmp_path) == []
    (warning,) = caplog.messages
    assert "rollouts are not recorded any more (a checkpoint has found the disk full); training continues" in warning
    journal.start(5, journal.history)
    train(journal, range(6, 8))
    journal.close()
    assert steps_on_disk(tmp_path) == {6, 7}


def test_a_full_disk_stops_the_journal_and_gives_the_room_back(tmp_path):
    """A limit on the size of files gives EFBIG, and a tiny file system ENOSPC; both run in a process of their own."""
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.cpu.unit.journal.test_journal import group, opened, train, files\n"
        "root = Path(sys.argv[1])\n"
        "journal = opened(root)\n"
        "train(journal, range(1, 3))\n"
        "if len(sys.argv) > 2:\n"
        "    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "import numpy as np\n"
        "from trainer.episodes import Episode, Sample\n"
        "noise = np.random.default_rng(0).integers(0, 2**31 - 1, 500_000).astype(np.int32)\n"
        "sample = Sample(noise, np.ones(500_000, np.float32))\n"
        "for step in (3, 4):\n"
        "    journal.add(step, {journal.key(step): [Episode('u', 'g', [sample])]})\n"
        "    journal.wait()\n"
        "print(sorted(files(root)))\n"
    )
    run = [sys.executable, "-c", code]
    limited = subprocess.run([*run, tmp_path / "limited", "limit"], capture_output=True, text=True)
    assert limited.returncode == 0, limited.stderr
    assert limited.stderr.count("rollouts are not recorded until a later try") == 1
    assert limited.stdout.count("step_") == 2 and ".tmp" not in limited.stdout, "what is complete stays"
    (tmp_path / "small").mkdir()
    mount = [
        "unshare",
        "--mount",
        "--map-root-user",
        "sh",
        "-c",
        'mount -t tmpfs -o size=1m none "$1" && shift && exec "$@"',
        "-",
    ]
    if subprocess.run([*mount, tmp_path / "small", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets no user mount a file system")
    full = subprocess.run([*mount, tmp_path / "small", *run, tmp_path / "small"], capture_output=True, text=True)
    assert full.returncode == 0, full.stderr
    assert "No space left" in full.stderr and full.stderr.count("rollouts are not recorded any more") == 1
    assert full.stdout.strip() == "[]", "checkpoints need the room more"


EVENTS = [
    "train",
    "commit",
    "kill",
    "kill_with_another_config",
    "continue_on_another_machine",
    "go_back",
    "damage",
]


class RandomRun:
    """A run whose engine never repeats itself: each group that it generates has a reward of its own."""

    def __init__(self, root: Path, store: Path):
        self.root, self.store, self.machine = root, open_storage(str(store)), 0
        self.commits = [(0, "start")]
        self.generated: dict[str, set[float]] = {}  # by key
        self.last: dict[str, float] = {}  # what a step has trained on last, as far as it must come back
        self.left_behind: set[float] = set()
        self.rewards = itertools.count(1.0)
        self.start()

    def start(self, settings: Identity = SETTINGS) -> None:
        self.step, history = self.commits[-1]
        self.journal = opened(self.root / str(self.machine), self.step, history, settings, storage=self.store)

    def train(self) -> None:
        self.step += 1
        keys, trained = [self.journal.key(self.step, name) for name in "ab"], []
        found = self.journal.replay.find(self.step, keys)
        for key in keys:
            made = found.get(key) or group("g", reward=next(self.rewards))
            reward = made[0].reward
            if key in found:
                assert reward in self.generated[key] - self.left_behind
            assert self.last.get(key, reward) == reward, "the step trains on other episodes than before the kill"
            if key not in found:
                self.generated.setdefault(key, set()).add(reward)
                self.journal.add(self.step, {key: made})
            self.last[key] = reward
            trained += made
        self.journal.wait()
        self.journal.trained(trained)

    def commit(self) -> None:
        self.commits.append((self.step, self.journal.history))
        self.journal.remove_until(lambda: self.commits[-2][0])

    def kill(self, settings: Identity = SETTINGS) -> None:
        assert self.journal.settled(60)
        self.journal.close()
        self.start(settings)

    def kill_with_another_config(self) -> None:
        self.kill(Identity("other rollouts", "updates"))

    def continue_on_another_machine(self) -> None:
        self.machine += 1
        self.kill()

    def go_back(self) -> None:
        self.commits = self.commits[:-1] or self.commits
        self.step, history = self.commits[-1]
        self.journal.start(self.step, history)
        self.journal.remove_after(self.step)
        self.left_behind = {reward for rewards in self.generated.values() for reward in rewards}
        self.last.clear()

    def damage(self) -> None:
        assert self.journal.settled(60)
        for path in sorted((self.root / str(self.machine) / ".journal").glob("step_*"))[:1]:
            data, status = path.read_bytes(), path.stat()
            path.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
            os.utime(path, ns=(status.st_mtime_ns,) * 2)
        self.kill()  # the copy in the store replaces it


@given(st.lists(st.sampled_from([*EVENTS, "train", "train"]), min_size=4, max_size=20))
@settings(deadline=None, max_examples=40)
def test_whatever_happens_a_step_trains_on_what_it_had_or_on_what_is_new(tmp_path_factory, events):
    root = tmp_path_factory.mktemp("run")
    run = RandomRun(root, root / "store")
    for event in events:
        getattr(run, event)()
    run.journal.close()
