"""Whole jobs with environments: they learn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forks import fork_server
from tests.support.gsm8k import REASON, find_gsm8k
from tests.support.jobs import environment, left_running, metrics, run_forked_job
from tests.support.pages import commands_of_page, files_of_page
from tests.support.runs import rollouts_of
from trainer.models.tiny import TinyShape, build_tiny

pytestmark = [pytest.mark.early, pytest.mark.slow, pytest.mark.timeout(1500)]

ROWS = Path(__file__).parents[3] / "examples/gsm8k_calculator/rows.py"
PAGE = "docs/environments.md"
QUICK = "rollout=transformers trainer.ray_address=processes logger.plot=false trainer.ckpt_interval=-1"
STEPS = "trainer.total_steps=5"


def test_the_environment_of_the_page_is_learnt_with_its_tool(tmp_path: Path, marker: str):
    """The commands as they stand there, but for the engine, and with half of the steps of the policy."""
    assert files_of_page(PAGE, tmp_path)[:2] == ["shop.py", "rows.py"]
    programs = tmp_path / "programs"
    programs.mkdir()
    fork_server().write_python(programs)
    script = commands_of_page(PAGE, "rows.py").replace("python rows.py", f"{sys.executable} rows.py")
    script = script.replace("trainer.run_name=shop", f"trainer.run_name=shop {QUICK} {STEPS}")
    env = environment() | {"PATH": f"{programs}:{os.environ['PATH']}", "TRAINER_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert left_running(marker) == []
    rows = [row for row in metrics(tmp_path / "outputs/shop") if "val/accuracy" in row]
    assert rows[0]["val/accuracy"] <= 0.4 and rows[-1]["val/accuracy"] >= 0.7, rows
    last = [json.loads(line) for line in (tmp_path / "outputs/shop/validation/step_5.jsonl").read_text().splitlines()]
    right = [episode for episode in last if episode["reward"] == 1]
    called = [episode for episode in right if episode["metrics"]["tool_calls/price"]]
    assert len(called) >= 0.95 * len(right), "a price was guessed"


def test_environments_of_other_packages_train_in_one_run(tmp_path: Path):
    """Tasks of reasoning-gym, and environments of skyrl-gym and textarena, in one mix."""
    size = TinyShape(hidden_size=64, intermediate_size=128, num_layers=1, num_heads=2, num_kv_heads=1)
    build_tiny(size, str(tmp_path / "model"))
    rows = {
        "gym": [{"prompt": f"{i}+{i}", "reward_spec": {"ground_truth": str(2 * i)}} for i in range(4)],
        "game": [{"game": i} for i in range(4)],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ours = "trainer.environments"
    run = run_forked_job(
        *(f"model.path={tmp_path}/model", "trainer.val_interval=-1", "data=files", "data.train_size=-1"),
        *(f"data.mix.{name}.files=[{tmp_path}/{name}.jsonl]" for name in rows),
        *(
            "data.mix.task.synthetic=reasoning_gym",
            "+data.mix.task.synthetic_args.task=chain_sum",
            "data.mix.task.size=4",
        ),
        "data.mix.task.reward.name=reasoning_gym",
        *(f"data.mix.gym.environment.name={ours}.skyrl_gym:SkyRLGym", "data.mix.gym.environment.kwargs.id=gsm8k"),
        f"data.mix.game.environment.name={ours}.textarena:TextArena",
        "data.mix.game.environment.kwargs.id=GuessTheNumber-v0",
        *("environment.max_turns=2", "environment.timeout_s=300"),
        *("rollout.max_prompt_tokens=2000", "rollout.max_response_tokens=8"),
        *("trainer.train_batch_size=3", "trainer.mini_batch_size=3", "rollout.n=2"),
        *(*QUICK.split(), "logger.save_rollouts=true"),
        cwd=tmp_path,
        timeout=500,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    episodes = [episode for step in (1, 2) for episode in rollouts_of(tmp_path / "outputs/default", step)]
    assert not [episode["failure"] for episode in episodes if episode["failure"]]
    said = {one["source"]: json.dumps(one) for one in episodes}
    assert {*said} == {"mix.task", "mix.gym", "mix.game"}
    assert "State the final answer" in said["mix.task"] and "Guess The Number" in said["mix.game"]


@pytest.mark.skipif(find_gsm8k() is None, reason=REASON)
def test_gsm8k_with_the_calculator_calls_it(tmp_path: Path):
    """Short problems of one calculation, after a short warm start on the calculations of GSM8K's own solutions."""
    for name in ("train", "test"):
        words = [f"{find_gsm8k()}/{name}.jsonl", f"{tmp_path}/{name}.jsonl", "--calls=1", "--characters=140"]
        subprocess.run([sys.executable, ROWS, *words], check=True, timeout=100, env=environment())
    job = (
        *("experiment=gsm8k_calculator_tiny", f"data.train_files=[{tmp_path}/train.jsonl]", "data.val_size=4"),
        *(f"data.val_files=[{tmp_path}/test.jsonl]", f"model.cache_dir={tmp_path}/models", "logger.plot=false"),
        *("sft.steps=120", "sft.batch_size=8", "trainer.total_steps=3", "trainer.ckpt_interval=-1"),
        *("trainer.train_batch_size=4", "trainer.mini_batch_size=2", "rollout.n=2", "trainer.val_interval=3"),
    )
    done = run_forked_job(*job, f"trainer.run_dir={tmp_path}/run", cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path / "run")
    assert sum(row.get("episode/tool_calls/calculator/mean", 0) for row in rows) > 0
    assert all("reward/steps/mean" in row and "reward/right/mean" in row for row in rows if "reward/mean" in row)
