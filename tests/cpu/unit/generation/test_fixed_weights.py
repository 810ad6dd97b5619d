"""The weights of a directory, for engines that do not load it themselves."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.errors import UserError
from trainer.generation.transport import FixedWeights


def test_servers_get_a_copy_in_the_dtype_of_the_engines(tmp_path):
    weight, count = torch.randn(3, 2), torch.arange(3)
    save_file({"w": weight, "n": count}, str(tmp_path / "model-1.safetensors"))
    save_file({"v": weight}, str(tmp_path / "model-2.safetensors"))
    files = {"w": "model-1.safetensors", "n": "model-1.safetensors", "v": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    weights = FixedWeights(str(tmp_path), str(tmp_path), "bfloat16")
    with weights.offer() as (source, sending):
        assert sending is None and sorted(os.listdir(source.path)) == ["model-1.safetensors", "model-2.safetensors"]
    copied = load_file(f"{source.path}/model-1.safetensors")
    assert torch.equal(copied["w"], weight.bfloat16()) and torch.equal(copied["n"], count)
    assert weights.kept == source and weights.synced_bytes > weight.nbytes
    weights._dtype = "auto"
    with weights.offer() as (again, _):
        assert not os.path.exists(source.path)
        assert torch.equal(load_file(f"{again.path}/model-2.safetensors")["v"], weight)
    weights.drop_kept()
    assert not os.path.exists(again.path) and weights.kept is None


def test_engines_that_serve_adapters_get_them(tmp_path):
    weights = FixedWeights(str(tmp_path), str(tmp_path), "auto", ("{}", b"tensors"))
    assert not weights.is_checked, "engines start without the adapter"
    with weights.offer() as (source, _):
        assert (source.config, source.weights) == ("{}", b"tensors") and weights.kept == source


def test_a_model_without_safetensors_is_refused(tmp_path):
    with (
        pytest.raises(UserError, match="has no safetensors files, which inference servers load; save the model with"),
        FixedWeights(str(tmp_path), str(tmp_path), "float32").offer(),
    ):
        pass
