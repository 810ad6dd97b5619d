"""Kill a job whose episodes have several turns, and its environments: the result is that of an uninterrupted job."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.buckets import make_bucket, s3_server, use_s3
from tests.support.evaluations import evaluate, validation_of
from tests.support.jobs import assert_close, comparable, metrics
from tests.support.killed_jobs import STEPS, TRAIN_SIZE, run_killed, run_until
from tests.support.runs import rollouts_of
from trainer.checkpoint.storage import JOURNAL, TURNS
from trainer.models.tiny import TinyShape, build_tiny
from trainer.process import time_limits
from trainer.seeding import permutation

pytestmark = [pytest.mark.early, pytest.mark.slow]

OTHER_STOPS = list(range(40, 100))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A model that ends most of its replies; some of them in another stop token than its template writes."""
    path = tmp_path_factory.mktemp("model")
    size = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    build_tiny(size, str(path))
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.get_input_embeddings().weight[model.config.eos_token_id] *= 60
    model.save_pretrained(path)
    config = json.loads((path / "generation_config.json").read_text())
    config["eos_token_id"] = [config["eos_token_id"], *OTHER_STOPS]
    (path / "generation_config.json").write_text(json.dumps(config))
    return str(path)


ENGINE = ("rollout.engine=tests.support.token_engine:JOINING", "rollout.max_logprob_diff=null",
          "trainer.num_workers=2")  # fmt: skip
SOURCES = (
    "environment.name=tests.support.environments:Dawdling",
    "data.train_size=-1",
    "data.mix.waits.synthetic=reverse_text",
    "data.mix.waits.size=6",
    "data.mix.programs.synthetic=reverse_text",
    "data.mix.programs.size=6",
    "data.mix.programs.environment.name=tests.support.environments:Programs",
    "data.mix.threads.synthetic=arithmetic",
    "data.mix.threads.size=5",
    "data.mix.threads.environment.name=tests.support.environments:Threaded",
    "data.mix.agents.synthetic=arithmetic",
    "data.mix.agents.size=5",
    "data.mix.agents.environment.name=tests.support.agents:Hashed",
    "data.mix.agents.environment.num_processes=2",
    "data.mix.single.synthetic=reverse_text",
    "data.mix.single.size=3",
    "data.mix.single.environment.name=null",
)
VAL_SETS = (
    "data.val_sets.words.synthetic=reverse_text",
    "data.val_sets.words.size=5",
    "data.val_sets.words.n=4",
    "data.val_sets.words.environment.name=null",
    "data.val_sets.words.interval=2",
    "data.val_sets.sums.synthetic=arithmetic",
    "data.val_sets.sums.size=3",
    "data.val_sets.sums.n=2",
    "data.val_sets.sums.environment.name=tests.support.environments:Hashed",
    "data.val_sets.sums.interval=3",
)


