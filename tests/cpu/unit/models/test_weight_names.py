"""The tensors that files and engines get are those of `save_pretrained`, on any number of ranks and without ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.architectures import CONVERTED, random_model
from tests.support.ranks import run_ranks
from tests.support.saved_policy import SavedPolicy
from tests.support.tables import table
from trainer.config import ModelConfig, policy_role
from trainer.models.export_weights import export, file_bytes, stream_tensors, write_safetensors
from trainer.models.loading import load_model
from trainer.models.weight_names import empty_model, file_tensors, file_units, module_weights, whole_units
from trainer.workers.rank import Rank


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Iterator[dict[str, Path]]:
    """Directories that `save_pretrained` has written, by architecture."""
    root = tmp_path_factory.mktemp("models")
    for name, config in CONVERTED.items():
        random_model(config, "eager").save_pretrained(root / name)
    yield {name: root / name for name in CONVERTED}


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def assert_equal(found: dict[str, Tensor], directory: Path) -> None:
    expected = load_file(directory / "model.safetensors")
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert tensor.shape == expected[name].shape and torch.equal(tensor, expected[name]), name


@table("name", CONVERTED)
def test_names_and_values_are_those_of_save_pretrained(saved, name):
    model = random_model(CONVERTED[name], "eager")
    weights = weights_of(model)
    units, found = file_units(model, weights), {}
    for unit, parts in whole_units({unit: unit.names for unit in units}, weights.items()):
        tensors = unit.to_files(parts)
        if unit.is_by_rows:
            (whole,) = parts.values()
            for first, rows in ((0, whole[:3]), (3, whole[3:])):
                found |= dict(unit.rows_to_files(rows, first, whole.shape))
            assert set(found) >= set(tensors)
        else:
            found |= tensors
    assert_equal(found, saved[name])
    empty = file_tensors(units, weights, torch.float32)
    assert {one: tensor.shape for one, tensor in empty.items()} == {one: found[one].shape for one in empty}
    back = dict(module_weights(model, found.items()))
    assert set(back) == set(weights) and all(torch.equal(back[one], weights[one]) for one in weights)


def test_experts_are_split_where_the_family_has_them_apart(saved):
    names = set(load_file(saved["mixtral"] / "model.safetensors"))
    assert "model.layers.0.block_sparse_moe.experts.1.w3.weight" in names
    assert "model.layers.0.mlp.experts.gate_up_proj" in set(load_file(saved["gpt_oss"] / "model.safetensors"))


def test_a_tensor_that_the_model_does_not_have_is_refused():
    model = random_model(CONVERTED["mixtral"], "eager")
    with pytest.raises(ValueError, match=r"no weight model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        list(module_weights(model, [("model.layers.0.mlp.experts.gate_up_proj", torch.zeros(1))]))


@table("config", [{"model_type": "own"}, {}, {"model_type": "clip"}])
def test_a_model_that_transformers_does_not_know_keeps_its_names(config):
    assert [unit.first for unit in file_units(empty_model(config), ["experts.gate_up_proj"])] == [
        "experts.gate_up_proj"
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_biases_that_select_experts_stay_float32(tmp_path, dtype):
    """As `from_pretrained` loads them: rounded ones select others."""
    model = random_model(CONVERTED["deepseek_v3"], "eager")
    weights = weights_of(model)
    tensors = file_tensors(file_units(model, weights), weights, dtype)
    precise = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert precise == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    export(saved_policy(model), str(tmp_path / "out"), str(dtype).removeprefix("torch."), 10**9)
    written = load_file(tmp_path / "out/model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == {one: tensors[one].dtype for one in written}


def write_and_stream(rank: Rank, paths: dict[str, Path], out: Path) -> dict[str, dict[str, Tensor]]:
    streamed = {}
    for name, path in paths.items():
        model = ModelConfig(path=str(path), attn_implementation="eager")
        module = load_model(replace(rank.cfg, model=model), str(path), rank.layout, policy_role(rank.cfg))
        write_safetensors(module, str(out / name), torch.float32)
        streamed[name] = {one: tensor.clone() for one, tensor in stream_tensors(module, torch.float32)}
        assert file_bytes(module, torch.float32) == (out / name / "model.safetensors").stat().st_size
    return streamed


def test_ranks_write_and_stream_the_tensors_of_save_pretrained(saved, tmp_path):
    for streamed in run_ranks(2, write_and_stream, saved, tmp_path):
        for name, directory in saved.items():
            assert_equal(streamed[name], directory)
            assert_equal(load_file(tmp_path / name / "model.safetensors"), directory)


def saved_policy(model: PreTrainedModel) -> SavedPolicy:
    return SavedPolicy(weights_of(model), model.config.to_dict())


@pytest.mark.parametrize("most", [10**9, 5000])
@pytest.mark.parametrize("name", CONVERTED)
def test_a_checkpoint_is_exported_with_the_tensors_of_save_pretrained(saved, tmp_path, name, most):
    files = export(saved_policy(random_model(CONVERTED[name], "eager")), str(tmp_path / "out"), "float32", most)
    assert (len(files) > 1) == (most == 5000)
    found: dict[str, Tensor] = {}
    for file in files:
        found |= load_file(tmp_path / "out" / file)
    assert_equal(found, saved[name])
