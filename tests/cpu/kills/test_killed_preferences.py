"""A kind of training that the package does not have: it is killed and resumed as exactly as those that it has."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.evaluations import evaluate, validation_of
from tests.support.jobs import assert_close, comparable, metrics, run_forked_job, start_forked_job, wait_until
from tests.support.killed_jobs import run_until
from tests.support.pages import commands_of_page, files_of_page
from tests.support.preferences import TASK
from tests.support.reward_model import add_score_head
from trainer.models.tiny import TinyShape, build_tiny
from trainer.reports.compare import compare_runs
from trainer.reports.diagnose import diagnose
from trainer.reports.report import write_report

pytestmark = [pytest.mark.early, pytest.mark.slow]


STEPS = 4
WEIGHTS = f"exports/global_step_{STEPS}/policy/model.safetensors"


SHORT = (f"trainer.total_steps={STEPS}", f"trainer.hf_save_interval={STEPS}", "trainer.val_interval=-1")


def build(path: Path, seed: int = 0) -> None:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "head_dim": 16}
    build_tiny(TinyShape(**size, num_kv_heads=1, seed=seed), str(path))


def kill_at_step_3(run: Path, *overrides: str) -> None:
    """Start a job in the directory `run`, and kill it when step 3 is logged and step 2 is saved."""
    reached, saved = run.with_name("reached"), run / "checkpoints/global_step_2"
    env = {"TRAINER_FAILPOINT": f"logged,3,{reached}"}
    log = run.with_suffix(".log")
    assert not run_until(log, *overrides, env=env, kill_when=lambda _: reached.exists() and saved.exists())


def assert_same_run(killed: Path, whole: Path) -> None:
    assert comparable(metrics(killed)) == comparable(metrics(whole))
    assert (killed / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


def test_preferences_over_pairs_end_as_if_never_killed(tmp_path, capsys):
    """On two ranks, with a frozen reference and a second policy; pairs stay together.

    What reads the run needs nothing of its code.
    """
    build(tmp_path / "model")
    pairs = [{"prompt": f"{i}?", "chosen": f"{i * 7}!", "rejected": "no" * (i % 3 + 1)} for i in range(10)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    base = ("trainer.task=tests.support.preferences:TWO", f"model.path={tmp_path}/model", "trainer.num_workers=2",
            "data=files", f"data.train_files=[{tmp_path}/pairs.jsonl]", *SHORT,
            "trainer.mini_batch_size=4")  # fmt: skip
    assert run_until(tmp_path / "whole.log", f"trainer.run_dir={tmp_path}/whole", *base)
    rows = metrics(tmp_path / "whole")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert abs(rows[0]["policy/margin"]) < 1e-4 < rows[-1]["policy/margin"], "the reference is the initial policy"
    assert rows[-1]["policy/loss"] < rows[0]["policy/loss"] and rows[-1]["progress/samples"] == 2 * 4 * STEPS
    first, last = rows[0], rows[-1]
    assert first["second/loss"] == first["policy/loss"] and last["second/loss"] > last["policy/loss"], "it is slower"

    killed = (f"trainer.run_dir={tmp_path}/killed", *base)
    kill_at_step_3(tmp_path / "killed", *killed)
    described = "\n".join(diagnose(str(tmp_path / "killed")))
    assert f"of {STEPS} is logged" in described and "trainer.task=" not in described
    assert run_until(tmp_path / "killed.log", *killed)
    assert "resume verified: 1 replayed step" in (tmp_path / "killed.log").read_text()
    assert_same_run(tmp_path / "killed", tmp_path / "whole")

    compare_runs([str(tmp_path / "killed"), str(tmp_path / "whole")], None, as_json=True)
    best = max(row[TASK.best] for row in rows)
    assert [row[f"best {TASK.best}"] for row in json.loads(capsys.readouterr().out)] == [best, best]
    assert Path(write_report(str(tmp_path / "killed"))).stat().st_size > 5000


def test_distillation_with_muon_ends_as_if_never_killed(tmp_path):
    """On two ranks, with the teacher's log-probs as advantages, and a divergence over the vocabulary in the loss."""
    build(tmp_path / "model")
    build(tmp_path / "teacher", seed=1)
    base = ("algorithm=opd", f"model.path={tmp_path}/model", f"algorithm.teacher.path={tmp_path}/teacher",
            "algorithm.opd_kl_coef=1", "algorithm.teacher.divergence=jsd", "trainer.policy.optimizer.name=muon",
            "trainer.policy.optimizer.lr=1e-3", "trainer.num_workers=2", *SHORT)  # fmt: skip
    assert run_until(tmp_path / "whole.log", f"trainer.run_dir={tmp_path}/whole", *base)
    distances = [row["policy/teacher_kl"] for row in metrics(tmp_path / "whole")]
    assert distances[0] > distances[-1] > 0
    assert "Muon trains model.layers.*.self_attn.q_proj.weight" in (tmp_path / "whole.log").read_text()
    killed = (f"trainer.run_dir={tmp_path}/killed", *base)
    kill_at_step_3(tmp_path / "killed", *killed)
    assert run_until(tmp_path / "killed.log", *killed)
    assert "resume verified: 1 replayed step" in (tmp_path / "killed.log").read_text()
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_the_programs_of_the_pages_train_and_end_as_if_never_killed(tmp_path):
    """An optimizer, a KL to two teachers and a process reward model, as the pages have them, in one run."""
    models = ("policy", "first", "second", "judge")
    for seed, name in enumerate(models):
        build(tmp_path / name, seed)
    add_score_head(tmp_path / "judge")
    pages = {"optimizers": "lion:Lion", "distillation": "two_teachers:TASK", "extending": "steps:TASK"}
    words: list[str] = []
    for page, word in pages.items():
        files_of_page(f"docs/{page}.md", tmp_path)
        command = commands_of_page(f"docs/{page}.md", word).replace("\\\n", "")
        words += next(line for line in command.splitlines() if word in line).split()[2:]
    for file in ("two_teachers.py", "steps.py"):
        code = (tmp_path / file).read_text()
        assert "/models/" in code
        (tmp_path / file).write_text(code.replace("/models", str(tmp_path)))
    (tmp_path / "both.py").write_text(
        "import dataclasses, steps, two_teachers\n"
        "TASK = dataclasses.replace(steps.TASK, roles=lambda cfg: (*steps.roles(cfg), *two_teachers.TEACHERS))\n"
    )
    words = [word for word in words if not word.startswith(("trainer.task=", "reward.name="))]
    words += ["trainer.task=both:TASK", "model.path=policy", "trainer.resume_mode=latest", *SHORT]
    assert run_forked_job(*words, "trainer.run_dir=whole", cwd=tmp_path).returncode == 0
    assert len({row["policy/teachers_kl"] for row in metrics(tmp_path / "whole")}) == STEPS
    env, saved = {"TRAINER_FAILPOINT": f"logged,3,{tmp_path}/reached"}, tmp_path / "killed/checkpoints/global_step_2"
    job = start_forked_job(*words, "trainer.run_dir=killed", cwd=tmp_path, env=env, log=tmp_path / "log")
    wait_until(lambda: job.poll() is not None or (tmp_path / "reached").exists() and saved.exists())
    assert job.poll() is None, (tmp_path / "log").read_text()
    job.kill_group()
    job.wait()
    done = run_forked_job(*words, "trainer.run_dir=killed", cwd=tmp_path)
    assert done.returncode == 0 and "resume verified: " in done.stdout and "Lion trains model.embed" in done.stdout
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_student_of_several_teachers_continues_on_another_number_of_ranks(tmp_path):
    """Each teacher reads the rows of its source. An evaluation of the student has the numbers of the run's own."""
    paths = [tmp_path / name for name in ("model", "a", "b")]
    for seed, path in enumerate(paths):
        build(path, seed)
    rows = "".join(json.dumps({"prompt": f"{i}?", "answer": "x"}) + "\n" for i in range(8))
    (tmp_path / "rows.jsonl").write_text(rows)
    sources = [f"+data.mix.{name}.files=[{tmp_path}/rows.jsonl]" for name in ("math", "code")]
    base = ("algorithm=opd", "algorithm.policy_loss=clip", f"model.path={paths[0]}", "data=files", *sources, *SHORT,
            "data.train_size=-1",
            f"algorithm.teacher.path={{math:{paths[1]},code:{paths[2]}}}", f"data.val_files=[{tmp_path}/rows.jsonl]",
            f"trainer.val_interval={STEPS}", "reward.name=tests.support.hashed_reward:hashed")  # fmt: skip
    assert run_until(tmp_path / "whole.log", f"trainer.run_dir={tmp_path}/whole", *base, "trainer.num_workers=2")
    whole = metrics(tmp_path / "whole")
    assert len({row["policy/teacher_kl"] for row in whole[1:]} - {0.0}) == STEPS
    killed = (f"trainer.run_dir={tmp_path}/killed", *base)
    kill_at_step_3(tmp_path / "killed", *killed, "trainer.num_workers=2")
    assert run_until(tmp_path / "killed.log", *killed)
    assert_close(metrics(tmp_path / "killed"), whole)
    evaluated = evaluate(tmp_path / "killed", cwd=tmp_path)["metrics"]
    assert evaluated == validation_of(tmp_path / "killed", STEPS) and evaluated