def test_a_job_with_environments_and_agents_ends_as_if_never_killed(model, tmp_path):
    """Killed behind a save and in one; half of its environments and agents end their processes, too.

    Batches mix environments, agents and single turns. Some environments take times that differ from start to start,
    some block in threads, and some run programs. Agents branch and compact their histories.
    """
    base = (f"model.path={model}", *ENGINE, *SOURCES, *VAL_SETS, "data.val_files=[validation.jsonl]",
            "environment.max_turns=3", "environment.max_tokens=72", "rollout.max_prompt_tokens=64",
            "logger.save_rollouts=true", "rollout.val_n=2")  # fmt: skip
    lines = [json.dumps({"prompt": f"p{i}", "answer": "x"}) for i in range(4)]
    (tmp_path / "validation.jsonl").write_text("\n".join(lines))
    assert run_until(tmp_path / "whole.log", f"trainer.run_dir={tmp_path}/whole", *base)
    rows = metrics(tmp_path / "whole")

    def most(name: str) -> float:
        return max(row.get(name, 0) for row in rows)

    assert all(most(f"data/{name}/episode/turns/mean") > 1.5 for name in ("waits", "programs", "threads", "agents"))
    assert most("data/programs/episode/tool_calls/python/mean") > 1.5
    assert most("data/programs/episode/tool_errors/mean") == 0
    assert rows[-1]["data/single/epoch"] > 1 and most("data/single/reward/hashed/mean") > 0
    assert rows[-1]["progress/samples"] > 2 * rows[-1]["progress/prompts"], "no episode has several samples"
    # A set with completions of one turn beside the episodes; another set has an environment of its own.
    assert [row["step"] for row in rows if "val/words/pass@4" in row] == [0, 2, 4, 6]
    assert [row["step"] for row in rows if "val/sums/avg@2" in row] == [0, 3, 6]
    lines = (tmp_path / "whole/validation/step_6.jsonl").read_text().splitlines()
    episodes = [episode for episode in map(json.loads, lines) if episode["uid"].startswith("val:sums:")]
    assert max(len(episode["completion"]) for episode in episodes) > 1

    (tmp_path / "crashes").mkdir()
    crashing = ("", "data.mix.programs.", "data.mix.threads.", "data.mix.agents.")
    crashes = [f"+{source}environment.kwargs.crashes={tmp_path}/crashes" for source in crashing]
    job = (f"trainer.run_dir={tmp_path}/killed", *base, *crashes)
    run_killed(tmp_path / "killed.log", *job)
    assert len(list((tmp_path / "crashes").iterdir())) > 2
    assert comparable(metrics(tmp_path / "killed")) == comparable(rows)
    for name in (
        f"exports/global_step_{STEPS}/policy/model.safetensors",
        "rollouts/step_1.arrow",
        "rollouts/step_6.arrow",
        "validation/step_3.jsonl",
        "validation/step_6.jsonl",
    ):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert "resume verified" in Path(tmp_path / "killed.log").read_text()


def test_steps_come_back_as_they_were_even_if_environments_answer_differently_each_time(model, tmp_path, monkeypatch):
    """On two tiers; nothing but the journal knows the answers. First all disks are lost.

    Also the validation of a step, and the steps of a second kill. With GRPO, and a tool.
    """
    with s3_server() as url:
        use_s3(monkeypatch, url)
        monkeypatch.setenv("TRAINER_TIME_LIMITS", "LOCK_LEASE_S=1")
        bucket = make_bucket("answers")
        base = ("algorithm=grpo", f"trainer.run_dir={tmp_path}/run", f"model.path={model}",
                "rollout.max_prompt_tokens=64",
                "environment.name=tests.support.environments:Random", "trainer.on_resume_mismatch=stop",
                "trainer.ckpt_interval=4", f"trainer.ckpt_path={bucket}/run",
                f"trainer.ckpt_cache_dir={tmp_path}/cache")  # fmt: skip
        log = tmp_path / "log"
        logged: dict[int, dict] = {}
        for kill in range(2):  # behind step 3, and behind step 3 again: no commit yet
            reached = tmp_path / f"reached{kill}"

            def is_due(_: float, reached: Path = reached) -> bool:
                return reached.exists()

            env = {"TRAINER_FAILPOINT": f"logged,3,{reached}"}
            assert not run_until(log, *base, env=env, kill_when=is_due)
            rows = {row["step"]: row for row in metrics(tmp_path / "run")}
            assert comparable([rows[step] for step in logged]) == comparable([*logged.values()])
            logged = rows
            if kill == 0:
                shutil.rmtree(tmp_path / "run")
                shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        assert {*logged} == {0, 1, 2, 3} and any(name.startswith("val/") for name in logged[3])
        assert run_until(log, *base)
        rows = {row["step"]: row for row in metrics(tmp_path / "run")}
        assert comparable([rows[step] for step in logged]) == comparable([*logged.values()])
        assert max(rows) == STEPS and "groups came from the journal and 0 were generated" in log.read_text()


