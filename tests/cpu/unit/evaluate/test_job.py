"""Evaluations of a model: whole, and killed in the middle."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.forks import fork_server, run_forked
from tests.support.jobs import environment, wait_until
from trainer.config import compose
from trainer.errors import UserError, sentences_of
from trainer.evaluate.job import SetResult, _check_sources, _earlier, _planned, run_evaluation
from trainer.evaluate.subject import Subject
from trainer.models.tiny import TinyShape, build_tiny
from trainer.run.run_metadata import record_start

pytestmark = pytest.mark.timeout(900)

ROWS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("models") / "tiny")
    build_tiny(TinyShape(hidden_size=64, intermediate_size=128), path)
    return path


@pytest.fixture
def words(model, tmp_path) -> list[str]:
    """The command that evaluates the model on a file of twelve rows."""
    rows = [{"prompt": f"p{i}", "answer": "wait" if i == 9 else f"a{i}"} for i in range(ROWS)]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "evaluate",
        model,
        "data.val_files=[val.jsonl]",
        "data.val_sets.more.files=[val.jsonl]",
        "data.val_sets.more.size=3",
        "data.val_sets.more.n=4",
        "data.val_sets.more.interval=-1",
        "reward.name=tests.support.waiting_reward:score",
        "reward.timeout_s=100",
        "rollout=transformers",
        "rollout.val_n=2",
        "rollout.max_prompt_tokens=64",
        "rollout.max_response_tokens=8",
        "rollout.max_num_seqs=4",
        "trainer.ray_address=processes",
        "trainer.device=cpu",
    ]


def env(tmp_path: Path, name: str) -> dict[str, str]:
    return {**environment(), "REWARD_CALLS": str(tmp_path / f"{name}.calls"), "REWARD_GO": str(tmp_path / "go")}


def test_a_killed_evaluation_continues_with_what_was_finished(words, tmp_path):
    """And then has the results of one that was not killed, to the last bit."""
    killed = [*words, "trainer.run_dir=killed"]
    with open(tmp_path / "log", "w") as log:
        job = fork_server().start(
            "tests.support.forks:run_module", "trainer", *killed, cwd=tmp_path, env=env(tmp_path, "killed"), stdout=log
        )
    journal = tmp_path / "killed/.journal"
    wait_until(lambda: job.poll() is not None or journal.exists() and any(journal.glob("*.arrow")))
    assert job.poll() is None, (tmp_path / "log").read_text()
    job.kill_group()
    job.wait()
    assert not (tmp_path / "killed/evaluation.json").exists()
    (tmp_path / "go").touch()
    again = run_forked("trainer", killed, tmp_path, env(tmp_path, "killed"), 200)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "groups came from the journal" in again.stdout
    calls = Counter((tmp_path / "killed.calls").read_text().split())
    assert calls["a0"] == 1 + 2 + 4 and 3 <= calls["wait"] <= 4, "a finished row is not rewarded again"
    assert not any(journal.glob("*.arrow"))

    whole = [*words, "trainer.run_dir=whole"]
    done = run_forked("trainer", whole, tmp_path, env(tmp_path, "whole"), 200)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("killed", "whole"))
    assert first == second and set(first["sets"]["default"]["values"]["accuracy"]) == {str(i) for i in range(ROWS)}
    assert set(first["metrics"]) >= {"val/accuracy", "val/reward/mean", "val/pass@2"}
    for name in ("default", "more"):
        assert set(first["sets"][name]["values"]["reward/score"]) == set(first["sets"][name]["values"]["accuracy"])
    assert set(first["metrics"]) >= {"val/more/accuracy", "val/more/avg@4", "val/more/pass@2", "val/more/pass@4"}
    for file in ("rollouts/default.arrow", "rollouts/more.arrow"):
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert "accuracy" in done.stdout and "results: whole" in done.stdout

    finished = run_forked("trainer", killed, tmp_path, env(tmp_path, "finished"), 200)
    assert finished.returncode == 0 and "nothing is left to do in killed" in finished.stdout, finished.stderr
    assert not (tmp_path / "finished.calls").exists() and "pass@2" in finished.stdout
    other = run_forked("trainer", [*killed, "rollout.val_n=4"], tmp_path, env(tmp_path, "other"), 200)
    assert other.returncode == 2 and "trainer.run_dir=killed: holds another evaluation of " in other.stderr
    assert other.stderr.endswith(", with another rollout.val_n; name another directory\n")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (["reward.name=no_such:f"], "reward.name=no_such:f: cannot be imported"),
        (["rollout.max_prompt_tokens=1"], "rollout.max_prompt_tokens=1: all 12 val prompts are longer"),
        (
            ["data.val_files=[]", "data.val_sets.more.files=[none.jsonl]"],
            "data.val_sets.more.files=none.jsonl: no such",
        ),
        (["algorithm.kl_coef=1"], "algorithm.kl_coef: trainer.task="),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_engines_start(words, tmp_path, changed, sentence):
    done = run_forked("trainer", [*words, *changed], tmp_path, env(tmp_path, "refused"), 100)
    assert done.returncode == 2, done.stdout + done.stderr
    assert sentence in done.stderr.strip().splitlines()[-1] and "Traceback" not in done.stderr


@pytest.mark.parametrize("left", ["checkpoints", "metrics.jsonl", "committed.json", "starts.jsonl"])
def test_the_directory_of_a_training_run_is_refused_and_stays_as_it_was(run_dir, tmp_path, left):
    """Its journal is needed by a resume, and its records tell its task."""
    directory = run_dir if left == "checkpoints" else tmp_path / "short"
    cfg = compose([f"trainer.run_dir={directory}"])
    directory.mkdir(exist_ok=True)
    if left == "starts.jsonl":
        record_start(str(directory), cfg)
    elif left != "checkpoints":
        (directory / left).write_text("{}")
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    with pytest.raises(UserError, match=r"(short|run): already holds a run; an evaluation needs another"):
        run_evaluation(cfg, Subject("model"), "cpu")
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_environments_are_checked_where_they_run_with_their_options():
    words = ["data.train_files=[t.jsonl]", "data.val_files=[v.jsonl]"]
    wrong = "+data.val_sets.more.environment.kwargs.tires=3"
    retry = "data.val_sets.more.environment.name=tests.support.retry:RetryEnv"
    with pytest.raises(UserError, match="unexpected keyword argument 'tires'"):
        _check_sources(compose([*words, "data.val_sets.more.files=[m.jsonl]", retry, wrong]))


def test_sets_are_checked_as_the_sources_of_a_training_are():
    """All of them, and the sentences name their own keys."""
    words = ["data.train_files=[t.jsonl]", "data.val_files=[v.jsonl]", "rollout.engine=transformers"]
    agent = [f"data.val_sets.asking.{word}" for word in ("files=[a]", "environment.name=tests.support.agents:OneCall")]
    reward = [f"data.val_sets.judged.{word}" for word in ("files=[r]", "reward.name=absent:score")]
    with pytest.raises(UserError) as raised:
        _check_sources(compose([*words, *agent, *reward]))
    first, second = sentences_of(raised.value)
    assert first.startswith(
        "data.val_sets.asking.environment.name=tests.support.agents:OneCall: is an agent, and rollout."
    )
    assert second.startswith("data.val_sets.judged.reward.name=absent:score: ")


def test_results_of_other_rows_or_other_code_are_not_taken_for_new_ones(model, tmp_path, monkeypatch):
    """Also under the same settings: a file was corrected, a reward was edited."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("val.jsonl", "more.jsonl"):
        (tmp_path / name).write_text('{"prompt": "p", "answer": "a"}\n')
    (tmp_path / "edited_reward.py").write_text("def score(): ...")
    words = ["data.train_files=[t.jsonl]", "data.val_files=[val.jsonl]", "data.val_sets.more.files=[more.jsonl]"]
    words += [f"model.path={model}", f"trainer.run_dir={tmp_path}/done"]
    words += ["data.val_sets.more.reward.name=edited_reward:score"]
    cfg, done = compose(words), f"{tmp_path}/done"
    results = _planned(cfg, Subject("tiny"))
    assert _earlier(done, results) is None
    results.sets["more"] = SetResult(["row"], 1, 0, 1, {})
    (tmp_path / "done").mkdir(exist_ok=True)
    results.write(done, lambda: None)
    assert _earlier(done, _planned(cfg, Subject("tiny"))) == results
    for file, text, named in (
        ("more.jsonl", '{"prompt": "p", "answer": "b"}\n', "content of more"),
        ("val.jsonl", '{"prompt": "p", "answer": "a"}\n' * 2, "content of default"),
        ("edited_reward.py", "def score(): return 1", "code of edited_reward:score"),
    ):
        before = (tmp_path / file).read_text()
        (tmp_path / file).write_text(text)
        with pytest.raises(UserError, match=f"another evaluation of tiny, with another {named}; name another dir"):
            _earlier(done, _planned(cfg, Subject("tiny")))
        (tmp_path / file).write_text(before)
