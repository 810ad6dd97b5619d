"""The model that a run began with: its files, and its commit on the Hub. The commit of its data there, too."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.odd_files import rewrite
from tests.support.runs import OpenRun, configured
from trainer.checkpoint.components import (
    FILES_FILE,
    WEIGHTS_FILE,
    config_component,
    json_component,
    start_weights_component,
)
from trainer.config import Config, DataConfig, RoleSpec, TaskSpec, policy_role
from trainer.config.tasks import add_task
from trainer.data.datasets import read_examples
from trainer.errors import UserError
from trainer.files.hf_hub import pin, pinned, revision_of
from trainer.models.files import resolve_model_path

COMMITS = "a" * 40, "b" * 40


def write_model(directory: Path, eps: float = 1e-6, template: str = "{{ messages }}") -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"rms_norm_eps": eps}))
    (directory / "chat_template.jinja").write_text(template)
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return str(directory)


@contextmanager
def open_run(
    root: Path, path: str, lora: bool = False, template: str | None = None, **trainer: object
) -> Iterator[OpenRun]:
    cfg = configured(root, **{"resume_mode": "latest", **trainer})
    cfg.model.path, cfg.model.chat_template = path, template
    cfg.trainer.policy.lora.rank = 4 if lora else None
    cfg.algorithm.kl_coef = 0.0
    with OpenRun(cfg) as run:
        run.components = [config_component(cfg), start_weights_component(cfg, resolve_model_path(path))]
        run.components += [json_component(name, dict, lambda _: None) for name in ("models", "data", "trainer_state")]
        yield run


def save_run(root: Path, path: str, **options) -> None:
    with open_run(root, path, **options) as run:
        run.save(1)


@pytest.mark.parametrize("lora", [False, True])
def test_a_resume_refuses_changed_files_of_the_model(tmp_path, lora):
    model = write_model(tmp_path / "model")
    template = tmp_path / "own.jinja"
    template.write_text("one")
    save_run(tmp_path / "run", model, lora=lora, template=str(template))
    with open_run(tmp_path / "run", model, lora=lora, template=str(template)) as run:
        run.load()
    write_model(tmp_path / "model", eps=1e-5, template="{{ other }}")
    template.write_text("two")
    fork = "" if lora else r"fork the checkpoint \(trainer.resume_mode=from_path\), "
    sentence = (
        r"model.path=.*/model: its files are not those that the run began with \(chat_template.jinja has another "
        r"content; config.json has other values of rms_norm_eps; model.chat_template has another content\); restore "
        rf"them, {fork}or allow others with trainer.allow_config_change=\[model.path\]"
    )
    with open_run(tmp_path / "run", model, lora=lora, template=str(template)) as run:
        with pytest.raises(UserError, match=sentence):
            run.load()
    allowed = {"allow_config_change": ["model.path"]}
    with open_run(tmp_path / "run", model, lora=lora, template=str(template), **allowed) as run:
        run.load()
    write_model(tmp_path / "model")
    template.write_text("one")
    with open_run(tmp_path / "run", model, lora=lora, template=str(template)) as run:
        run.load()

    moved = str(shutil.move(model, tmp_path / "moved"))
    with open_run(tmp_path / "run", moved, lora=lora, template=str(template), **allowed) as run:
        run.load()


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_directory_may_move_if_its_content_is_the_same(tmp_path, lora):
    model = write_model(tmp_path / "model")
    save_run(tmp_path / "run", model, lora=lora)
    moved = str(shutil.copytree(model, tmp_path / "moved"))
    with open_run(tmp_path / "run", moved, lora=lora) as run:
        run.load()
        assert not run.directory.resume.altered, "replayed steps are compared as ever"
    with open_run(tmp_path / "run", moved, lora=lora, allow_config_change=["model.path"]) as run:
        run.load()
        assert run.directory.resume.altered != (), "nothing says that the content is the same"
    weights = (2).to_bytes(8, "little") + b"{}"
    (tmp_path / "moved/model.safetensors").write_bytes((3).to_bytes(8, "little") + b"{} ")
    with open_run(tmp_path / "run", moved, lora=lora) as run:
        if lora:  # else the checkpoint has all weights
            with pytest.raises(UserError, match="model.path=.*/moved: its weights are not those that the run began"):
                run.load()
        else:
            run.load()
    (tmp_path / "moved/model.safetensors").write_bytes(weights)
    write_model(tmp_path / "moved", eps=1e-5)
    with open_run(tmp_path / "run", moved, lora=lora) as run:
        with pytest.raises(
            UserError, match="model.path=.*/moved: its files are not those .*other values of rms_norm_eps"
        ):
            run.load()
    path = str(tmp_path / "run/checkpoints/global_step_1")
    with pytest.raises(UserError, match=r"allow it with trainer.allow_config_change=\[model.path\]"):
        with open_run(tmp_path / "fork", moved, lora=lora, resume_mode="from_path", resume_path=path):
            pass


def test_a_frozen_teacher_is_not_saved_so_a_resume_compares_its_weights(tmp_path):
    """Another directory than the policy's, and a role that no other code knows by its name."""
    model, teacher = write_model(tmp_path / "model"), write_model(tmp_path / "teacher")

    def teach(cfg: Config) -> tuple[RoleSpec, ...]:
        frozen = RoleSpec("teacher", path=teacher, path_key="trainer.teacher", computes="teacher_logprobs")
        return policy_role(cfg), frozen

    add_task("with:TEACHER", lambda: TaskSpec(build="with:build", roles=teach))
    save_run(tmp_path / "run", model, task="with:TEACHER")
    saved = tmp_path / "run/checkpoints/global_step_1"
    assert json.loads((saved / "manifest.json").read_text())["roles"] == ["policy"]
    assert json.loads((saved / WEIGHTS_FILE).read_text()).keys() == {"trainer.teacher"}
    with open_run(tmp_path / "run", model, task="with:TEACHER") as run:
        run.load()
    (tmp_path / "teacher/model.safetensors").write_bytes((3).to_bytes(8, "little") + b"{} ")
    with open_run(tmp_path / "run", model, task="with:TEACHER") as run:
        with pytest.raises(UserError, match="trainer.teacher=.*/teacher: its weights are not those that the run began"):
            run.load()


