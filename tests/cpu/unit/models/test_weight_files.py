"""Files of a model directory that are no files, too large, or lie."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from trainer.errors import UserError
from trainer.models.files import check_one_reading, resolve_model_path, weight_files, weight_shapes
from trainer.models.tiny import TinyShape, build_tiny
from trainer.workers.rank import Rank

FLOATS = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def header(content: object, data: int = 16, length: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + b"\0" * data


HEADERS = {
    "nothing": (b"", "header too small"),
    "a length alone": (header({}, 0, 1 << 63), "header too large"),
    "too long": (header({"a": FLOATS}, length=1000), "invalid header length"),
    "no JSON": (header(b"not json"), "invalid JSON"),
    "a list": (header([1]), "invalid JSON"),
    "too deep": (header(b'{"a":' + b"[" * 100_000), "recursion limit"),
    "no tensor": (header({"a": 1}), "invalid JSON"),
    "unknown type": (header({"a": {**FLOATS, "dtype": "X99\x1b[31m"}}), "unknown variant"),
    "negative": (header({"a": {**FLOATS, "shape": [-2, -2]}}), "integer `-2`"),
    "huge": (header({"a": {**FLOATS, "shape": [1 << 62, 1 << 62]}}), "overflow"),
    "many axes": (header({"a": {**FLOATS, "shape": [1] * 1000}}), "invalid shape"),
    "outside": (header({"a": {**FLOATS, "data_offsets": [16, 32]}}), "invalid offset"),
    "backwards": (header({"a": {**FLOATS, "data_offsets": [16, 0]}}), "invalid offset"),
    "overlapping": (header({"a": FLOATS, "b": {**FLOATS, "data_offsets": [8, 24]}}, 24), "invalid offset"),
    "a gap": (header({"a": FLOATS, "b": {**FLOATS, "data_offsets": [20, 36]}}, 36), "invalid offset"),
    "a rest": (header({"a": FLOATS}, 20), "not fully covered"),
}
"""Files that the library safetensors refuses, and a part of what it says."""


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"a": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    assert resolve_model_path(str(tmp_path)) == str(tmp_path)
    return tmp_path


def test_a_header_that_lies_is_refused_in_one_sentence(model):
    for name, (content, problem) in HEADERS.items():
        (model / "model.safetensors").write_bytes(content)
        with pytest.raises(UserError) as refused:
            resolve_model_path(str(model))
        sentence = str(refused.value)
        assert sentence.startswith(f"model.path={model}: its model.safetensors cannot be used ("), name
        assert problem in sentence and sentence.isprintable(), (name, sentence)


def put(file: Path, kind: str) -> None:
    file.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(file)
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    elif kind == "a directory":
        file.mkdir()
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as one:
            before = os.getcwd()
            os.chdir(file.parent)  # the name of a socket is short
            one.bind(file.name)
            os.chdir(before)


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a directory", "a socket"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json", "generation_config.json"])
def test_what_is_no_file_is_refused_before_it_is_read(model, kind, name):
    put(model / name, kind)
    with pytest.raises(UserError, match=f"its {name} cannot be used .it is no regular file"):
        resolve_model_path(str(model))


@pytest.mark.parametrize(
    "content, problem",
    [
        ({"weight_map": {"a": "../../etc/passwd"}}, "'../../etc/passwd', which is not in its directory"),
        ({"weight_map": {"a": "/etc/passwd"}}, "'/etc/passwd', which is not in its directory"),
        ({"weight_map": {"a": "missing.safetensors"}}, "it names missing.safetensors, which cannot be read"),
        ({"weight_map": {"a": "pipe.safetensors"}}, "pipe.safetensors cannot be used|which is no regular file"),
        ({"weight_map": {"a": 1}}, "weight_map.a is 1"),
        ([], "list instead of fields"),
    ],
)
def test_an_index_names_files_of_its_directory_alone(model, content, problem):
    (model / "model.safetensors.index.json").write_text(json.dumps(content))
    if "pipe" in str(content):
        os.mkfifo(model / "pipe.safetensors")
    with pytest.raises(UserError, match=problem):
        resolve_model_path(str(model))


@pytest.mark.parametrize("name", ["pytorch_model.bin.index.json", "consolidated.safetensors.index.json"])
def test_an_index_whose_weights_were_not_downloaded_is_accepted(model, name):
    (model / name).write_text(json.dumps({"weight_map": {"a": "one.bin", "b": "two.bin"}}))
    assert resolve_model_path(str(model)) == str(model)
    (model / name).write_text(json.dumps({"weight_map": {"a": "1.bin", "b": "two.bin"}}))
    torch.save({}, model / "1.bin")
    with pytest.raises(UserError, match=f"its {name} cannot be used .it names two.bin, which cannot be read"):
        resolve_model_path(str(model))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json"])
def test_pointers_of_git_lfs_are_named(model, name):
    (model / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    with pytest.raises(UserError, match=f"its {name} cannot be used .it is a pointer of Git LFS.*git lfs pull"):
        resolve_model_path(str(model))


def test_links_to_files_are_followed(model, tmp_path_factory):
    blob = tmp_path_factory.mktemp("blobs") / "blob"
    (model / "model.safetensors").rename(blob)
    (model / "model.safetensors").symlink_to(blob)  # as in the cache of the Hub
    assert resolve_model_path(str(model)) == str(model)


def test_files_that_no_library_reads_may_have_any_content(model):
    (model / "model.bin").write_bytes(b"of another program")
    with open(model / "trainer_state.json", "wb") as file:
        file.truncate(1 << 30)
    assert resolve_model_path(str(model)) == str(model)


def test_a_bin_file_is_of_torch(model):
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({}, protocol=0))
    with pytest.raises(UserError, match="its pytorch_model.bin cannot be used .it is no file of torch"):
        resolve_model_path(str(model))
    torch.save({}, model / "pytorch_model.bin")
    resolve_model_path(str(model))


class Hostile:
    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def build(rank: Rank, paths: list[str]) -> list[str]:
    problems = []
    for path in paths:
        try:
            rank.build(roles(rank.cfg, ["policy"]), path)
        except UserError as error:
            problems.append(str(error))
    return problems


def test_weights_that_cannot_be_loaded_are_refused_on_every_rank_and_run_no_code(tmp_path):
    names = ("hostile", "torn", "another", "shape")
    paths = {name: tmp_path / name for name in names}
    for path in paths.values():
        build_tiny(TinyShape(hidden_size=32, intermediate_size=32, num_layers=1), str(path))
    weights = load_file(paths["shape"] / "model.safetensors")
    for name in ("hostile", "torn", "another"):
        (paths[name] / "model.safetensors").unlink()
    torch.save({**weights, "x": Hostile(tmp_path / "ran")}, paths["hostile"] / "pytorch_model.bin")
    torch.save(weights, paths["torn"] / "pytorch_model.bin")
    os.truncate(paths["torn"] / "pytorch_model.bin", 5000)
    torch.save([1, 2], paths["another"] / "pytorch_model.bin")
    name = "model.norm.weight"
    save_file({**weights, name: torch.ones(7)}, paths["shape"] / "model.safetensors")
    first, second = run_ranks(2, build, [str(path) for path in paths.values()], device="cpu")
    assert first == second and len(first) == len(paths), first
    assert not (tmp_path / "ran").exists()
    for problem, path in zip(first, paths.values(), strict=True):
        assert problem.startswith(f"model.path={path}: ") and "\n" not in problem
    assert f"the weight {name} has the shape [7], and config.json describes [32]" in first[3]


def save_ones(path: Path, name: str, *tensors: str) -> None:
    save_file({tensor: torch.ones(1) for tensor in tensors}, path / name)


def write_index(path: Path, **file_of: str) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))


def test_the_weights_are_in_the_files_that_transformers_reads(tmp_path):
    """One file of the usual name, then those of the index; whatever else is there."""
    assert weight_files(str(tmp_path)) == []
    save_ones(tmp_path, "model-1.safetensors", "a", "b")
    save_ones(tmp_path, "model-2.safetensors", "c")
    save_ones(tmp_path, "other.safetensors", "a", "c")
    assert weight_files(str(tmp_path)) == []
    write_index(tmp_path, a="model-1.safetensors", c="model-2.safetensors")
    assert weight_files(str(tmp_path)) == [str(tmp_path / f"model-{number}.safetensors") for number in (1, 2)]
    assert weight_shapes(str(tmp_path))["b"] == (str(tmp_path / "model-1.safetensors"), (1,))
    save_ones(tmp_path, "model.safetensors", "a")
    assert list(weight_shapes(str(tmp_path))) == ["a"]


def test_a_weight_in_two_files_is_refused(tmp_path):
    save_ones(tmp_path, "x.safetensors", "a")
    save_ones(tmp_path, "y.safetensors", "b", "a")
    write_index(tmp_path, a="x.safetensors", b="y.safetensors")
    with pytest.raises(ValueError, match="its x.safetensors and y.safetensors both hold a; remove one of them"):
        weight_shapes(str(tmp_path))


def test_a_weight_that_vllm_reads_from_another_file_is_refused(tmp_path):
    save_ones(tmp_path, "model.safetensors", "a")
    save_ones(tmp_path, "consolidated.safetensors", "other names")
    check_one_reading(str(tmp_path), "model.path")
    save_ones(tmp_path, "model.fp16.safetensors", "a")
    with pytest.raises(UserError, match="transformers reads a from model.safetensors, and vLLM from model.fp16"):
        check_one_reading(str(tmp_path), "model.path")
    write_index(tmp_path, a="model.safetensors")
    check_one_reading(str(tmp_path), "model.path")
    write_index(tmp_path, a="model.fp16.safetensors")
    with pytest.raises(UserError, match="from model.fp16.safetensors; remove the file that is not of this model"):
        check_one_reading(str(tmp_path), "model.path")
