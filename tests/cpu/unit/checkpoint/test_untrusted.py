"""What a checkpoint holds is data: nothing of it is executed, followed or trusted."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.support.odd_files import replace, rewrite
from tests.support.one_rank import open_run
from tests.support.ranks import run_ranks
from tests.support.templates import ESCAPES
from trainer.checkpoint.__main__ import main as checkpoint_tool
from trainer.checkpoint.tensors import load_metadata
from trainer.config import ModelConfig
from trainer.errors import UserError
from trainer.files.atomic_io import digest_bytes
from trainer.models.files import load_config
from trainer.models.tokenizer import load_tokenizer
from trainer.workers.rank import Rank


def resume_run(rank: Rank, root: str, model: str) -> str:
    try:
        with open_run(rank, root, model) as run:
            run.load()
            return run.resume.checkpoint.path
    except UserError as error:
        return str(error)


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
    assert export(checkpoint, tmp_path / "out") == 1
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


def test_an_export_takes_no_dtype_but_the_known_ones(checkpoint, tmp_path, capsys):
    path = "policy/huggingface/config.json"
    for dtype in ("load", 5, "float64", ["float32"]):
        content = json.loads((checkpoint / path).read_text()) | {"dtype": dtype}
        replace(checkpoint, path, json.dumps(content).encode())
        assert export(checkpoint, tmp_path / "out") == 2, dtype
        assert "--dtype=auto" in capsys.readouterr().err


def test_an_export_with_impossible_files_is_refused(checkpoint, tmp_path, capsys):
    for size in ("nan", "-1", "inf"):
        assert export(checkpoint, tmp_path / "out", "--max-file-gb", size) == 2
        assert "--max-file-gb" in capsys.readouterr().err


def test_absurd_tensors_are_refused_before_memory_is_taken(checkpoint, tmp_path, capsys):
    metadata = load_metadata(io.BytesIO((checkpoint / "policy/.metadata").read_bytes()))
    name = next(name for name in metadata.state_dict_metadata if name.startswith("model."))
    metadata.state_dict_metadata[name].size = torch.Size([2**60])
    replace(checkpoint, "policy/.metadata", pickle.dumps(metadata))
    assert export(checkpoint, tmp_path / "out") == 1
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
    for arguments in (["verify", str(run_dir)], ["export", str(checkpoint), str(tmp_path / "out")]):
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
