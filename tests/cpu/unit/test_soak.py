"""The soak itself: what it draws, and whether it notices a run that differs."""

from __future__ import annotations

import json
import random
import socket
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.soak.faults import FAULTS, PLACES, draw_fail_point, draw_faults
from tests.soak.kinds import KINDS, STEPS, draw_kind
from tests.soak.outcomes import difference, outcome_of
from tests.soak.tally import table
from tests.soak.wire import Wire
from tests.support.toy import toy_config, toy_run
from tests.support.viewed_runs import make_episode
from trainer.config import compose
from trainer.config.command_line import refuse_unread
from trainer.data.records import encode


def drawn(seed: int, has_disk: bool = True):
    numbers = random.Random(seed)
    kind = draw_kind(numbers, list(KINDS))
    return kind, draw_faults(kind, numbers, has_disk)


def test_a_seed_draws_the_same_round_again_and_all_seeds_draw_every_fault():
    rounds = [drawn(seed) for seed in range(2000)]
    assert rounds == [drawn(seed) for seed in range(2000)]
    assert {kind.name for kind, _ in rounds} == set(KINDS)
    assert {fault.name for _, faults in rounds for fault in faults} == set(FAULTS)
    assert all(FAULTS[fault.name].applies(kind) for kind, faults in rounds for fault in faults)
    without_disk = [fault.name for seed in range(2000) for fault in drawn(seed, has_disk=False)[1]]
    assert "full disk" not in without_disk


def test_every_fail_point_that_is_drawn_is_in_the_trainer():
    rounds = [drawn(seed) for seed in range(2000)]
    drawn_points = {draw_fail_point(fault, kind) for kind, faults in rounds for fault in faults} - {None}
    names = {point.partition(",")[0] for point in drawn_points}
    assert names == {*PLACES, *KINDS["in_flight"].phases} and len(KINDS["in_flight"].phases) == 5
    sources = "".join(path.read_text() for path in (Path(__file__).parents[3] / "trainer").rglob("*.py"))
    assert [name for name in names if f'failpoint("{name}")' not in sources] == []


@pytest.fixture
def finished(tmp_path):
    """Run directories of two jobs that did the same."""
    model = tmp_path / "model"
    for name in ("one", "other"):
        toy_run(toy_config(tmp_path / name, total_steps=STEPS), model)
        (tmp_path / name / "rollouts").mkdir()
        (tmp_path / name / "rollouts/step_1.arrow").write_text("{}")
    return tmp_path / "one", tmp_path / "other"


def compare(run: Path, other: Path) -> str:
    kind = KINDS["supervised"]
    return difference(*(outcome_of(kind, path, str(path / "checkpoints")) for path in (run, other)))


def test_the_comparison_notices_what_differs(finished):
    run, other = finished
    assert compare(run, other) == ""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines, lines[-1]]))
    assert compare(run, other).startswith("steps in metrics.jsonl: is ")
    last = json.loads(lines[-1])
    (run / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps({**last, "time/step": 1e9})]))
    assert compare(run, other) == "", "times may differ"
    (run / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps({**last, "policy/loss": 0.25})]))
    assert f"metrics of step {STEPS}: policy/loss is 0.25, not " in compare(run, other)
    (run / "metrics.jsonl").write_text("\n".join(lines))
    (run / "rollouts/step_1.arrow").write_text("{ }")
    assert compare(run, other).startswith("rollouts/step_1.arrow: is ")
    (run / "rollouts/step_1.arrow").unlink()
    assert compare(run, other) == "missing: rollouts/step_1.arrow"


def difference_of_rollouts(tmp_path: Path, kind: str, trained: dict[int, list[str]]) -> str:
    """Compare a job that trained each prompt once with one whose steps trained on these."""
    steps = {step: [f"0:{step}:0", f"0:{step}:1"] for step in range(1, STEPS + 1)}
    found = []
    for uids in (steps | trained, steps):
        run = tmp_path / f"{kind} {len(list(tmp_path.iterdir()))}"
        (run / "rollouts").mkdir(parents=True)
        (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in uids))
        for step, some in uids.items():
            episodes = [make_episode(uid, [("q", "a")], 0.5)[0] for uid in some]
            (run / f"rollouts/step_{step}.arrow").write_bytes(encode(step, episodes))
        found.append(outcome_of(KINDS[kind], run, str(run / "checkpoints")))
    return difference(*found)


@pytest.mark.parametrize("kind", ["in_flight", "far_in_flight", "server_in_flight"])
def test_the_comparison_in_flight_notices_what_is_trained_twice_or_lost(tmp_path, kind):
    assert difference_of_rollouts(tmp_path, kind, {}) == ""
    is_same = difference_of_rollouts(tmp_path, kind, {3: ["0:4:0", "0:4:1"], 4: ["0:3:0", "0:3:1"]}) == ""
    assert is_same == (not KINDS[kind].in_order), "prompts may pass others"
    for twice in ({3: ["0:4:0", "0:4:1"]}, {3: ["0:3:0", "0:3:0"]}):
        assert difference_of_rollouts(tmp_path, kind, twice)
    assert difference_of_rollouts(tmp_path, kind, {3: ["0:3:0"]})


def test_a_damaged_or_missing_checkpoint_is_no_outcome(finished):
    run, other = finished
    file = run / f"checkpoints/global_step_{STEPS}/data.json"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="data.json"):
        compare(run, other)


def test_a_wire_forwards_until_it_is_cut():
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server, Wire(server.server_address[1]) as wire:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert urllib.request.urlopen(wire.url).status == 204
        open_before = socket.create_connection(("127.0.0.1", wire.port))
        with wire.cut(), pytest.raises(OSError):
            urllib.request.urlopen(wire.url)
        assert open_before.recv(1) == b""
        assert urllib.request.urlopen(wire.url).status == 204
        server.shutdown()


def test_the_table_counts_faults_and_rounds():
    fault = {"name": "kill of a rank", "recovered": "in the run"}
    rounds = [
        {"outcome": "identical", "faults": [fault, fault, {"name": "full disk", "recovered": "restart"}]},
        {"outcome": "different", "faults": [fault]},
    ]
    assert table(rounds).splitlines()[2:] == [
        "| full disk | 1 | 0 | 1 | 1 | 1 |",
        "| kill of a rank | 3 | 3 | 0 | 2 | 1 |",
    ]


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_each_kind_is_a_job_that_reads_all_its_words(kind):
    task = [f"trainer.task={kind.job}"] if kind.job != "train" else []
    words = [word.replace("{scene}", "scene") for word in kind.overrides]
    urls = ["rollout.urls=[http://127.0.0.1:8000]"] if kind.is_served else []
    config = compose([*words, *task, *urls])
    refuse_unread(words, config)