def test_a_loss_that_reads_a_teacher_ends_as_if_never_killed(tmp_path):
    """The task is `rl` with one more role. A resume refuses another teacher, and its advice can be given as printed."""
    build(tmp_path / "model")
    build(tmp_path / "teacher", seed=1)
    base = ("trainer.task=tests.support.distillation:TASK", f"model.path={tmp_path}/model",
            "algorithm.policy_loss=tests.support.distillation:distilled", *SHORT)  # fmt: skip
    assert run_until(tmp_path / "whole.log", f"trainer.run_dir={tmp_path}/whole", *base)
    distances = [row["policy/teacher_distance"] for row in metrics(tmp_path / "whole")]
    assert distances[0] > distances[-1] > 0

    log, killed = tmp_path / "killed.log", (f"trainer.run_dir={tmp_path}/killed", *base)
    kill_at_step_3(tmp_path / "killed", *killed)
    weights = tmp_path / "teacher/model.safetensors"
    weights.rename(tmp_path / "kept")
    shutil.copy(tmp_path / "model/model.safetensors", weights)
    assert run_until(log, *killed, status=1)
    (advice,) = re.findall(r"trainer\.allow_config_change=\S+\]", log.read_text())
    assert advice == "trainer.allow_config_change=[teacher]"
    (tmp_path / "kept").replace(weights)
    assert run_until(log, *killed, advice)
    assert "resume verified: 1 replayed step" in log.read_text()
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
