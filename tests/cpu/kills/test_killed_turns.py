"""Kill a job in the last turns of long episodes: what they have said and done is neither paid nor done again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.jobs import comparable, metrics
from tests.support.killed_jobs import run_until
from tests.support.runs import rollouts_of
from trainer.models.tiny import TinyShape, build_tiny

pytestmark = [pytest.mark.early, pytest.mark.slow]

EPISODES, TURNS = 3 * 2, 40
STOPS = range(20, 150)
ENGINES = [
    ("rollout.engine=tests.support.token_engine:JOINING", "rollout.max_logprob_diff=null"),
    pytest.param(("rollout=vllm", "rollout.max_response_tokens=24"), marks=pytest.mark.release),
]
SOURCES = {"plain": "environments:Effects", "saved": "environments:SavedEffects", "agents": "agents:Effects"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A model without training, of which half of the tokens end a reply."""
    path = tmp_path_factory.mktemp("model")
    size = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32,
                     max_position_embeddings=4096)  # fmt: skip
    build_tiny(size, str(path))
    config = json.loads((path / "generation_config.json").read_text())
    config["eos_token_id"] = [config["eos_token_id"], *STOPS]
    (path / "generation_config.json").write_text(json.dumps(config))
    return str(path)


class Job:
    """A job whose episodes have effects on a service that outlives it, a directory."""

    def __init__(self, root: Path, name: str, model: str, engine: Sequence[str], *more: str):
        self.run_dir, self.log, self.service = root / name, root / f"{name}.log", root / f"{name} service"
        self.service.mkdir()
        sources = [
            word
            for source, path in SOURCES.items()
            for word in (
                f"data.mix.{source}.synthetic=reverse_text",
                f"data.mix.{source}.size=4",
                f"data.mix.{source}.environment.name=tests.support.{path}",
                f"+data.mix.{source}.environment.kwargs.service={self.service}",
            )
        ]
        self.words = (
            *engine, f"trainer.run_dir={self.run_dir}", f"model.path={model}", "algorithm=grpo",
            "rollout.max_prompt_tokens=64", "environment.max_tokens=2048", f"environment.max_turns={TURNS}",
            "environment.name=tests.support.environments:Hashed", "data.train_size=-1", "trainer.val_interval=-1",
            "trainer.train_batch_size=3", "trainer.mini_batch_size=3", "trainer.total_steps=2",
            "trainer.hf_save_interval=2", *sources, *more,
        )  # fmt: skip

    def count(self, kind: str) -> int:
        return len([*self.service.glob(f"{kind} *")])

    def run(self) -> None:
        assert run_until(self.log, *self.words)

    def kill_in_turn_37(self, fewest: int, is_due: Callable[[], bool] = lambda: True) -> None:
        """Hold the episodes in turn 37 from a time on; kill the job when no more come there, and all is on the disk."""
        hold, seen = self.service / "hold", [0, 0.0]

        def must_end(seconds: float) -> bool:
            if not hold.exists() and is_due():
                hold.touch()
            if (waiting := self.count("waits")) != seen[0]:
                seen[:] = waiting, seconds
            return waiting >= fewest and seconds > seen[1] + 3

        assert not run_until(self.log, *self.words, kill_when=must_end)
        hold.unlink()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ENGINES, ids=["tokens", "vllm"])
def test_a_kill_in_turn_37_of_40_costs_one_reply_of_each_episode(engine, model, tmp_path):
    """Environments that are made again, that load what they have saved, and agents."""
    whole, killed = (Job(tmp_path, name, model, engine) for name in ("whole", "killed"))
    whole.run()
    trial = whole.count("done") - 2 * EPISODES * TURNS  # environments are tried before the start
    assert 0 <= trial <= len(SOURCES)
    killed.kill_in_turn_37(EPISODES)
    assert [*killed.run_dir.glob(".journal/*.turns")]
    killed.run()

    rows, expected = metrics(killed.run_dir), metrics(whole.run_dir)
    assert comparable(rows) == comparable(expected)
    export = "exports/global_step_2/policy/model.safetensors"
    assert (killed.run_dir / export).read_bytes() == (whole.run_dir / export).read_bytes()
    replies = [(row["journal/replies_sampled"], row["journal/replies_recorded"]) for row in rows if row["step"] > 0]
    assert sum(replies[0]) == EPISODES * TURNS and replies[1] == (EPISODES * TURNS, 0)
    assert replies[0][0] <= EPISODES * (TURNS - 37 + 1), "more than one reply of an episode was sampled again"
    assert killed.count("done") == whole.count("done"), "an effect has another id after the kill"
    assert 0 < killed.count("refused") <= EPISODES * 37 + trial
    assert not [*killed.run_dir.glob(".journal/step_1-*")], "turns outlive what they served"
    assert "dropped" not in killed.log.read_text()


def test_in_flight_no_recorded_reply_is_sampled_again_and_no_prompt_is_lost(model, tmp_path):
    """Killed after a step, with episodes of several versions in turn 37. The run comes to these versions again."""
    steps = 3
    job = Job(tmp_path, "job", model, ENGINES[0], "rollout.in_flight_updates=true", "rollout.max_staleness=1",
              f"trainer.total_steps={steps}", "trainer.ckpt_interval=1000", "logger.save_rollouts=true",
              *(f"+data.mix.{source}.environment.kwargs.is_slow=true" for source in SOURCES))  # fmt: skip
    job.kill_in_turn_37(EPISODES, (job.run_dir / "rollouts/step_1.arrow").exists)
    effects, total = job.count("done"), steps * EPISODES * TURNS
    assert EPISODES * TURNS < effects < total
    job.run()

    rows = [row for row in metrics(job.run_dir) if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    episodes = [row for step in range(1, steps + 1) for row in rollouts_of(job.run_dir, step)]
    uids = Counter(row["uid"] for row in episodes)
    assert len(uids) == steps * EPISODES and {*uids.values()} == {1}, "a prompt was trained twice"
    assert max(row["rollout/staleness_max"] for row in rows) > 0
    assert 0 <= job.count("done") - total <= len(SOURCES), "a recorded reply was answered under another id"
    sampled = sum(row["journal/replies_sampled"] for row in rows)
    assert sampled + sum(row["journal/replies_recorded"] for row in rows) == total
    assert sampled == job.count("done") - effects, "a recorded reply was sampled again"
    assert "dropped" not in job.log.read_text()
