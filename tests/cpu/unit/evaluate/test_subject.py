"""What the words of `trainer evaluate` name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.buckets import make_bucket, use_s3
from tests.support.odd_files import config, open_run
from trainer.checkpoint.storage import open_storage
from trainer.config import compose
from trainer.errors import UserError
from trainer.evaluate.subject import PATH, find_subject


def model(path: Path, name: str = "config.json") -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_text("{}")
    return str(path)


def test_a_run_is_evaluated_at_its_newest_checkpoint_with_its_config(run_dir):
    subject, words = find_subject([str(run_dir), "rollout.val_n=4"])
    assert (subject.name, subject.step) == (f"{run_dir}/checkpoints/global_step_2", 2)
    cfg = compose(words)
    assert (cfg.trainer.task, cfg.rollout.val_n) == (PATH, 4)
    assert cfg.trainer.run_dir == f"{run_dir}/evaluations/global_step_2"
    assert cfg.data.synthetic is None, "the data of the demo would replace that of the run"


def test_a_run_of_a_sweep_has_values_in_its_path(run_dir, tmp_path, monkeypatch):
    shutil.move(run_dir, tmp_path / "algorithm=ppo,trainer.seed=1")
    assert find_subject([f"{tmp_path}/algorithm=ppo,trainer.seed=1"])[0].step == 2
    monkeypatch.chdir(tmp_path)
    subject, words = find_subject(["algorithm=ppo,trainer.seed=1", "trainer.seed=3"])
    assert (subject.step, compose(words).trainer.seed) == (2, 3)


@pytest.mark.parametrize("words", [["--step", "1"], ["--step=1"]])
def test_a_step_of_a_run_is_chosen(run_dir, words):
    subject, overrides = find_subject([str(run_dir), *words])
    assert subject.step == 1 and f'trainer.run_dir="{run_dir}/evaluations/global_step_1"' in overrides


def test_a_checkpoint_is_named_by_its_path(run_dir):
    subject, overrides = find_subject([f"{run_dir}/checkpoints/global_step_1/"])
    assert subject.step == 1 and f'trainer.run_dir="{run_dir}/evaluations/global_step_1"' in overrides
    shutil.copytree(run_dir / "checkpoints/global_step_1", run_dir / "elsewhere/global_step_1")
    subject, overrides = find_subject([f"{run_dir}/elsewhere/global_step_1", "trainer.run_dir=here"])
    assert subject.step == 1 and not any("evaluations" in word for word in overrides)


def test_the_recorded_config_comes_without_what_an_evaluation_does_not_read(tmp_path):
    cfg = config(tmp_path / "run", num_workers=4, ckpt_interval=7, offload="all")
    cfg.rollout.colocate, cfg.algorithm.kl_coef, cfg.rollout.max_prompt_tokens = True, 0.5, 77
    cfg.data.system_prompt, cfg.data.val_files = "Say ${trainer.seed}.", ["val.jsonl"]
    cfg.model.chat_template = "template.jinja"
    cfg.trainer.seed = 9
    state = {"step": 3}
    with open_run(cfg, state) as run:
        run.save(3, roles=["policy"])
    found = compose(find_subject([str(tmp_path / "run")])[1])
    assert (found.trainer.num_workers, found.trainer.offload, found.rollout.colocate) == (1, "none", False)
    assert (found.trainer.seed, found.rollout.max_prompt_tokens, found.algorithm.kl_coef) == (9, 77, 0.001)
    assert found.data.system_prompt == "Say ${trainer.seed}.", "a text is no reference"
    assert found.model.chat_template is None, "the checkpoint's tokenizer has it"
    assert (found.data.val_files, found.data.train_files) == (["val.jsonl"], [])
    assert compose(find_subject([str(tmp_path / "run"), "data.val_files=[b.jsonl]"])[1]).data.val_files == ["b.jsonl"]


def test_files_take_the_place_of_the_generator_of_a_run(tmp_path):
    cfg = config(tmp_path)
    cfg.data.synthetic, cfg.data.train_size, cfg.data.val_size = "arithmetic", 4, 4
    cfg.data.synthetic_args = {"max_value": 9}
    with open_run(cfg, {"step": 1}) as run:
        run.save(1, roles=["policy"])
    whole, other = (compose(find_subject([str(tmp_path), *words])[1]) for words in ([], ["data.val_files=[b.jsonl]"]))
    assert (whole.data.synthetic, whole.data.synthetic_args) == ("arithmetic", {"max_value": 9})
    assert (other.data.synthetic, other.data.synthetic_args, other.data.val_files) == (None, {}, ["b.jsonl"])
    assert (whole.data.val_size, other.data.val_size) == (4, -1), "the size is that of the generator"
    own = compose(find_subject([str(tmp_path), "data.val_files=[b.jsonl]", "data.val_size=2"])[1])
    assert own.data.val_size == 2


def test_sets_keep_the_values_that_they_had_in_the_run(tmp_path):
    sets = [
        "plain.files=[a.jsonl]",
        "own.files=[b.jsonl]",
        "own.prompt_key=question",
        "own.reward.name=math",
        "own.reward.success_threshold=0.5",
        "agent.files=[c.jsonl]",
        "agent.environment.name=my:Agent",
        "agent.environment.kwargs.turns=3",
    ]
    cfg = compose([
        "data.train_files=[t.jsonl]",
        "data.system_prompt=Think.",
        "environment.name=my:World",
        "+environment.kwargs.turns=3",
        "reward.name=gsm8k",
        f"trainer.run_dir={tmp_path}",
        f"trainer.ckpt_path={tmp_path}/checkpoints",
        *(f"data.val_sets.{word}" for word in sets),
    ])  # fmt: skip
    cfg.trainer.resume_mode = "latest"
    with open_run(cfg, {"step": 1}) as run:
        run.save(1, roles=["policy"])
    same = compose(find_subject([str(tmp_path)])[1])
    assert (same.data.val_sets, same.reward, same.environment) == (cfg.data.val_sets, cfg.reward, cfg.environment)
    changed = ["reward.name=reverse_text", "data.val_sets.own.reward.timeout_s=7"]
    found = compose(find_subject([str(tmp_path), *changed])[1]).data.val_sets
    assert [one.reward.name for one in found.values()] == ["gsm8k", "math", "gsm8k"]
    assert found["own"].reward.timeout_s == 7


def test_a_model_is_a_directory_or_an_id_or_the_key(tmp_path):
    export = model(tmp_path / "exports/global_step_7/policy")
    subject, words = find_subject([export, "data.val_files=[a.jsonl]"])
    cfg = compose(words)
    assert (subject.name, subject.step, subject.checkpoint) == (export, 0, None)
    assert (cfg.model.path, cfg.data.val_files) == (export, ["a.jsonl"])
    assert cfg.trainer.run_dir == "outputs/evaluations/exports-global_step_7"
    subject, words = find_subject(["Qwen/Qwen3-0.6B", "data=gsm8k"])
    assert compose(words).model.path == subject.name == "Qwen/Qwen3-0.6B"
    subject, words = find_subject(["model.path=a/b", "data=arithmetic"])
    assert (subject.name, compose(words).trainer.run_dir) == ("a/b", "outputs/evaluations/a-b")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "^name what to evaluate: a run, a checkpoint, an export, or model.path=PATH$"),
        (["{run}", "{run}"], "run: one model is evaluated at a time, and .* is named, too$"),
        (["{run}", "model.path=x"], "run: model.path names a model to evaluate, too; leave one of them out$"),
        (["{run}", "--step", "9"], "^--step=9: .* has no checkpoint of that step; it has 1, 2$"),
        (["{run}", "--step=x"], "^argument --step: invalid int value: 'x'; "),
        (["{run}", "--best"], "^--best: no checkpoint of .* has a score; name one with --step, of 1, 2$"),
        (["{run}", "--best", "--step=1"], "^argument --step: not allowed with argument --best; "),
        (["{run}", "-m", "trainer.seed=1,2"], "an evaluation is one job; give one command for each$"),
        (["{run}", "data=arithmetic"], "^data=arithmetic: the config is that of .*; override keys of it instead$"),
        (["{run}", "--config=x.yaml"], "^--config=x.yaml: the config is that of"),
        (["owner/model"], "^owner/model: no such directory here; if it is a model of the Hub, name the data to "),
        (["{model}"], "name the data to evaluate it on, such as data=gsm8k"),
        (["{model}", "--step=3", "data=gsm8k"], "^--best and --step choose a checkpoint of a run, and no run"),
        (["{adapter}", "data=gsm8k"], "adapter: holds an adapter alone; evaluate the checkpoint, or export it with"),
        (["./none", "data=gsm8k"], "^./none: no such directory; name a run, a checkpoint, an export or the id of"),
        (["{empty}"], "empty: no checkpoint is there"),
        (["s3://", "rollout.val_n=1"], "^s3://: "),
    ],
)
def test_what_cannot_be_evaluated_gets_one_sentence(run_dir, tmp_path, words, sentence):
    (tmp_path / "empty").mkdir()
    places = {
        "run": str(run_dir),
        "model": model(tmp_path / "model"),
        "adapter": model(tmp_path / "adapter", "adapter_config.json"),
        "empty": str(tmp_path / "empty"),
    }
    with pytest.raises(UserError, match=sentence) as refused:
        find_subject([word.format(**places) for word in words])
    assert "\n" not in str(refused.value)


def test_a_damaged_checkpoint_is_refused(run_dir):
    checkpoint = run_dir / "checkpoints/global_step_2"
    (checkpoint / "data.json").write_text("{}")
    with pytest.raises(UserError, match="data.json has 2 bytes instead of"):
        find_subject([str(checkpoint)])
    assert find_subject([str(run_dir)])[0].step == 1, "of a run, the newest valid one is taken"


def test_a_run_in_an_object_store_is_evaluated(run_dir, s3_url, monkeypatch):
    use_s3(monkeypatch, s3_url)
    store = open_storage(f"{make_bucket('evaluated')}/run")
    for path in (run_dir / "checkpoints").rglob("*"):
        if path.is_file():
            store.put(path.relative_to(run_dir / "checkpoints").as_posix(), path.read_bytes())
    subject, words = find_subject(["s3://evaluated/run"])
    assert (subject.name, subject.step) == ("s3://evaluated/run/global_step_2", 2)
    cfg = compose(words)
    assert cfg.trainer.run_dir.startswith("outputs/evaluations/") and cfg.trainer.run_dir.endswith("/global_step_2")
    assert find_subject(["s3://evaluated/run/global_step_1"])[0].step == 1


def test_a_task_with_rewards_of_its_own_needs_others(tmp_path):
    cfg = config(tmp_path, task="sft")
    with open_run(cfg, {"step": 1}) as run:
        run.save(1, roles=["policy"])
    with pytest.raises(UserError, match="the rewards of its task sft are not known to an evaluation; name one with"):
        find_subject([str(tmp_path)])
    assert find_subject([str(tmp_path), "reward.name=gsm8k"])[0].step == 1
