"""A Hugging Face directory from the files of a checkpoint, without ranks: plain weights, adapters, and merged ones."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from trainer.errors import UserError
from trainer.files.atomic_io import digest_weights
from trainer.models.export_weights import export, read_policy

ASSETS = "policy/huggingface/"
CONFIG = {"model_type": "qwen3", "tie_word_embeddings": True, "dtype": "bfloat16"}
WEIGHTS = {
    "model.layers.0.q_proj.weight": torch.arange(12.0).view(3, 4),
    "lm_head.weight": torch.ones(5, 4),
    "steps": torch.arange(3),
}
Q_PROJ = "model.layers.0.q_proj"
ADAPTER = {
    f"{Q_PROJ}.lora_A.default.weight": torch.arange(8.0).view(2, 4),
    f"{Q_PROJ}.lora_B.default.weight": torch.arange(6.0).view(3, 2),
}
MOST = 10**9


class Files:
    """The files of a checkpoint, as `export` reads them, in memory."""

    path = "run/checkpoints/global_step_3"

    def __init__(self, weights: dict[str, Tensor], **files: Any):
        self._tensors = {f"model.{name}": tensor for name, tensor in weights.items()} | {"rng": torch.zeros(2)}
        files = {"config": CONFIG, **files}
        self._files = {f"{ASSETS}{name}.json": value for name, value in files.items() if name != "start_weights"}
        self._files |= {"start_weights.json": files.get("start_weights", {}), "data.json": {}}

    @property
    def entries(self) -> set[str]:
        return set(self._files)

    def read(self, path: str) -> bytes:
        return json.dumps(self._files[path]).encode()

    def json(self, path: str, shape: dict) -> dict[str, Any]:
        return self._files.get(path, {})

    def shapes(self, role: str) -> dict[str, Any]:
        assert role == "policy"
        return {
            name: TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.size(), [])
            for name, tensor in self._tensors.items()
        }

    def tensors(self, role: str, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._tensors[name] for name in names}


def with_adapters(base: str, **start_weights: str) -> Files:
    lora = {"r": 2, "lora_alpha": 4, "base_model_name_or_path": base}
    return Files(ADAPTER, adapter_config=lora, start_weights=start_weights)


@pytest.fixture
def base(tmp_path) -> Path:
    """The directory of the adapted weights."""
    path = tmp_path / "base"
    path.mkdir()
    save_file(WEIGHTS, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)]
)
def test_a_policy_is_written_in_the_wanted_type_without_its_tied_head(dtype, expected, tmp_path):
    out = tmp_path / "out"
    files = Files(WEIGHTS, tokenizer={"version": "1.0"})
    assert export(files, str(out), dtype, MOST) == ["model.safetensors"]
    written = load_file(out / "model.safetensors")
    assert set(written) == {f"{Q_PROJ}.weight", "steps"}
    assert torch.equal(written[f"{Q_PROJ}.weight"], WEIGHTS[f"{Q_PROJ}.weight"].to(expected))
    assert torch.equal(written["steps"], WEIGHTS["steps"]), "whole numbers keep their type"
    assert json.loads((out / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")
    assert set(os.listdir(out)) == {"config.json", "model.safetensors", "tokenizer.json"}, "and nothing of the run"


def test_a_head_of_its_own_is_written(tmp_path):
    files = Files(WEIGHTS, config={**CONFIG, "tie_word_embeddings": False})
    export(files, str(tmp_path / "out"), "float32", MOST)
    assert "lm_head.weight" in load_file(tmp_path / "out/model.safetensors")


def test_large_policies_have_several_files_and_an_index(tmp_path):
    names = export(Files(WEIGHTS), str(tmp_path / "out"), "float32", 50)
    assert len(names) == 2
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names) and index["metadata"]["total_size"] == 12 * 4 + 3 * 8


def test_adapters_are_written_with_the_names_and_the_type_of_peft(tmp_path):
    out = tmp_path / "out"
    assert export(with_adapters("x"), str(out), "auto", 1, adapter=True) == ["adapter_model.safetensors"]
    written = load_file(out / "adapter_model.safetensors")
    for side in "AB":
        name = f"base_model.model.{Q_PROJ}.lora_{side}.weight"
        assert torch.equal(written[name], ADAPTER[f"{Q_PROJ}.lora_{side}.default.weight"])
    assert set(os.listdir(out)) == {"adapter_config.json", "adapter_model.safetensors"}


def test_merged_weights_are_those_of_the_base_plus_the_scaled_product(base, tmp_path):
    export(
        with_adapters(str(base), **{"model.path": digest_weights(str(base))}), str(tmp_path / "out"), "float32", MOST
    )
    written = load_file(tmp_path / "out/model.safetensors")
    a, b = (ADAPTER[f"{Q_PROJ}.lora_{side}.default.weight"] for side in "AB")
    assert torch.equal(written[f"{Q_PROJ}.weight"], WEIGHTS[f"{Q_PROJ}.weight"] + 4 / 2 * b @ a)
    assert torch.equal(written["lm_head.weight"], WEIGHTS["lm_head.weight"])
    assert not (tmp_path / "out/adapter_config.json").exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("other weights", "its weights are not those that the adapters were trained on"),
        ("other names", f"has no {Q_PROJ}.weight, which has an adapter; its files use other names"),
        ("no weights", "contains no safetensors, and the adapters need the weights that were there"),
        ("damaged", "cannot be read ("),
    ],
)
def test_a_base_that_does_not_fit_is_refused_and_nothing_is_written(change, problem, base, tmp_path):
    digest = digest_weights(str(base))
    file = base / "model.safetensors"
    if change == "other weights":
        save_file({name: tensor + 1 for name, tensor in WEIGHTS.items()}, file)
    elif change == "other names":
        save_file({f"transformer.{name}": tensor for name, tensor in WEIGHTS.items()}, file)
    elif change == "no weights":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError) as refused:
        export(with_adapters(str(base), **{"model.path": digest}), str(tmp_path / "out"), "float32", MOST)
    assert problem in str(refused.value) or change == "damaged"
    assert os.listdir(tmp_path) == ["base"]


@pytest.mark.parametrize(
    ("files", "options", "problem"),
    [
        (Files(WEIGHTS), {"adapter": True}, "its policy was trained without adapters"),
        (Files(WEIGHTS), {"base": "x"}, "its policy was trained without adapters"),
        (Files(WEIGHTS, config={"dtype": "int8"}), {}, "--dtype=auto: the config of the model has 'int8'"),
    ],
)
def test_what_a_checkpoint_does_not_have_is_refused(files, options, problem, tmp_path):
    with pytest.raises(UserError, match=problem):
        export(files, str(tmp_path / "out"), "auto", MOST, **options)


def test_a_directory_that_exists_is_not_overwritten(tmp_path):
    with pytest.raises(UserError, match="exists already; name another directory"):
        export(Files(WEIGHTS), str(tmp_path), "auto", MOST)


def test_the_policy_is_read_as_it_was_saved():
    found = read_policy(Files(WEIGHTS))
    assert torch.equal(found[f"{Q_PROJ}.weight"], WEIGHTS[f"{Q_PROJ}.weight"]) and "rng" not in found
    assert set(read_policy(with_adapters("x"))) == {f"base_model.model.{Q_PROJ}.lora_{side}.weight" for side in "AB"}
    with pytest.raises(UserError, match="contains no policy"):
        read_policy(Files({}))
