"""Whole jobs with agents: in a mix, and with vLLM."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support.jobs import metrics, run_forked_job
from tests.support.pages import commands_of_page, files_of_page
from trainer.models.tiny import TinyShape, build_tiny

pytestmark = [pytest.mark.early, pytest.mark.slow, pytest.mark.timeout(1500)]


SPY = """
import psutil
from tests.support.agents import OneCall

class Spy(OneCall):
    def __init__(self, times, api_key):
        assert len(api_key) > 200_000
        for process in psutil.process_iter(["cmdline"]):
            assert api_key[:20] not in " ".join(process.info["cmdline"] or ()), process
        super().__init__(times=times)
"""


@pytest.mark.release
def test_a_mix_of_an_agent_and_a_reward_is_trained(tmp_path: Path, monkeypatch):
    """GRPO. The agent asks twice in an episode. The engine has no model, and serves both sources at the same time.

    No command line of a process of the job holds the options of the agent, which are longer than a word of one may be.
    """
    (tmp_path / "spy.py").write_text(SPY)
    monkeypatch.setenv("JUDGE_API_KEY", "sk-" + "6f1c9a74d2" * 2_000)
    build_tiny(TinyShape(hidden_size=32, intermediate_size=64, num_layers=1), str(tmp_path / "model"))
    done = run_forked_job(
        "algorithm=grpo", "model.path=model", "rollout.engine=tests.support.token_engine:JOINING",
        "rollout.max_logprob_diff=null",
        "rollout.max_response_tokens=16", "rollout.max_prompt_tokens=64", "trainer.run_dir=run",
        "trainer.val_interval=-1", "trainer.train_batch_size=4", "data.train_size=-1",
        "data.mix.asks.synthetic=reverse_text", "data.mix.asks.size=8",
        "data.mix.asks.environment.name=spy:Spy", "+data.mix.asks.environment.kwargs.times=2",
        "+data.mix.asks.environment.kwargs.api_key=" + "${oc.env:JUDGE_API_KEY}" * 11,
        "data.mix.plain.synthetic=arithmetic", "data.mix.plain.size=8",
        "data.mix.plain.reward.name=tests.support.named_rewards:length", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["data/asks/episode/turns/mean"] == 2 and "data/plain/episode/turns/mean" not in row
        assert row["data/asks/reward/mean"] == row["data/asks/episode/chars/mean"] + 0.5
        assert row["data/plain/reward/mean"] == row["data/plain/reward/length/mean"] > 0
        of_all = (row["data/asks/reward/mean"] + row["data/plain/reward/mean"]) / 2
        assert row["reward/mean"] == pytest.approx(of_all) and row["policy/grad_norm"] > 0
        assert row["environment/failures"] == row["reward/failures"] == row["data/asks/episode/errors/mean"] == 0
    assert [[row[f"data/{name}/prompts"] for row in rows] for name in ("asks", "plain")] == [[2, 4], [2, 4]]


@pytest.mark.release
def test_the_agent_of_the_page_is_trained(tmp_path: Path):
    """OpenAI's client as it is, in threads of the agents' process, with vLLM.

    Agents that are killed are in `test_killed_episodes.py`.
    """
    assert files_of_page("docs/agents.md", tmp_path) == ["solver.py"]
    _, *words = shlex.split(commands_of_page("docs/agents.md", "solver:Solver"))[1:]
    words += ["rollout=vllm", "trainer.val_interval=-1", "rollout.max_response_tokens=12"]
    done = run_forked_job("trainer.run_dir=run", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 1 < row["episode/turns/mean"] == row["episode/attempts/mean"] <= 2
        assert row["episode/errors/mean"] == 0
        assert row["episode/samples/mean"] < 1.3  # a reply of bytes that are no text begins a further one
