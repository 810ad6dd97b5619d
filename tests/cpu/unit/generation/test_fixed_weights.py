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
    weights = FixedWeights(str(tmp_path), str(tmp_path))
    path = weights.share_weights("bfloat16")
    assert sorted(os.listdir(path)) == ["model-1.safetensors", "model-2.safetensors"]
    copied = load_file(f"{path}/model-1.safetensors")
    assert torch.equal(copied["w"], weight.bfloat16()) and torch.equal(copied["n"], count)
    again = weights.share_weights("auto")
    assert not os.path.exists(path) and torch.equal(load_file(f"{again}/model-2.safetensors")["v"], weight)
    assert weights.call_one("policy", "weight_bytes", "auto") > weight.nbytes
    weights.drop_shared()
    assert not os.path.exists(again)


def test_engines_that_serve_adapters_get_them(tmp_path):
    weights = FixedWeights(str(tmp_path), str(tmp_path), ("{}", b"tensors"))
    assert weights.call_one("policy", "adapter_config", "base") == "{}"
    assert weights.call("policy", "adapter_weights") == b"tensors"


def test_a_model_without_safetensors_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no safetensors files, which inference servers load; save the model with"):
        FixedWeights(str(tmp_path), str(tmp_path)).share_weights("float32")
