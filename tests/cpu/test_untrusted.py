"""What a checkpoint, a chat template or a data file holds is data: nothing of it is executed, followed or trusted."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.cpu.test_odd_files import config, replace, rewrite
from tests.support.opened import opened_files
from tests.support.ranks import run_ranks
from tests.support.runs import OpenRun
from trainer.checkpoint.__main__ import main as checkpoint_tool
from trainer.checkpoint.parts import assets_part, config_part, json_part, models_part
from trainer.checkpoint.safe_dcp import load_metadata
from trainer.config import ModelConfig, TinyConfig
from trainer.data import datasets
from trainer.data.datasets import read_rows, render_text
from trainer.durable import digest_bytes
from trainer.errors import UserError
from trainer.models.files import load_config
from trainer.models.tiny import build_tiny
from trainer.models.tokenizer import load_tokenizer
from trainer.workers.rank import Rank

# ----------------------------------------------------------------------------------------------------------
# Checkpoints


class OneRank:
    """What `trainer.learner.ranks.Ranks` is to a run directory, with one rank in this process."""

    saved_roles = ["policy"]

    def __init__(self, rank: Rank):
        self.rank = rank

    def begin_save(self, files: Any) -> Any:
        self.rank.begin_save(["policy"], files)
        return self.rank.finish_save

    def load(self, role: str, files: Any, what: Any, steps_added: int = 0) -> None:
        self.rank.call(role, "load", files, what, steps_added)


def open_run(rank: Rank, root: str, model: str) -> OpenRun:
    rank.build(["policy"], model)
    run = OpenRun(config(Path(root)))
    run.parts = [
        config_part(run.cfg),
        json_part("trainer_state", lambda: {"step": 1}, lambda _: None),
        json_part("data", lambda: {"position": 1}, lambda _: None),
        models_part(OneRank(rank)),  # type: ignore[arg-type]
        assets_part(model, load_tokenizer(model), False),
    ]
    return run


def save_run(rank: Rank, root: str, model: str) -> None:
    with open_run(rank, root, model) as run:
        run.save(1, roles=["policy"])


def resume_run(rank: Rank, root: str, model: str) -> str:
    try:
        with open_run(rank, root, model) as run:
            run.load()
            return run.resume.checkpoint.path
    except UserError as error:
        return str(error)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_tiny(TinyConfig(hidden_size=64, intermediate_size=128, seed=3), str(path))
    return path


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory, model) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(1, save_run, str(root), str(model))
    return root


@pytest.fixture
def run_dir(saved_run, tmp_path) -> Path:
    return shutil.copytree(saved_run, tmp_path / "run")


@pytest.fixture
def checkpoint(run_dir) -> Path:
    return run_dir / "checkpoints/global_step_1"


def name_file(checkpoint: Path, name: str, data: bytes) -> None:
    """Add a file to a checkpoint and to its manifest."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / name).parent.mkdir(exist_ok=True)
    (checkpoint / name).write_bytes(data)
    entries = [entry for entry in manifest["files"] if entry["path"] != name]
    entries.append({"path": name, "bytes": len(data), "hash": digest_bytes(data)})
    rewrite(checkpoint, manifest | {"files": entries})


def export(checkpoint: Path, out: Path, *flags: str) -> int:
    return checkpoint_tool(["export", str(checkpoint), str(out), *flags])


def resume_and_count(rank: Rank, root: str, model: str) -> int:
    with opened_files() as names, open_run(rank, root, model) as run:
        run.load()
    return names.count("manifest.json")


def test_a_resume_reads_the_manifest_once(saved_run, model):
    assert run_ranks(1, resume_and_count, str(saved_run), str(model)) == [1]


def test_an_export_copies_the_files_of_the_manifest_alone(checkpoint, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/key").write_text("secret")
    assets = checkpoint / "policy/huggingface"
    (assets / "planted.txt").write_text("planted")
    (assets / "link").symlink_to(tmp_path / "secret")
    (assets / "links").symlink_to(tmp_path / "secrets")
    assert export(checkpoint, tmp_path / "out") == 0
    named = {entry["path"] for entry in json.loads((checkpoint / "manifest.json").read_text())["files"]}
    expected = {path.removeprefix("policy/huggingface/") for path in named if "/huggingface/" in path}
    assert set(os.listdir(tmp_path / "out")) == expected | {"model.safetensors"}
    assert load_file(tmp_path / "out/model.safetensors")


@pytest.mark.parametrize("where", ["policy/huggingface/tokenizer.json", "policy/huggingface", "policy/.metadata"])
def test_an_export_follows_no_link(checkpoint, tmp_path, where, capsys):
    target = checkpoint / where
    target.rename(checkpoint / "moved")
    target.symlink_to(checkpoint / "moved")
    assert export(checkpoint, tmp_path / "out") == 1
    assert "huggingface" in capsys.readouterr().err or where == "policy/.metadata"
    assert not list(tmp_path.glob("out*"))


def test_shards_that_the_manifest_does_not_name_are_not_read(checkpoint, tmp_path, capsys):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    kept = [entry for entry in manifest["files"] if not entry["path"].endswith(".distcp")]
    rewrite(checkpoint, manifest | {"files": kept})
    for arguments in (["export", str(checkpoint), str(tmp_path / "out")], ["diff", str(checkpoint), str(checkpoint)]):
        assert checkpoint_tool(arguments) == 1
        assert "__0_0.distcp, which manifest.json does not name" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["file/out", "there", "dangling"])
