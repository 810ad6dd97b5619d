"""Kill a job in the last turns of long episodes: what they have said and done is neither paid nor done again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import comparable, metrics
from tests.support.killed_jobs import run_until
from trainer.models.tiny import TinyShape, build_tiny

pytestmark = [pytest.mark.early, pytest.mark.slow]

EPISODES, TURNS = 3 * 2, 40
SOURCES = {"plain": "environments:Effects", "saved": "environments:SavedEffects", "agents": "agents:Effects"}


def test_a_kill_in_turn_37_of_40_costs_one_reply_of_each_episode(tmp_path):
    """Environments that are made again, that load what they have saved, and agents. The service outlives the job."""
    size = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
                     max_position_embeddings=4096)  # fmt: skip
    build_tiny(size, str(tmp_path / "model"))

    def job(run: str) -> tuple[str, ...]:
        service = tmp_path / f"{run} service"
        service.mkdir()
        sources = [
            word
            for name, path in SOURCES.items()
            for word in (
                f"data.mix.{name}.synthetic=reverse_text",
                f"data.mix.{name}.size=4",
                f"data.mix.{name}.environment.name=tests.support.{path}",
                f"+data.mix.{name}.environment.kwargs.service={service}",
            )
        ]
        return (f"trainer.run_dir={tmp_path}/{run}", f"model.path={tmp_path}/model", "algorithm=grpo",
                "rollout.engine=tests.support.token_engine:JOINING", "rollout.max_logprob_diff=null",
                "rollout.max_prompt_tokens=64", "environment.max_tokens=2048", f"environment.max_turns={TURNS}",
                "environment.name=tests.support.environments:Hashed", "data.train_size=-1", "trainer.val_interval=-1",
                "trainer.train_batch_size=3", "trainer.mini_batch_size=3", "trainer.total_steps=2",
                "trainer.hf_save_interval=2", *sources)  # fmt: skip

    def count(run: str, kind: str) -> int:
        return len([*(tmp_path / f"{run} service").glob(f"{kind} *")])

    whole, killed = job("whole"), job("killed")
    assert run_until(tmp_path / "whole.log", *whole)
    trial = count("whole", "done") - 2 * EPISODES * TURNS  # environments are tried before the start
    assert 0 <= trial <= len(SOURCES)

    hold, log = tmp_path / "killed service/hold", tmp_path / "killed.log"
    hold.touch()
    since: list[float] = []

    def is_due(seconds: float) -> bool:
        if not since and count("killed", "waits") == EPISODES:
            since.append(seconds)
        return bool(since) and seconds > since[0] + 2  # their replies are on the disk

    assert not run_until(log, *killed, kill_when=is_due)
    assert [*(tmp_path / "killed/.journal").glob("*.turns")]
    hold.unlink()
    assert run_until(log, *killed)

    rows, expected = metrics(tmp_path / "killed"), metrics(tmp_path / "whole")
    assert comparable(rows) == comparable(expected)
    export = "exports/global_step_2/policy/model.safetensors"
    assert (tmp_path / "killed" / export).read_bytes() == (tmp_path / "whole" / export).read_bytes()
    replies = [(row["journal/replies_sampled"], row["journal/replies_recorded"]) for row in rows if row["step"] > 0]
    assert sum(replies[0]) == EPISODES * TURNS and replies[1] == (EPISODES * TURNS, 0)
    assert replies[0][0] <= EPISODES * (TURNS - 37 + 1), "more than one reply of an episode was sampled again"
    assert count("killed", "done") == count("whole", "done"), "an effect has another id after the kill"
    assert 0 < count("killed", "refused") <= EPISODES * 37 + trial
    assert not [path for path in (tmp_path / "killed/.journal").glob("step_1-*")], "turns outlive what they served"
    assert "dropped" not in Path(log).read_text()