@pytest.mark.parametrize(
    "ranks, words",
    [(1, ("algorithm.policy_loss=clip",)), (2, ("trainer.policy.lora.rank=4",))],
    ids=["one", "adapters"],
)
def test_self_play_that_is_killed_inside_a_game_ends_as_if_never_killed(model, tmp_path, ranks, words):
    """In the third step, when the averages of the players and their games come from a checkpoint and the journal.

    It also continues on another number of ranks, and an evaluation of it has the numbers of its own.
    """
    stops = int(permutation(TRAIN_SIZE, 1, "epoch", 0)[9])
    rows = [{"prompt": f"p{i}", "turns": 3, "stops": i == stops} for i in range(TRAIN_SIZE)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = ("algorithm=grpo", "algorithm.advantage_estimator=rae", f"model.path={model}", *words,
            f"trainer.num_workers={ranks}", "trainer.seed=1", "data=files", "data.train_files=[rows.jsonl]",
            "data.train_size=-1", "environment.name=tests.support.environments:Duel",
            "+environment.kwargs.is_hashed=true", "rollout.max_prompt_tokens=64",
            "logger.save_rollouts=true", "data.val_files=[rows.jsonl]", "data.val_size=2",
            f"trainer.val_interval={STEPS}")  # fmt: skip
    assert run_until(tmp_path / "whole.log", f"trainer.run_dir={tmp_path}/whole", *base)
    stopped, saved = tmp_path / "stopped", tmp_path / "killed/checkpoints/global_step_2"
    job = (*base, f"trainer.run_dir={tmp_path}/killed", f"+environment.kwargs.stops={stopped}")
    assert not run_until(tmp_path / "killed.log", *job, kill_when=lambda _: stopped.exists() and saved.exists())
    shutil.copytree(tmp_path / "killed", tmp_path / "other")
    assert run_until(tmp_path / "killed.log", *job)
    whole = metrics(tmp_path / "whole")
    assert comparable(metrics(tmp_path / "killed")) == comparable(whole)
    assert {"player/x/reward/mean", "player/o/baseline"} <= whole[1].keys() and whole[-1]["player/x/baseline"] > 0.1
    assert whole[-1]["progress/prompts"] == 4 * STEPS
    for name in (f"exports/global_step_{STEPS}/policy/model.safetensors", "rollouts/step_3.arrow"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    state = json.loads((tmp_path / f"killed/checkpoints/global_step_{STEPS}/trainer_state.json").read_text())
    assert state["player_baselines"]["x"] == whole[-1]["player/x/baseline"]
    if ranks == 1:  # without noise, which is drawn on each rank
        other = (*job, f"trainer.run_dir={tmp_path}/other", "trainer.num_workers=2")
        assert run_until(tmp_path / "other.log", *other)
        assert_close(metrics(tmp_path / "other"), whole)
        evaluated = evaluate(tmp_path / "killed", cwd=tmp_path)["metrics"]
        assert evaluated == validation_of(tmp_path / "whole", STEPS) and "val/player/x/reward/mean" in evaluated


@pytest.mark.release
def test_a_program_that_is_killed_between_its_questions_runs_through_its_recorded_replies(model, tmp_path):
    """A training job whose agent is an unmodified framework, in the second of two steps."""
    stops = int(permutation(TRAIN_SIZE, 1, "epoch", 0)[5])
    rows = [{"prompt": f"p{i}", "stops": i == stops} for i in range(TRAIN_SIZE)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = ("algorithm=grpo", f"model.path={model}", *ENGINE, "trainer.seed=1", "data=files",
            "data.train_files=[rows.jsonl]", "data.train_size=-1", "trainer.val_interval=-1",
            "environment.name=tests.support.agents:Framework", "rollout.max_prompt_tokens=1024",
            "logger.save_rollouts=true", "trainer.total_steps=2", "trainer.ckpt_interval=1",
            "trainer.hf_save_interval=2")  # fmt: skip
    assert run_until(tmp_path / "whole.log", f"trainer.run_dir={tmp_path}/whole", *base)
    stopped, saved = tmp_path / "stopped", tmp_path / "killed/checkpoints/global_step_1"
    job = (*base, f"trainer.run_dir={tmp_path}/killed", f"+environment.kwargs.stops={stopped}")

    def is_recorded(_: float) -> bool:
        """The reply to the first question has been in the journal's queue for longer than it waits there."""
        waits = stopped.exists() and time.time() - stopped.stat().st_mtime > 4 * time_limits.JOURNAL_FLUSH_S
        return waits and saved.exists() and any((tmp_path / "killed" / JOURNAL).glob(f"step_2-*{TURNS}"))

    assert not run_until(tmp_path / "killed.log", *job, kill_when=is_recorded)
    assert run_until(tmp_path / "killed.log", *job)
    whole, killed = metrics(tmp_path / "whole"), metrics(tmp_path / "killed")
    assert comparable(killed) == comparable(whole) and killed[-1]["journal/replies_recorded"] > 0
    assert whole[-1]["episode/turns/mean"] >= 2 and whole[-1]["reward/std"] > 0
    for name in ("exports/global_step_2/policy/model.safetensors", "rollouts/step_2.arrow"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_recorded_rollouts_are_replayed_as_if_never_killed(model, tmp_path):
    """Half of each step, from another run; each of its 8 groups comes once an epoch, also with updates in flight."""
    base = ("algorithm=grpo", f"model.path={model}", "data.train_size=-1", "data.mix.words.synthetic=reverse_text",
            "data.mix.words.size=12", "trainer.val_interval=-1", "logger.save_rollouts=true")  # fmt: skip
    assert run_until(tmp_path / "first.log", f"trainer.run_dir={tmp_path}/first", *base, "trainer.total_steps=2")
    files = ",".join(str(tmp_path / f"first/rollouts/step_{step}.arrow") for step in (1, 2))
    replay = (*base, "trainer.num_workers=2", f"data.mix.old.files=[{files}]", "data.mix.old.replay=true")
    assert run_until(tmp_path / "whole.log", f"trainer.run_dir={tmp_path}/whole", *replay)
    rows = metrics(tmp_path / "whole")
    assert {row["rollout/replayed_frac"] for row in rows} == {0.5} and rows[-1]["data/old/epoch"] == 2 * STEPS / 8
    assert all("rollout_is/clip_frac" in row for row in rows), "nothing corrects for the other policy"
    run_killed(tmp_path / "killed.log", f"trainer.run_dir={tmp_path}/killed", *replay)
    assert comparable(metrics(tmp_path / "killed")) == comparable(rows)
    for name in (f"exports/global_step_{STEPS}/policy/model.safetensors", f"rollouts/step_{STEPS}.arrow"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name

    flying = (f"trainer.run_dir={tmp_path}/flying", *replay, *ENGINE, "rollout.in_flight_updates=true")
    reached = tmp_path / "reached in flight"
    env = {"TRAINER_FAILPOINT": f"in_flight:taken,3,{reached}"}
    assert not run_until(tmp_path / "flying.log", *flying, env=env, kill_when=lambda _: reached.exists())
    assert run_until(tmp_path / "flying.log", *flying)
    rows = metrics(tmp_path / "flying")
    assert {row["rollout/replayed_frac"] for row in rows} == {0.5} and rows[-1]["data/old/epoch"] == 2 * STEPS / 8
    episodes = [row for step in range(1, STEPS + 1) for row in rollouts_of(tmp_path / "flying", step)]
    uids = [row["uid"] for row in episodes if row["uid"].startswith("old:")]
    assert len(uids) == len({*uids}) == len(episodes) / 2 == 2 * 2 * STEPS
    assert {tuple(uid.split(":")[1:3]) for uid in uids[:16]} == {("0", str(i)) for i in range(8)}, "one was passed over"