def test_an_export_that_cannot_be_written_is_a_sentence(checkpoint, tmp_path, out, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert export(checkpoint, tmp_path / out) == 2
    assert str(tmp_path / out) in capsys.readouterr().err


def test_an_export_that_fails_leaves_nothing(checkpoint, tmp_path):
    name_file(checkpoint, "policy/huggingface/model.safetensors/x", b"in the way of the weights")
    assert export(checkpoint, tmp_path / "out") == 2
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "change",
    [{"dtype": "load"}, {"dtype": 5}, {"dtype": "float64"}, {"dtype": ["float32"]}],
)
def test_an_export_takes_no_dtype_but_the_known_ones(checkpoint, tmp_path, change, capsys):
    path = "policy/huggingface/config.json"
    replace(checkpoint, path, json.dumps(json.loads((checkpoint / path).read_text()) | change).encode())
    assert export(checkpoint, tmp_path / "out") == 2
    assert "--dtype=auto" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--max-file-gb", "nan"], ["--max-file-gb", "-1"], ["--max-file-gb", "inf"]])
def test_an_export_with_impossible_files_is_refused(checkpoint, tmp_path, flags, capsys):
    assert export(checkpoint, tmp_path / "out", *flags) == 2
    assert "--max-file-gb" in capsys.readouterr().err


def test_absurd_tensors_are_refused_before_memory_is_taken(checkpoint, tmp_path, capsys):

    metadata = load_metadata(io.BytesIO((checkpoint / "policy/.metadata").read_bytes()))
    name = next(name for name in metadata.state_dict_metadata if name.startswith("model."))
    metadata.state_dict_metadata[name].size = torch.Size([2**60])
    replace(checkpoint, "policy/.metadata", pickle.dumps(metadata))
    for arguments in (["export", str(checkpoint), str(tmp_path / "out")], ["diff", str(checkpoint), str(checkpoint)]):
        assert checkpoint_tool(arguments) == 1
        assert "is larger than its files" in capsys.readouterr().err


EVIL_CODE = """
import os
os.mkdir({executed!r})
from transformers import Qwen3Config, PreTrainedTokenizerFast
class Config(Qwen3Config): model_type = "{kind}"
class Tokenizer(PreTrainedTokenizerFast): pass
"""