@pytest.mark.parametrize("name", [FILES_FILE, WEIGHTS_FILE])
def test_a_moved_model_directory_is_refused_if_the_checkpoint_does_not_know_its_content(tmp_path, name):
    model = write_model(tmp_path / "model")
    save_run(tmp_path / "run", model, lora=True)
    moved = str(shutil.copytree(model, tmp_path / "moved"))
    checkpoint = tmp_path / "run/checkpoints/global_step_1"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = [entry for entry in manifest["files"] if entry["path"] != name]
    rewrite(checkpoint, manifest)
    with pytest.raises(UserError, match=r"belong to that model; .*trainer.allow_config_change=\[model.path\]"):
        with open_run(tmp_path / "run", moved, lora=True):
            pass


def test_a_fork_of_a_full_run_may_begin_with_other_files_and_a_fork_with_adapters_may_not(tmp_path):
    model = write_model(tmp_path / "model")
    for lora in (False, True):
        save_run(tmp_path / f"parent {lora}", model, lora=lora)
    write_model(tmp_path / "model", eps=1e-5)
    for lora in (False, True):
        path = str(tmp_path / f"parent {lora}/checkpoints/global_step_1")
        with open_run(tmp_path / f"fork {lora}", model, lora=lora, resume_mode="from_path", resume_path=path) as run:
            if not lora:
                run.load()
                continue
            with pytest.raises(UserError, match="other values of rms_norm_eps.; restore them, or allow"):
                run.load()


def test_a_checkpoint_of_an_earlier_version_names_no_files_and_is_accepted(tmp_path):
    model = write_model(tmp_path / "model")
    save_run(tmp_path / "run", model)
    checkpoint = tmp_path / "run/checkpoints/global_step_1"
    (checkpoint / FILES_FILE).unlink()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = [entry for entry in manifest["files"] if entry["path"] != FILES_FILE]
    rewrite(checkpoint, manifest)
    write_model(tmp_path / "model", eps=1e-5)
    with open_run(tmp_path / "run", model) as run:
        run.load()


def move_main(cache: Path, commit: str, eps: float) -> None:
    """Put a commit into the cache of the Hub, and let `main` point there."""
    repository = cache / "models--own--model"
    write_model(repository / "snapshots" / commit, eps)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs/main").write_text(commit)