@pytest.mark.parametrize("kind", ["qwen3", "unheard_of"])
def test_code_in_a_checkpoint_is_not_executed(run_dir, checkpoint, model, tmp_path, kind, capsys, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    executed, assets = tmp_path / "executed", checkpoint / "policy/huggingface"
    code = EVIL_CODE.format(executed=str(executed), kind=kind)
    name_file(checkpoint, "policy/huggingface/evil.py", code.encode())
    auto_map = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((assets / name).read_text()) | {"auto_map": auto_map}
        content |= {"model_type": kind} if name == "config.json" else {}
        replace(checkpoint, f"policy/huggingface/{name}", json.dumps(content).encode())
    replace(checkpoint, "policy/huggingface/chat_template.jinja", ESCAPES[0].format(executed=executed).encode())
    other = shutil.copytree(checkpoint, tmp_path / "global_step_1")
    for arguments in (["verify", str(run_dir)], ["show", str(checkpoint)], ["diff", str(checkpoint), str(other)],
                      ["export", str(checkpoint), str(tmp_path / "out")]):  # fmt: skip
        assert checkpoint_tool(arguments) == 0
    assert run_ranks(1, resume_run, str(run_dir), str(model)) == [str(checkpoint)]
    # A model without consent: the export, taken for a start.
    for load in (
        lambda: load_config(ModelConfig(), str(tmp_path / "out")),
        lambda: load_tokenizer(str(tmp_path / "out")),
    ):
        try:
            load()
        except UserError as error:
            assert str(tmp_path / "out") in str(error) and "\n" not in str(error)
    assert not executed.exists()
    AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert executed.exists(), "the code was none, so the test showed nothing"


# ----------------------------------------------------------------------------------------------------------
# Chat templates

ESCAPES = [
    "{{{{ messages.__class__.__mro__[1].__subclasses__()[0]('{executed}') }}}}",
    "{{{{ cycler.__init__.__globals__.os.mkdir('{executed}') }}}}",
    "{{{{ lipsum.__globals__['os'].mkdir('{executed}') }}}}",
    "{{{{ raise_exception.__globals__['__builtins__']['__import__']('os').mkdir('{executed}') }}}}",
    "{{{{ self._TemplateReference__context.environment.from_string('x').module.__loader__ }}}}",
    "{{{{ ''|attr('__class__') }}}}{{{{ (''|attr('__class__')).mro() }}}}",
    "{{{{ '{{0.__class__.__mro__}}'.format(messages) }}}}{{{{ messages.append(1) }}}}",
    "{{% set x = messages.append({{}}) %}}",
    "{{{{ strftime_now.__globals__.__builtins__.open('{executed}', 'w') }}}}",
]
FAILURES = [
    "{% if %}", "{{ undefined.x }}", "{{ 1 / 0 }}", "{{ range(10 ** 9) | list }}", "{{ none() }}", "{{ messages + 1 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}",
    "{{ raise_exception('No!') }}", "{{ 'x' * 2 ** 62 }}", "{{ messages[0].content.nothing() }}",
]  # fmt: skip


def tokenizer_with(model: Path, tmp_path: Path, template: str, own: bool) -> Any:
    """A tokenizer with this template, its own or that of `model.chat_template`."""
    if not own:
        (tmp_path / "template.jinja").write_text(template)
        return load_tokenizer(str(model), str(tmp_path / "template.jinja"))
    copy = shutil.copytree(model, tmp_path / "copy", dirs_exist_ok=True)
    (copy / "chat_template.jinja").write_text(template)
    return load_tokenizer(str(copy))


@pytest.mark.parametrize("own", [True, False], ids=["own", "key"])
@pytest.mark.parametrize("template", [*ESCAPES, *FAILURES], ids=range(len(ESCAPES) + len(FAILURES)))
def test_a_template_reaches_nothing_of_the_process(model, tmp_path, template, own):
    executed = tmp_path / "executed"
    template = template.format(executed=executed) if template in ESCAPES else template
    tokenizer = tokenizer_with(model, tmp_path, template, own)
    with pytest.raises(
        UserError, match="model.chat_template: the chat template in use .*cannot render a chat of user"
    ) as e:
        text = render_text(tokenizer, [{"role": "user", "content": "hé"}], add_generation_prompt=True)
        raise AssertionError(text)
    assert "\n" not in str(e.value) and (not own or str(tmp_path / "copy") in str(e.value))
    assert not executed.exists()


def test_a_template_without_end_is_stopped(model, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "_RENDER_S", 0.2)
    loops = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
    tokenizer = tokenizer_with(model, tmp_path, loops, own=True)
    with pytest.raises(UserError, match="model.chat_template: .*ran for more than 0.2 seconds"):
        render_text(tokenizer, [{"role": "user", "content": "x"}], add_generation_prompt=True)


def test_a_model_with_several_templates_is_saved_with_all_of_them(model, tmp_path):
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "x"}
    with OpenRun(config(tmp_path)) as run:
        run.parts = [assets_part(str(model), tokenizer, False)]
        run.save(1)
        saved = Path(
            run.directory.checkpoints.store.path(1), "policy/huggingface/additional_chat_templates/tool_use.jinja"
        )
        assert saved.read_text() == "x"


# ----------------------------------------------------------------------------------------------------------
# Data files


def test_a_line_without_end_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "data.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"prompt": "a", "answer": "b"}\n')
        file.truncate(2**36)  # a sparse file: one line of 64 GB
    rows = read_rows(str(path), "data.train_files")
    assert next(rows)[1] == {"prompt": "a", "answer": "b"}
    with pytest.raises(UserError, match="data.train_files: .*data.jsonl:2 is longer than 64 MiB"):
        next(rows)


def test_a_deep_line_is_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("[" * 100_000 + "]" * 100_000 + "\n")
    with pytest.raises(UserError, match="data.train_files: .*data.jsonl:1 is not JSON .*nested too deeply"):
        next(read_rows(str(path), "data.train_files"))