@pytest.mark.parametrize("mode", ["latest", "from_path"])
def test_a_run_keeps_the_commit_of_the_hub_that_it_began_with(tmp_path, monkeypatch, mode):
    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    move_main(cache, COMMITS[0], 1e-6)
    assert revision_of(resolve_model_path("own/model")) == COMMITS[0]
    save_run(tmp_path / "run", "own/model")
    move_main(cache, COMMITS[1], 1e-5)
    assert revision_of(resolve_model_path("own/model")) == COMMITS[1]
    more = {}
    if mode == "from_path":
        more = {"resume_mode": mode, "resume_path": str(tmp_path / "run/checkpoints/global_step_1")}
    with open_run(tmp_path / "run" if mode == "latest" else tmp_path / "fork", "own/model", **more) as run:
        assert revision_of(resolve_model_path("own/model")) == COMMITS[0]
        run.load()
        run.save(2)
        assert pinned("own/model") == COMMITS[0]
    assert pinned("own/model") is None
    shutil.rmtree(cache / "models--own--model/snapshots" / COMMITS[0])
    with pytest.raises(UserError, match=f"at the commit {COMMITS[0]} that the run began with"):
        with open_run(tmp_path / "run", "own/model"):
            pass


def put_data(cache: Path, commit: str, answer: str, age: int) -> None:
    """Put a copy of a data set at a commit into the cache of the library, as a load from the Hub does."""
    import datasets

    rows = cache.parent / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1", "answer": answer}) + "\n")
    made = datasets.load_dataset("json", data_files=str(rows), split="train", cache_dir=str(cache.parent / answer))
    copy = cache / "own___rows/default/0.0.0" / commit
    shutil.copytree(Path(made.cache_files[0]["filename"]).parent, copy)
    (copy / "json-train.arrow").rename(copy / "rows-train.arrow")
    info = json.loads((copy / "dataset_info.json").read_text())
    for split in info["splits"].values():
        split["dataset_name"] = "rows"
    (copy / "dataset_info.json").write_text(json.dumps(info | {"dataset_name": "rows"}))
    os.utime(copy, (2e9 - age, 2e9 - age))


def answer_of(address: str) -> str:
    (example,) = read_examples(DataConfig(train_files=[address]), "train")
    return example["answer"]


def test_a_run_keeps_the_commit_of_a_data_set_that_it_began_with(tmp_path, monkeypatch):
    """Without the Hub the library reads the newest copy in its cache, of whatever commit."""
    import datasets

    cache = tmp_path / "cache"
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    model = write_model(tmp_path / "model")
    put_data(cache, COMMITS[0], "2", age=2)
    with open_run(tmp_path / "run", model) as run:
        assert answer_of("hf://own/rows?split=train") == "2" and pinned("hf://own/rows") == COMMITS[0]
        run.save(1)
    assert pinned("hf://own/rows") is None
    put_data(cache, COMMITS[1], "3", age=1)
    assert answer_of("hf://own/rows") == "3"
    pin({})
    moved = (
        f"data.train_files=hf://own/rows: the newest copy in the cache is of the commit {COMMITS[1]}, and the run "
        f"began with {COMMITS[0]}; start without HF_HUB_OFFLINE, or remove the newer copy"
    )
    with open_run(tmp_path / "run", model) as run:
        with pytest.raises(UserError) as refused:
            answer_of("hf://own/rows")
        assert str(refused.value) == moved
    parent = {"resume_mode": "from_path", "resume_path": str(tmp_path / "run/checkpoints/global_step_1")}
    for kinds, commit in ((None, COMMITS[0]), (["weights", "optimizer", "rng", "state"], None)):
        with open_run(tmp_path / f"fork {commit}", model, **parent, **({"load_components": kinds} if kinds else {})):
            assert pinned("hf://own/rows") == commit
    with pytest.raises(UserError, match=f"{COMMITS[1]}, and the address names {COMMITS[0]};"):
        answer_of(f"hf://own/rows?revision={COMMITS[0]}")
    shutil.rmtree(cache / "own___rows/default/0.0.0" / COMMITS[1])
    assert answer_of(f"hf://own/rows?revision={COMMITS[0]}") == "2" and pinned("hf://own/rows") is None
    with open_run(tmp_path / "run", model) as run:
        assert answer_of("hf://own/rows") == "2"
        run.save(2)
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: asked.append(options["revision"]) or 1 / 0)
    with open_run(tmp_path / "run", model) as run:
        with pytest.raises(UserError, match=f"from the Hub at the commit {COMMITS[0]} "):
            answer_of("hf://own/rows")
    assert asked == [COMMITS[0]]
